# SPDX-License-Identifier: Apache-2.0
"""commit: the choice of the target, the walk, and the bookkeeping. test_commit_kv.py has the KV."""

import pytest
import reference
import torch
from commit_setup import expected, random_tree_batch, run
from tree_setup import chain_parents, links_of_parents, randint
from unit_cases import WIDTHS

STAR = ([1, -1, -1, -1], [-1, 2, 3, -1])
TWO = ([1, 3, -1, -1, -1], [-1, 2, -1, 4, -1])  # root - (1 - (3, 4), 2)
CHAIN = ([1, 2, 3, -1], [-1] * 4)
HAND = {  # name -> (links or None, draft, targets, path width, accepted nodes)
    "all rejected": (STAR, [5, 6, 7, 8], [9, 6, 7, 8], 4, [0]),
    "last sibling": (STAR, [5, 6, 7, 8], [8, 1, 2, 3], 4, [0, 3]),
    "first of equal siblings": (STAR, [5, 7, 7, 7], [7, 1, 2, 3], 4, [0, 1]),
    "second level": (TWO, [0, 1, 2, 3, 4], [1, 4, 9, 9, 6], 5, [0, 1, 4]),
    "the root's own token is no draft": (TWO, [1, 9, 8, 7, 6], [1, 7, 7, 7, 7], 5, [0]),
    "no way back up": (TWO, [0, 1, 2, 3, 4], [2, 4, 3, 9, 6], 5, [0, 2]),
    "whole chain": (CHAIN, [0, 1, 2, 3], [1, 2, 3, 4], 4, [0, 1, 2, 3]),
    "chain without links": (None, [0, 1, 2, 3], [1, 2, 3, 4], 4, [0, 1, 2, 3]),
    "chain broken": (None, [0, 1, 2, 3], [1, 9, 3, 4], 4, [0, 1]),
    "depth limit": (None, [0, 1, 2, 3], [1, 2, 3, 4], 2, [0, 1]),
    "depth limit of the root": (None, [0, 1, 2, 3], [1, 2, 3, 4], 1, [0]),
    "room beyond the tree": (None, [0, 1], [1, 2], 7, [0, 1]),
    "one node": (None, [3], [4], 1, [0]),
    "one node with links": (([-1], [-1]), [3], [4], 1, [0]),
    "child behind the end": (([9, -1], [-1, -1]), [0, 1], [1, 2], 2, [0]),
    "child is itself": (([0, -1], [-1, -1]), [1, 1], [1, 1], 2, [0]),
    "child loops back": (([1, 0], [-1, -1]), [1, 1], [1, 1], 2, [0, 1]),
    "sibling loops": (([1, -1, -1], [-1, 2, 1]), [0, 5, 6], [9, 9, 9], 3, [0]),
    "sibling is itself": (([1, -1], [-1, 1]), [0, 5], [9, 9], 2, [0]),
    "negative garbage": (([-(1 << 62), -1], [-1, -1]), [0, 1], [1, 2], 2, [0]),
    "huge garbage": (([(1 << 62), -1], [-1, -1]), [0, 1], [1, 2], 2, [0]),
}


@pytest.mark.parametrize("name", HAND)
def test_hand_written(name, device):
    links, draft, targets, path, nodes = HAND[name]
    batch = links and ([links[0]] * 3, [links[1]] * 3)
    got = run([draft] * 3, [targets] * 3, device, links=batch, path=path, lengths=[7, 0, 1 << 40])
    tokens = [targets[node] for node in nodes]
    rest, behind = [-1] * (path - len(nodes)), [0] * (len(draft) - len(nodes))
    starts = (7, 0, 1 << 40)
    assert got == {
        "accept_index": [[r * len(draft) + node for node in nodes] + rest for r in range(3)],
        "num_correct_drafts": [len(nodes) - 1] * 3,
        "accept_lens": [len(nodes)] * 3,
        "accept_tokens": [tokens + rest] * 3,
        "bonus_tokens": [tokens[-1]] * 3,
        "new_seq_lens": [start + len(nodes) for start in starts],
        "next_token_ids": (tokens + behind) * 3,
        "select_index": [r * len(draft) + len(nodes) - 1 for r in range(3)],
        "positions": [start + j for start in starts for j in range(len(draft))],
        "window_ends": [start + len(draft) for start in starts],
        "invalid_logits": [0] * 3,
    }


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("bs", [1, 3, 17, 130])
def test_random_trees(bs, width, device, rng):
    draft, targets, links = random_tree_batch(rng, bs, width)
    path = randint(rng, 1, width + 2)
    got = run(draft, targets, device, links=links, path=path)
    assert got == expected(draft, targets, links, path)[0]


@pytest.mark.parametrize("width", WIDTHS)
def test_random_chains(width, device, rng):
    """Links of a chain and no links at all give the same."""
    draft = torch.randint(0, 2, (17, width), generator=rng).tolist()
    targets = torch.randint(0, 2, (17, width), generator=rng).tolist()
    links = links_of_parents(chain_parents(width))
    got = run(draft, targets, device)
    assert got == expected(draft, targets)[0]
    assert got == run(draft, targets, device, links=tuple([part] * 17 for part in links))


@pytest.mark.parametrize("width", [2, 16, 64])
def test_garbage_links_terminate(width, device, rng):
    """Any integers as links: the walk ends, and what it accepts is an ascending path."""
    bs = 64
    links = torch.randint(-2, width + 2, (2, bs, width), generator=rng).tolist()
    draft = [[1] * width] * bs  # every comparison holds: the longest walks there are
    got = run(draft, draft, device, links=links)
    assert got == expected(draft, draft, links)[0]


LOGIT_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", LOGIT_DTYPES)
@pytest.mark.parametrize("vocab", [1, 2, 33, 1000, 32003, 151936])
def test_logits(vocab, dtype, device, rng):
    """argmax with ties (few distinct values), in rows of a wider tensor."""
    bs, width = (3, 4) if vocab < 100000 else (1, 2)
    wide = torch.full((bs * width, vocab + 5), 1e4, dtype=dtype)
    wide[:, :vocab] = torch.randint(-8, 9, (bs * width, vocab), generator=rng).to(dtype) / 4
    logits = wide.to(device)[:, :vocab]
    choice = torch.tensor(reference.first_argmax(wide[:, :vocab])).view(bs, width).tolist()
    draft = torch.randint(0, 3, (bs, width), generator=rng).tolist()
    for r in range(bs):  # let some drafts be right
        for node in range(1, width):
            if randint(rng, 0, 2):
                draft[r][node] = choice[r][node - 1]
    assert run(draft, logits, device) == expected(draft, choice)[0]


@pytest.mark.parametrize("dtype", LOGIT_DTYPES)
def test_ties_take_the_lowest_index(dtype, device, rng):
    """Equal maxima far apart, also in parts of the row that different CTAs read."""
    vocab, rows = 50000, 12
    logits = torch.zeros(rows, vocab, dtype=dtype)
    lowest = []
    for row in range(rows):
        places = torch.randint(0, vocab, (4,), generator=rng)
        logits[row, places] = 3
        lowest.append(int(places.min()))
    got = run([[-5] * 1 for _ in range(rows)], logits.to(device), device)
    assert got["bonus_tokens"] == lowest


@pytest.mark.parametrize("dtype", LOGIT_DTYPES)
def test_unusual_logits(dtype, device, rng):
    """-inf rows, +inf, NaN first and last, -0 beside 0: a token of the vocabulary, and the flag."""
    vocab = 9001
    inf, nan = float("inf"), float("nan")
    base = torch.randn(10, vocab, generator=rng).to(dtype)
    base[0] = -inf
    base[1] = nan
    base[2, 17] = nan
    base[3, [5000, 8000]] = inf
    base[4, vocab - 1] = torch.copysign(torch.tensor(nan), torch.tensor(-1.0))
    base[4, 3] = inf
    base[5] = -inf
    base[5, vocab - 1] = torch.finfo(dtype).min
    base[6] = -0.0
    base[6, 100] = 0.0
    base[7, [40, 4100]] = nan
    base[8] = torch.finfo(dtype).min
    base[9, 0] = nan
    want = [0, 0, 17, 5000, vocab - 1, vocab - 1, 0, 40, 0, 0]
    got = run([[-5] for _ in range(10)], base.to(device), device)
    assert got["bonus_tokens"] == want
    assert got["invalid_logits"] == [1, 1, 1, 1, 1, 0, 0, 1, 0, 1]
    assert reference.first_argmax(base) == want


@pytest.mark.parametrize("path,flag", [(2, 0), (3, 1)])
def test_only_visited_rows_are_flagged(path, flag, device):
    """Node 1 is accepted, node 2 behind a depth limit of 2 is not, node 3 is rejected."""
    logits = torch.zeros(4, 50)
    logits[0, 5], logits[1, 6], logits[2, 7] = 3, 3, float("inf")
    logits[3] = float("nan")
    got = run([[0, 5, 6, 8]], logits.to(device), device, path=path)
    assert got["accept_index"] == [list(range(path))]
    assert got["invalid_logits"] == [flag]


def test_large_tokens(device):
    """Token ids up to the 32-bit outputs; compared as 64-bit integers, not truncated."""
    big = (1 << 31) - 1
    got = run([[0, big], [0, 5 + (1 << 32)]], [[big, 7], [5, 7]], device)
    assert got["accept_tokens"] == [[big, 7], [5, -1]]
    assert got["bonus_tokens"] == [7, 5]
