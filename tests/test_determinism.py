# SPDX-License-Identifier: Apache-2.0
"""Bitwise equality: run to run, over the rows of a step, over what the neighbours hold.

Within one kernel class and one set of lengths a row's bits depend on that row alone. On CUDA the
classes are few (W x group <= 32) and many, or in its place wgmma (up to 64) and wgmma_wide; the CPU
has one.
"""

import pytest
import reference
import torch
from attn_setup import check_result, decode, make_plan, make_step, verify
from compare import assert_bits_equal
from tree_setup import random_parents
from unit_cases import AttnCase

from specfused import ops

NAN = float("nan")
LENGTHS = (65, 0, 500, 64, 1)
LONG = (5000, 0, 1000, 64, 1)


def narrowed(step, width):
    """The arguments of the same step for its first `width` nodes only: still a tree, as parents
    have the lower index. Lengths, tables and pool are the same objects."""
    full, bs = step.case.width, len(step.case.lengths)
    rows = (torch.arange(bs)[:, None] * full + torch.arange(width)).flatten().to(step.q.device)
    changes = {name: step.tensors[name][rows] for name in ("q", "k_new", "v_new", "out_cache_loc")}
    changes["tree_words"] = step.tree_words[:, :width].contiguous()
    changes["out"] = torch.full_like(step.out[rows], NAN)
    changes["lse"] = torch.full_like(step.lse[rows], NAN)
    return rows, changes


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize(
    "group,widths",
    [
        (4, (8, 7, 4, 2, 1)),
        (1, (32, 31, 16, 3, 1)),
        (12, (2, 1)),
        (4, (16, 9)),
        (16, (4, 3)),
        (4, (64, 33, 17)),
        (16, (64, 8, 5)),
    ],
    ids=["few-g4", "few-g1", "few-g12", "many-g4", "many-g16", "wide-g4", "wide-g16"],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rows_do_not_depend_on_width(group, widths, head_dim, dtype, device, rng):
    """The same node in steps of several widths of one class has the same bits."""
    on_cuda = device != "cpu"
    if not on_cuda and head_dim * widths[0] * group > 16384:
        pytest.skip("minutes on a CPU, which has one class anyway")
    classes = {(width * group <= 32, width * group <= 64) for width in widths}
    assert len(classes) == 1, "one class per list"
    lengths = LONG if on_cuda else LENGTHS
    case = AttnCase(lengths, widths[0], group, 2 if on_cuda else 1, head_dim, dtype)
    step = make_step(case, rng, device)
    verify(step)
    assert not step.out.isnan().any()
    for width in widths[1:]:
        rows, changes = narrowed(step, width)
        verify(step, **changes)
        assert_bits_equal(changes["out"], step.out[rows], f"out at W={width}")
        assert_bits_equal(changes["lse"], step.lse[rows], f"lse at W={width}")


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("group", [1, 4, 7])
def test_decode_equals_the_root_of_a_tree(group, dtype, device, rng):
    """Non-spec and spec steps of one class: the root's row has the same bits in both."""
    lengths = LONG if device != "cpu" else LENGTHS
    step = make_step(AttnCase(lengths, 4, group, 2, 128, dtype), rng, device)
    verify(step)
    rows, changes = narrowed(step, 1)
    decode(step, **changes)
    assert_bits_equal(changes["out"], step.out[rows], "out")
    assert_bits_equal(changes["lse"], step.lse[rows], "lse")


@pytest.mark.parametrize("width", [1, 4, 64])
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_run_to_run(width, dtype, device, rng):
    """Twenty runs (two on the CPU) of one step, with no reset of the workspace between."""
    lengths = LONG if device != "cpu" else (65, 0)
    step = make_step(AttnCase(lengths, width, 4, 2, 128, dtype), rng, device)
    verify(step)
    out, lse = step.out.clone(), step.lse.clone()
    for run in range(20 if device != "cpu" else 2):
        step.out.fill_(NAN)
        step.lse.fill_(NAN)
        verify(step)
        assert_bits_equal(step.out, out, f"out of run {run}")
        assert_bits_equal(step.lse, lse, f"lse of run {run}")


@pytest.mark.gpu
@pytest.mark.parametrize("length", [1100, 2300])
def test_more_ctas_than_fit(length, cuda, rng):
    """Units whose CTAs run in different waves, alone and beside another stream: owners of shares
    give up, and others add their shares up. Same bits, and the counters are zero at the end."""
    case = AttnCase((length,), 64, 16, 8, 128, num_ctas=1000)
    steps = [make_step(case, rng, cuda) for _ in range(2)]
    for step in steps:
        verify(step)
    check_result(steps[0])
    want = [(step.out.clone(), step.lse.clone()) for step in steps]
    rows = case.width * case.group
    parts = 2 * case.num_ctas * rows * (case.head_dim + 2) * 4
    streams = [torch.cuda.Stream() for _ in steps]
    torch.cuda.synchronize()
    for both in (False, True):
        for run in range(20):
            for step, stream in list(zip(steps, streams, strict=True))[: 1 + both]:
                with torch.cuda.stream(stream):
                    step.out.fill_(NAN)
                    step.lse.fill_(NAN)
                    verify(step)
            torch.cuda.synchronize()
            for step, (out, lse) in zip(steps, want, strict=True):
                assert_bits_equal(step.out, out, f"out of run {run}")
                assert_bits_equal(step.lse, lse, f"lse of run {run}")
                assert not step.workspace[: len(step.workspace) - parts].any(), f"run {run}"


@pytest.mark.parametrize("width", [1, 4, 33])
def test_rows_do_not_depend_on_neighbours(width, device, rng):
    """The same lengths, but other tokens, queries and trees in every other request."""
    lengths = LONG if device != "cpu" else LENGTHS
    step = make_step(AttnCase(lengths, width, 4, 2), rng, device)
    verify(step)
    mine = slice(2 * width, 3 * width)
    out, lse = step.out[mine].clone(), step.lse[mine].clone()
    for request, committed in enumerate(lengths):
        if request == 2:
            continue
        rows = slice(request * width, (request + 1) * width)
        for name in ("q", "k_new", "v_new"):
            fresh = torch.randn(step.tensors[name][rows].shape, generator=rng) * 30
            step.tensors[name][rows] = fresh.to(step.q.dtype).to(device)
        index = step.req_pool_indices[request]
        slots = step.req_to_token[index, :committed].long()
        step.k_cache[slots] *= -3
        seen = reference.ancestors_and_self(random_parents(width, rng))
        step.tree_words[request] = reference.to_words(seen).to(device)
    verify(step)
    assert_bits_equal(step.out[mine], out, "out")
    assert_bits_equal(step.lse[mine], lse, "lse")


@pytest.mark.parametrize("page", [1, 64])
def test_rows_do_not_depend_on_slots(page, device, rng):
    """Where the pool keeps a token is no input of the computation."""
    lengths = LONG if device != "cpu" else LENGTHS
    step = make_step(AttnCase(lengths, 4, 4, 2, page=page), rng, device)
    verify(step)
    out = step.out.clone()
    order = torch.randperm(len(step.k_cache), generator=rng).to(device)
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=device)
    table = step.req_to_token.long()
    inside = (table >= 0) & (table < len(order))
    moved = torch.where(inside, back[table.clamp(0, len(order) - 1)], table).int()
    step.out.fill_(NAN)
    verify(
        step,
        k_cache=step.k_cache[order],
        v_cache=step.v_cache[order],
        req_to_token=moved,
        out_cache_loc=back[step.out_cache_loc],
    )
    assert_bits_equal(step.out, out, "out")


@pytest.mark.gpu
def test_plan_of_the_op_is_the_plan_used(cuda, rng):
    """A plan for other lengths than the step's must change how KV is split, and so the bits of a
    long row; otherwise these tests compare a kernel that ignores its plan."""
    step = make_step(AttnCase((5000,), 4, 4, 1), rng, cuda)
    verify(step)
    out, lse = step.out.clone(), step.lse.clone()
    step.extra["num_ctas"] = 2
    step.tensors["plan"] = torch.zeros(ops.plan_numel(1, 2), dtype=torch.int32, device=cuda)
    make_plan(step)
    verify(step)
    assert not torch.equal(step.out, out) or not torch.equal(step.lse, lse)
    torch.testing.assert_close(step.out.float(), out.float(), atol=0.01, rtol=0.02)
