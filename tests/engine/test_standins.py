# SPDX-License-Identifier: Apache-2.0
"""The stand-ins refuse a GPU, and compute what the kernels they stand for compute."""

import importlib
import sys

import pytest
import torch


@pytest.mark.parametrize("name", ["sgl_kernel", "torchvision", "specfused_standins"])
@pytest.mark.parametrize("where", ["gpu", "no cpu engine"])
def test_refused_outside_of_a_cpu_engine(name, where, monkeypatch):
    if where == "gpu":
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    else:
        monkeypatch.delenv("SGLANG_USE_CPU_ENGINE")
    for loaded in [m for m in sys.modules if m == name or m.startswith(name + ".")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(ImportError, match=f"{name}: .*stand-in"):
        importlib.import_module(name)


# Two levels of topk 2. Candidates 0, 1 hang off the root; level two expands candidates 1 and 0 in
# that order, so group 1 (candidates 2, 3) are children of 1 and group 2 (4, 5) children of 0.
PARENT_LIST = [-1, 1, 0]
SELECTED = [0, 1, 3, 5]  # nodes 1, 2, 3 (child of node 2), 4 (child of node 1)
SEES = [[0], [0, 1], [0, 2], [0, 2, 3], [0, 1, 4]]


def build(lens, mask_mode):
    """The tree above for every request; returns (mask, positions, ids, children, siblings)."""
    import sgl_kernel

    bs, q = len(lens), len(SEES)
    cells = bs * q * q + (q * sum(lens) if mask_mode == 0 else 0)
    mask = torch.ones(cells, dtype=torch.bool)
    positions = torch.zeros(bs * q, dtype=torch.long)
    links = [torch.full((bs, q), -1) for _ in range(3)]
    sgl_kernel.build_tree_kernel_efficient_cpu(
        torch.tensor([PARENT_LIST] * bs),
        torch.tensor([SELECTED] * bs),
        torch.tensor(lens),
        mask,
        positions,
        *links,
        2,
        2,
        q,
        mask_mode,
    )
    return mask, positions, *links


@pytest.mark.parametrize("mask_mode", [0, 1], ids=["FULL_MASK", "QLEN_ONLY"])
def test_tree(mask_mode):
    lens, q = [3, 0, 7], len(SEES)
    mask, positions, ids, children, siblings = build(lens, mask_mode)
    assert ids.flatten().tolist() == list(range(3 * q))
    assert positions.tolist() == [n + depth for n in lens for depth in (0, 1, 1, 2, 2)]
    assert children.tolist() == [[1, 4, 3, -1, -1]] * 3
    assert siblings.tolist() == [[-1, 2, -1, -1, -1]] * 3
    at = 0
    for length in lens:
        prefix = length if mask_mode == 0 else 0
        rows = mask[at : at + q * (prefix + q)].view(q, prefix + q)
        at += rows.numel()
        assert rows[:, :prefix].all()
        assert [row.nonzero().flatten().tolist() for row in rows[:, prefix:]] == SEES


def walk(function, *extra):
    """Accepted nodes, their number and the emitted tokens of two requests with the tree above."""
    _, _, *links = build([0, 0], 1)
    candidates = torch.tensor([[9, 10, 11, 12, 13], [9, 10, 10, 12, 13]])
    predicts = torch.zeros(10, dtype=torch.int32)
    accept_index = torch.full((2, 3), -1, dtype=torch.int32)
    accepted = torch.zeros(2, dtype=torch.int32)
    function(predicts, accept_index, accepted, candidates, *links, *extra)
    emitted = [predicts[row[row >= 0].long()].tolist() for row in accept_index]
    return accept_index.tolist(), accepted.tolist(), emitted


def test_greedy_walk():
    """Down the second child to the end; and of equal siblings the first."""
    import sgl_kernel

    target = torch.tensor([[11, 50, 12, 20, 51], [10, 21, 12, 52, 53]])
    indices, accepted, emitted = walk(sgl_kernel.verify_tree_greedy_cpu, target)
    assert indices == [[0, 2, 3], [5, 6, -1]]
    assert accepted == [2, 1]
    assert emitted == [[11, 12, 20], [10, 21]]


def test_sampled_walk_follows_the_target():
    """The first emitted token is distributed as the target says, whatever was drafted."""
    import sgl_kernel

    torch.manual_seed(0)
    probs = torch.zeros(2, 5, 16)
    probs[:, :, 14:] = 0.5
    probs[:, 0] = torch.tensor([0.0] * 9 + [0.1, 0.3, 0.2, 0.0, 0.0, 0.25, 0.15])
    seen = torch.zeros(16)
    rounds = 3000
    for _ in range(rounds):
        coins = torch.rand(2, 5), torch.rand(2)
        _, accepted, emitted = walk(
            sgl_kernel.tree_speculative_sampling_target_only,
            *coins,
            probs.clone(),
            torch.zeros_like(probs),
        )
        seen[emitted[0][0]] += 1
        assert (accepted[0] > 0) == (emitted[0][0] in (10, 11))
    assert (seen / rounds - probs[0, 0]).abs().max() < 0.03


def test_probability_filters():
    import sgl_kernel

    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    kept = sgl_kernel.top_k_renorm_prob(probs, torch.tensor([2]))
    assert kept[0].tolist() == pytest.approx([0, 4 / 7, 3 / 7, 0])
    kept = sgl_kernel.top_p_renorm_prob(probs, torch.tensor([0.75]))
    assert kept[0].tolist() == pytest.approx([0, 4 / 9, 3 / 9, 2 / 9])


def test_kv_rows_are_read_before_they_are_written():
    import sgl_kernel

    buffers = [torch.arange(12.0).view(6, 2), torch.arange(18).view(6, 3)]
    expected = [buffer.clone() for buffer in buffers]
    target, source = torch.tensor([1, 2, 0]), torch.tensor([2, 4, 1])
    for buffer in expected:
        buffer[target] = buffer[source]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([b.stride(0) * b.element_size() for b in buffers])
    sgl_kernel.copy_all_layer_kv_cache_cpu(pointers, strides, target, source)
    assert all(map(torch.equal, buffers, expected))


def test_grammar_mask():
    """One bit a token, the lowest first, and no pinned memory."""
    import specfused_standins

    mask = specfused_standins._pageable_bitmask(40, 2)
    assert mask.tolist() == [[-1, -1]] * 2
    mask[1] = torch.tensor([0b101, 1])
    logits = torch.zeros(2, 40)
    specfused_standins._apply_bitmask(None, logits, mask)
    allowed = [row.isfinite().nonzero().flatten().tolist() for row in logits]
    assert allowed == [list(range(40)), [0, 2, 32]]
