# SPDX-License-Identifier: Apache-2.0
"""commit's optional outputs, hidden rows in place, and sampled steps of inputs at their edges."""

import pytest
import torch
from commit_setup import expected, int64s, outputs, random_tree_batch, run
from compare import assert_bits_equal
from test_commit_sampling import call, make
from tree_setup import links_of_parents
from unit_cases import WIDTHS

from specfused import ops

NAN, INF = float("nan"), float("inf")
STAR = [None, 0, 0, 0]


def hidden_rows(rng, rows, size, dtype, device, stride):
    wide = torch.randn(rows, stride, generator=rng).to(dtype).to(device)
    return wide[:, :size]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", WIDTHS)
def test_hidden_rows_in_place(width, dtype, device, rng):
    """Rows of 2050 elements in a wider tensor: two pieces, odd alignment; all else stays."""
    bs, size = 17, 2050
    hidden = hidden_rows(rng, bs * width, size, dtype, device, size + 7)
    whole = hidden.as_strided((bs * width, size + 7), hidden.stride())
    want = whole.clone()
    draft, targets, links = random_tree_batch(rng, bs, width)
    decision, paths = expected(draft, targets, links)
    for r, path in enumerate(paths):
        rows = torch.tensor(path, device=device) + r * width
        want[r * width : r * width + len(path), :size] = hidden[rows]
    assert run(draft, targets, device, links=links, hidden_states=hidden) == decision
    assert_bits_equal(whole, want, "hidden rows")


def test_hidden_rows_of_every_overlap(device, rng):
    """All rows but one move by one: a row is stored only after it was read."""
    width, size = 64, 3 * 4096
    parents = [None, *([0] * 2), *range(2, width - 1)]  # 0 - (1, 2 - 3 - 4 ...)
    hidden = hidden_rows(rng, width, size, torch.bfloat16, device, size)
    want = hidden.clone()
    want[1 : width - 1] = hidden[2:]
    links = tuple([part] for part in links_of_parents(parents))
    draft = [[100 + node for node in range(width)]]
    targets = [[102, 0, *range(103, 100 + width), 5]]
    got = run(draft, targets, device, links=links, hidden_states=hidden)
    assert got["accept_lens"] == [width - 1]
    assert_bits_equal(hidden, want, "hidden rows")


@pytest.mark.parametrize("width", [1, 5])
def test_hidden_rows_of_a_chain_stay(width, device, rng):
    hidden = hidden_rows(rng, 3 * width, 64, torch.bfloat16, device, 64)
    want = hidden.clone()
    tokens = [list(range(width))] * 3
    run(tokens, [[t + 1 for t in row] for row in tokens], device, hidden_states=hidden)
    assert_bits_equal(hidden, want)


def test_hidden_rows_and_kv_of_a_sampled_step(device, rng):
    """The sampled walk moves what the greedy one would for the same path."""
    args, *_ = make(rng, 9, 16, 30)
    hidden = hidden_rows(rng, 9 * 16, 40, torch.float32, device, 40)
    pool = torch.randn(9 * 16, 24, generator=rng).to(device)
    before, pool_before = hidden.clone(), pool.clone()
    table = dict(zip(("kv_ptrs", "kv_row_bytes", "num_slots"), ops.kv_table([pool]), strict=True))
    loc = torch.randperm(9 * 16, generator=rng)
    got = call(args, device, hidden_states=hidden, out_cache_loc=loc.to(device), **table)
    assert max(got["accept_lens"]) > 1
    for r, count in enumerate(got["accept_lens"]):
        for j, node in enumerate(got["accept_index"][r][:count]):
            assert_bits_equal(hidden[r * 16 + j], before[node], "hidden")
            assert_bits_equal(pool[loc[r * 16 + j]], pool_before[loc[node]], "KV")


@pytest.mark.parametrize("sampled", [False, True])
def test_token_ids_as_int32(sampled, device, rng):
    if sampled:
        args, *_ = make(rng, 5, 8, 30)
        long = call(args, device)["next_token_ids"]
        short = torch.full((40,), -99, dtype=torch.int32, device=device)
        out = outputs(5, 8, device)
        given = {k: v.to(device) for k, v in args.items()}
        size = ops.commit_workspace_bytes(5, 8, 30)
        workspace = torch.zeros(size, dtype=torch.uint8, device=device)
        ops.commit(**given, **out, next_token_ids=short, workspace=workspace)
    else:
        draft, targets, links = random_tree_batch(rng, 5, 8)
        long = expected(draft, targets, links)[0]["next_token_ids"]
        short = torch.full((40,), -99, dtype=torch.int32, device=device)
        ops.commit(
            int64s(draft, device),
            torch.zeros(5, dtype=torch.int64, device=device),
            **outputs(5, 8, device),
            targets=int64s(targets, device),
            retrieve_next_token=int64s(links[0], device),
            retrieve_next_sibling=int64s(links[1], device),
            next_token_ids=short,
        )
    assert short.tolist() == long


def test_new_lengths_may_be_the_lengths(device):
    """In place: seq_lens advances, positions start where it was."""
    lens = torch.tensor([5, 9], device=device)
    out = outputs(2, 3, device, 3) | {"new_seq_lens": lens}
    tokens = int64s([[0, 1, 2]] * 2, device)
    ops.commit(tokens, lens, **out, targets=tokens + 1)
    assert lens.tolist() == [8, 12]
    assert out["positions"].tolist() == [5, 6, 7, 9, 10, 11]
    assert out["window_ends"].tolist() == [8, 12]


def one(probs, draft, coins, final, *, by="target_probs", parents=STAR, temperature=1.0, **more):
    """A single request; probs: a row for each node, or one for all."""
    rows = torch.tensor(probs, dtype=torch.float32)
    rows = rows if rows.dim() == 2 else rows.repeat(len(draft), 1)
    links = links_of_parents(parents)
    args = {
        "draft_tokens": torch.tensor([draft]),
        "seq_lens": torch.tensor([3]),
        "coins": torch.tensor([coins] if isinstance(coins, list) else [[coins] * len(draft)]),
        "coins_final": torch.tensor([float(final)]),
        "retrieve_next_token": torch.tensor([links[0]]),
        "retrieve_next_sibling": torch.tensor([links[1]]),
        by: rows,
        **more,
    }
    if by == "logits":
        args["temperatures"] = torch.tensor([temperature])
    return args


def answer(args, device):
    got = call(args, device)
    return got["accept_tokens"][0][: got["accept_lens"][0]], got["invalid_logits"][0]


EDGES = {  # name -> (arguments, emitted tokens)
    "coin 0 takes no token of probability 0": (
        one([0, 0.5, 0, 0.5], [9, 0, 2, 3], 0.0, 0.1),
        [3, 1],
    ),
    "coin 0, all drafts impossible": (one([0, 0, 0, 1], [9, 0, 1, 2], 0.0, 0.0), [3]),
    "final coin 0 draws the first possible": (one([0, 0.5, 0, 0.5], [9, 0, 0, 0], 0.9, 0.0), [1]),
    "final coin 1 draws the last possible": (one([0.5, 0.5, 0, 0], [9, 2, 2, 2], 0.9, 1.0), [1]),
    "coin 1 takes a certain token": (one([0, 1, 0, 0], [9, 1, 2, 3], 1.0, 1.0), [1, 1]),
    "coin 1, not certain": (one([0.5, 0.5, 0, 0], [9, 0, 2, 3], 1.0, 0.0), [1]),
    "coin at the border": (one([0.5, 0.5, 0, 0], [9, 0, 2, 3], 0.5, 0.0), [1]),
    "below the border": (one([0.5, 0.5, 0, 0], [9, 0, 2, 3], 0.49, 0.0), [0, 0]),
    "NaN coins": (one([0.25] * 4, [9, 0, 1, 2], NAN, NAN), [3]),
    "negative coins": (one([0, 1, 0, 0], [9, 0, 1, 2], -1.0, -1.0), [1, 1]),
    "siblings add up": (one([0.25] * 4, [9, 0, 1, 2], 0.6, 0.0), [2, 0]),
    "equal siblings count once": (one([0.25] * 4, [9, 0, 0, 1], 0.4, 0.0), [1, 0]),
    "all equal": (one([0.25] * 4, [9, 0, 0, 0], 0.3, 0.0), [1]),
    "two equal, the third too late": (one([0.25] * 4, [9, 1, 1, 0], 0.6, 0.99), [3]),
    "drafts outside the vocabulary": (one([0.25] * 4, [9, -1, 4, 1 << 40], 0.0, 0.99), [3]),
    "undershoot of the distribution": (one([1e-7, 2e-7, 0, 0], [9, 3, 3, 3], 0.5, 0.99), [1]),
    "no mass left": (
        one([0, 1, 0, 0], [9, 1, 2, 3], 0.99, 0.5, threshold_single=2.0, threshold_acc=2.0),
        [1],
    ),
    "a row of nothing": (one([0, 0, 0, 0], [9, 1, 2, 3], 0.5, 0.5), [0]),
    "temperature 0 is the largest": (
        one([1, 3, 3, 2.0], [9, 3, 0, 0], 0.5, 0.4, by="logits", temperature=0.0),
        [1],
    ),
    "endless temperature is uniform": (
        one([1, 90, -50, 2.0], [9, 3, 0, 0], 0.24, 0.6, by="logits", temperature=INF),
        [3, 2],
    ),
    "-inf logits have no mass": (
        one([-INF, 0, -INF, 0], [9, 0, 2, 3], 0.49, 0.99, by="logits"),
        [3, 3],
    ),
    "q 0 is no draft": (
        one([0.5, 0.5, 0, 0], [9, 0, 2, 3], 0.0, 0.0, draft_probs=torch.zeros(1, 4, 4)),
        [0],
    ),
    "p = q leaves nothing": (
        one(
            *([0.5, 0.5, 0, 0], [9, 0, 2, 3], 1.0, 0.9),
            draft_probs=torch.tensor([0.5, 0.5, 0, 0]).repeat(1, 4, 1),
        ),
        [0],
    ),
}


@pytest.mark.parametrize("name", EDGES)
def test_edges(name, device):
    args, emitted = EDGES[name]
    assert answer(args, device) == (emitted, 0)


BAD_ROWS = {  # name -> (arguments, emitted tokens)
    "a NaN logit": (one([0, 5, NAN, 0], [9, 1, 0, 3], 0.0, 0.5, by="logits"), [2]),
    "all NaN": (one([NAN] * 4, [9, 1, 0, 3], 0.0, 0.5, by="logits"), [0]),
    "+inf": (one([0, 5, 0, INF], [9, 1, 0, 3], 0.0, 0.5, by="logits"), [3]),
    "all -inf": (one([-INF] * 4, [9, 1, 0, 3], 0.0, 0.5, by="logits"), [0]),
    "all +inf": (one([INF] * 4, [9, 1, 0, 3], 0.0, 0.5, by="logits"), [0]),
    "behind an accepted node": (
        one(
            [[0, 9, 0, 0], [NAN, 0, 0, 0], [0.0] * 4, [0.0] * 4],
            *([9, 1, 0, 3], 0.1, 0.5),
            by="logits",
        ),
        [1, 0],
    ),
    "NaN probabilities": (one([NAN] * 4, [9, 1, 0, 3], 0.0, 0.5), [0]),
    "a NaN probability": (one([0.5, NAN, 0, 0.5], [9, 1, 2, 2], 0.0, 0.9), [3]),
    "infinite and negative": (one([INF, 0.5, -1, 0.5], [9, 0, 2, 2], 0.0, 0.9), [3]),
}


@pytest.mark.parametrize("name", BAD_ROWS)
def test_bad_rows(name, device):
    """One token of the vocabulary, and the flag."""
    args, emitted = BAD_ROWS[name]
    assert answer(args, device) == (emitted, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("vocab", [5, 9001, 40000])
def test_bad_rows_of_many_slices(vocab, dtype, device, rng):
    """Anywhere in a long row; rows that are not visited do not count."""
    width, bs = 3, 6
    logits = torch.randn(bs, width, vocab, generator=rng).to(dtype)
    logits[0, 0, vocab // 2] = NAN
    logits[1, 0, vocab - 1] = INF
    logits[2, 0] = -INF
    logits[3, 1] = NAN  # behind a rejected draft
    logits[4, 0, : vocab - 1] = -INF
    logits[5, 0, 0] = NAN
    args = {
        "draft_tokens": torch.full((bs, width), vocab + 3),
        "seq_lens": torch.zeros(bs, dtype=torch.int64),
        "coins": torch.rand(bs, width, generator=rng),
        "coins_final": torch.rand(bs, generator=rng),
        "logits": logits.view(bs * width, vocab),
        "temperatures": torch.ones(bs),
    }
    got = call(args, device)
    assert got["accept_lens"] == [1] * bs
    assert got["invalid_logits"] == [1, 1, 1, 0, 0, 1]
    tokens = got["bonus_tokens"]
    assert (tokens[:3], tokens[4:]) == ([vocab // 2, vocab - 1, 0], [vocab - 1, 0])
    assert 0 <= tokens[3] < vocab


@pytest.mark.parametrize("by", ["logits", "target_probs"])
def test_no_sampled_request(by, device):
    """bs 0: nothing to do, nothing is launched."""
    none = torch.zeros(0, 4, dtype=torch.int64)
    args = {
        "draft_tokens": none,
        "seq_lens": none[:, 0],
        "coins": torch.zeros(0, 4),
        "coins_final": torch.zeros(0),
        by: torch.zeros(0, 100),
    }
    if by == "logits":
        args["temperatures"] = torch.zeros(0)
    assert call(args, device)["accept_index"] == []
