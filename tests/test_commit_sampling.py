# SPDX-License-Identifier: Apache-2.0
"""commit with coins: the same decisions as the definition. test_sampling_law.py has the law."""

import pytest
import torch
from commit_setup import bookkeeping, outputs
from sampling_reference import sampled_step
from tree_setup import chain_parents, links_of_parents, random_parents

from specfused import ops

SOURCES = ("float32", "bfloat16", "float16", "probs")
ROUNDING = 1e-5  # a coin this near to a border may fall on either side in float arithmetic


def peaked_logits(rng, bs, width, vocab, draft, temperatures):
    """A few tokens hold most of the mass, drafted ones among them."""
    logits = torch.randn(bs, width, vocab, generator=rng)
    for _ in range(2):
        tokens = draft[:, torch.randint(0, width, (width,), generator=rng)].clamp(0, vocab - 1)
        height = torch.rand(bs, width, 1, generator=rng) * 3 + torch.tensor(float(vocab)).log()
        logits.scatter_(2, tokens[..., None], height)
    return logits * temperatures.view(-1, 1, 1)


def make(rng, bs, width, vocab, source="float32", tree="random"):
    """Arguments of commit, the links that all requests share, the target's probabilities."""
    links = None
    if tree == "random":
        parents = random_parents(width, rng, keep=0.95)
        if width >= 16:
            parents[1] = 0  # else all children of the root may be cut off, and nobody gets on
        links = links_of_parents(parents)
    elif tree == "chain links":
        links = links_of_parents(chain_parents(width))
    elif tree == "wild":
        links = torch.randint(-2, width + 2, (2, width), generator=rng).tolist()
    draft = torch.randint(0, min(vocab, 6), (bs, width), generator=rng) * max(vocab // 7, 1)
    temperatures = torch.rand(bs, generator=rng) + 0.5
    logits = peaked_logits(rng, bs, width, vocab, draft, temperatures)
    args = {
        "draft_tokens": draft,
        "seq_lens": torch.randint(0, 1000, (bs,), generator=rng),
        "coins": torch.rand(bs, width, generator=rng),
        "coins_final": torch.rand(bs, generator=rng),
    }
    if source == "probs":
        probs = (logits / temperatures.view(-1, 1, 1)).softmax(2)
        args["target_probs"] = probs.view(bs * width, vocab)
        probs = probs.double()
    else:
        logits = logits.to(getattr(torch, source))
        args["logits"] = logits.view(bs * width, vocab)
        args["temperatures"] = temperatures
        probs = (logits.double() / temperatures.double().view(-1, 1, 1)).softmax(2)
    if links is not None:
        for name, part in zip(("retrieve_next_token", "retrieve_next_sibling"), links, strict=True):
            args[name] = torch.tensor(part).repeat(bs, 1)
    return args, links, probs


def call(args, device, path=None, **more):
    """commit of everything on the device, into poisoned outputs; returns those."""
    bs, width = args["draft_tokens"].shape
    vocab = args["logits" if "logits" in args else "target_probs"].shape[1]
    size = ops.commit_workspace_bytes(bs, width, vocab)
    out = outputs(bs, path or width, device, width)
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in args.items()}
    workspace = torch.full((size,), 0xA5, dtype=torch.uint8, device=device)
    ops.commit(**given, **out, **more, workspace=workspace)
    return {name: tensor.tolist() for name, tensor in out.items()}


def check(got, args, links, probs, path=None, allow=0.05, **rule):
    """Bit for bit where no coin is near a border; few are."""
    bs, width = args["draft_tokens"].shape
    path = path or width
    draft, coins, final = (args[name] for name in ("draft_tokens", "coins", "coins_final"))
    paths, bonus, margin = sampled_step(links, draft, probs, coins, final, path=path, **rule)
    tokens = [
        [int(draft[r, node]) for node in nodes[1:]] + [int(bonus[r])]
        for r, nodes in enumerate(paths)
    ]
    want = bookkeeping(paths, tokens, args["seq_lens"].tolist(), width, path)
    near = [r for r in range(bs) if margin[r] < ROUNDING]
    assert len(near) <= max(2, allow * bs), "the inputs decide too little"
    for name, values in want.items():
        per = len(values) // bs
        for r in range(bs):
            if r in near:
                continue
            mine = got[name][r * per : (r + 1) * per]
            assert mine == values[r * per : (r + 1) * per], f"{name} of request {r}"
    vocab = probs.shape[2]
    assert all(0 <= token < vocab for token in got["bonus_tokens"])
    return paths


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("width", [1, 2, 4, 16, 33, 64])
def test_trees(width, source, device, rng):
    args, links, probs = make(rng, 150, width, 97, source)
    paths = check(call(args, device), args, links, probs)
    if width >= 16:
        assert len({len(nodes) for nodes in paths}) > 1, "paths of several lengths"


@pytest.mark.parametrize("single,acc", [(0.3, 1.0), (1.0, 0.4), (0.5, 0.7), (2.0, 1.7), (1.0, 0.0)])
def test_thresholds(single, acc, device, rng):
    args, links, probs = make(rng, 300, 16, 50)
    got = call(args, device, threshold_single=single, threshold_acc=acc)
    single = torch.tensor(single).double()  # as the op has it, in float32
    check(got, args, links, probs, single=float(single), acc=float(torch.tensor(acc)))


@pytest.mark.parametrize("tree", ["chain", "chain links"])
@pytest.mark.parametrize("path", [1, 3, 9])
def test_chains_and_depth_limits(path, tree, device, rng):
    """Where the depth ends the walk, nothing was rejected: the bonus is of the whole row."""
    args, links, probs = make(rng, 200, 8, 40, tree=tree)
    check(call(args, device, path=path), args, links, probs, path=path)


@pytest.mark.parametrize("source", ["float32", "bfloat16", "probs"])
@pytest.mark.parametrize("vocab", [1, 2, 4095, 8191, 32003, 128256, 300001])
def test_vocabularies(vocab, source, device, rng):
    """Rows of one and of many slices, of odd lengths, off the 16-byte borders."""
    bs, width = (60, 5) if vocab < 10000 else (12, 5 if vocab < 200000 else 2)
    args, links, probs = make(rng, bs, width, vocab, source)
    name = "logits" if "logits" in args else "target_probs"
    wide = torch.full((bs * width, vocab + 5), 1e4, dtype=args[name].dtype)
    wide[:, 1 : vocab + 1] = args[name]
    moved = wide.to(device)[:, 1 : vocab + 1]
    got = call(args | {name: moved}, device)
    # Among so many tokens the next border is never far: a quarter of the draws are near to one.
    check(got, args, links, probs, allow=0.85 if vocab > 10000 else 0.3)


@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("rows", ["W-1", "W"])
def test_draft_probs(rows, source, device, rng):
    bs, width, vocab = 200, 6, 30
    args, links, probs = make(rng, bs, width, vocab, source, tree="chain")
    q = (torch.randn(bs, width, vocab, generator=rng) * 2).softmax(2)
    q[::7] = 0  # a token that was drawn has a probability: these are no drafts
    q[1::7, :, ::3] = float("nan")
    usable = torch.where((q >= 0) & (q <= 1), q, 0)
    q = q[:, : width - 1] if rows == "W-1" else q
    got = call(args | {"draft_probs": q}, device)
    paths = check(got, args, links, probs, q=usable[:, : q.shape[1]])
    assert len({len(nodes) for nodes in paths}) >= 3


def test_draft_probs_of_a_tree_ask_the_first_child_only(device, rng):
    args, links, probs = make(rng, 100, 8, 20)
    q = torch.full((100, 8, 20), 0.05)
    check(call(args | {"draft_probs": q}, device), args, links, probs, q=q)


def test_rejected_tokens_of_every_slice(device, rng):
    """63 rejected siblings, all over a vocabulary of 32 slices: none is drawn, the rest is."""
    vocab, width = 131072, 64
    draft = (torch.randperm(vocab, generator=rng)[:width])[None]
    logits = torch.full((width, vocab), -30.0)
    logits[0, draft[0, 1:]] = 0
    alive = [7, 70000, 131071]
    logits[0, alive] = -5
    draft[0, 1:][torch.isin(draft[0, 1:], torch.tensor(alive))] = 5
    links = links_of_parents([None] + [0] * (width - 1))
    for coin, token in ((0.1, 7), (0.5, 70000), (0.9, 131071)):
        args = {
            "draft_tokens": draft,
            "seq_lens": torch.zeros(1, dtype=torch.int64),
            "coins": torch.full((1, width), 0.99999),
            "coins_final": torch.tensor([coin]),
            "logits": logits,
            "temperatures": torch.ones(1),
            "retrieve_next_token": torch.tensor(links[0])[None],
            "retrieve_next_sibling": torch.tensor(links[1])[None],
        }
        got = call(args, device, threshold_acc=2.0)
        assert (got["accept_lens"], got["bonus_tokens"]) == ([1], [token])


@pytest.mark.parametrize("tree", ["random", "wild"])
def test_equal_inputs_give_equal_decisions(tree, device, rng):
    """Ranks hold the same batch; and the neighbours of a request do not change its answer."""
    args, *_ = make(rng, 40, 16, 20000 if device == "cuda" else 500, tree=tree)
    first = call(args, device)
    assert call(args, device) == first
    rows = {"logits": 16}
    for r in (0, 17, 39):
        alone = {k: v[r * rows.get(k, 1) : (r + 1) * rows.get(k, 1)] for k, v in args.items()}
        one = call(alone, device)
        assert one["accept_tokens"][0] == first["accept_tokens"][r]


@pytest.mark.parametrize("width", [2, 16, 64])
def test_wild_links(width, device, rng):
    """Any integers as links, children of several parents among them: the definition still holds."""
    for _ in range(3):
        args, links, probs = make(rng, 30, width, 12, tree="wild")
        check(call(args, device), args, links, probs, allow=0.1)


@pytest.mark.gpu
@pytest.mark.parametrize("source", SOURCES)
def test_one_graph_serves_every_step(source, cuda, rng):
    """Captured once, replayed with other rows, drafts, links and coins: as in eager mode."""
    first, *_ = make(rng, 9, 16, 20000, source)
    static = {name: tensor.to(cuda) for name, tensor in first.items()}
    out = outputs(9, 16, cuda, 16)
    size = ops.commit_workspace_bytes(9, 16, 20000)
    workspace = torch.zeros(size, dtype=torch.uint8, device=cuda)
    ops.commit(**static, **out, workspace=workspace)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.commit(**static, **out, workspace=workspace)
    for _ in range(3):
        fresh, *_ = make(rng, 9, 16, 20000, source)
        for name, tensor in fresh.items():
            static[name].copy_(tensor)
        graph.replay()
        assert {name: tensor.tolist() for name, tensor in out.items()} == call(fresh, cuda)
