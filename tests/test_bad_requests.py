# SPDX-License-Identifier: Apache-2.0
"""What only the device can see: bad indices, lengths and slots never crash or spill over.

A request that cannot be right is skipped, whole and alone; a slot outside the pool reads as slot 0
and is never written.
"""

import subprocess
import sys

import pytest
import torch
from attn_setup import (
    absurd_slot,
    check_pools,
    check_result,
    decode,
    expected_pools,
    make_plan,
    make_step,
    verify,
)
from compare import assert_bits_equal
from tree_setup import randint
from unit_cases import AttnCase

LENGTHS = (65, 20, 130, 0, 64, 99)

# name -> (which tensor, its value); table is [8, context] and context = 130 + W
BAD = {
    "index -1": ("req_pool_indices", lambda width: -1),
    "index behind the table": ("req_pool_indices", lambda width: 8),
    "index of 2^40": ("req_pool_indices", lambda width: 1 << 40),
    "most negative index": ("req_pool_indices", lambda width: -(1 << 63)),
    "length -1": ("seq_lens", lambda width: -1),
    "length -5000": ("seq_lens", lambda width: -5000),
    "window one column too long": ("seq_lens", lambda width: 131),
    "length of 100000": ("seq_lens", lambda width: 100000),
}


@pytest.mark.parametrize("width", [1, 4, 33])
@pytest.mark.parametrize("kind", BAD)
def test_bad_request_is_skipped(kind, width, device, rng):
    case = AttnCase(LENGTHS, width=width, group=2)
    step = make_step(case, rng, device, context=max(LENGTHS) + width)
    pools = expected_pools(step)
    bad = [1, 4] if randint(rng, 0, 2) else [0, 5]
    name, value = BAD[kind]
    broken = step.tensors[name].clone()
    broken[bad] = value(width)
    original, step.tensors[name] = step.tensors[name], broken
    if device != "cpu":
        make_plan(step)
    (decode if width == 1 else verify)(step)
    step.tensors[name] = original

    skipped = torch.zeros(len(LENGTHS) * width, dtype=torch.bool)
    for request in bad:
        skipped[request * width : (request + 1) * width] = True
    check_result(step, rows=~skipped.to(device))
    assert step.out[skipped.to(device)].isnan().all(), "out of a skipped request was written"
    assert step.lse[skipped.to(device)].isnan().all(), "lse of a skipped request was written"
    for request in bad:
        for pool in pools:
            pool[step.columns[request].to(device)] = float("nan")
    check_pools(step, pools)


HUGE = """
import sys, torch
from specfused import ops
device = sys.argv[1]
for length, offset in [(2**63 - 1, 0), (2**63 - 3, 0), (-2**63, -4), (2**62, 0), (-2**63, 0)]:
    bs, width, hq, dim, context = 3, 4, 2, 64, 32
    def rand(*shape):
        return torch.randn(*shape, dtype=torch.bfloat16, device=device)
    args = dict(
        q=rand(bs * width, hq, dim), k_cache=rand(256, 1, dim), v_cache=rand(256, 1, dim),
        req_to_token=torch.arange(8 * context, device=device, dtype=torch.int32).view(8, context),
        req_pool_indices=torch.arange(bs, device=device),
        seq_lens=torch.tensor([9, length, 20], device=device) - torch.tensor(
            [offset, 0, offset], device=device),
        out=torch.full((bs * width, hq, dim), 7, dtype=torch.bfloat16, device=device),
        tree_words=None, seq_lens_offset=offset)
    if device != "cpu":
        n = ops.attn_num_ctas(0, dim)
        args["plan"] = torch.zeros(ops.plan_numel(bs, n), dtype=torch.int32, device=device)
        ops.plan(args["seq_lens"], 1, n, args["plan"], seq_lens_offset=offset)
        args["workspace"] = torch.zeros(
            ops.attn_workspace_bytes(n, width * hq, dim), dtype=torch.uint8, device=device)
    ops.verify_attn(**args)
    out = args["out"].float().cpu().view(bs, -1)
    assert (out[1] == 7).all(), f"length {length}: out of the bad request was written"
    assert (out[[0, 2]] != 7).all(), f"length {length}: a neighbour was not served"
    print("survived", length, flush=True)
"""


def test_huge_lengths_do_not_crash(device, tmp_path):
    """Sums with a length near 2^63 must not wrap into the valid range. In a process of its own."""
    command = [sys.executable, "-c", HUGE, device]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, f"exit {done.returncode}\n{done.stdout}\n{done.stderr[-2000:]}"


@pytest.mark.parametrize("width", [1, 8])
def test_bad_slots_are_never_written(width, device, rng):
    """Rows whose out_cache_loc is outside the pool are dropped; the others arrive."""
    step = make_step(AttnCase((65, 9, 0), width=width, tree="chain"), rng, device)
    pools = step.k_cache.clone(), step.v_cache.clone()
    dropped = torch.rand(3 * width, generator=rng) < 0.5
    dropped[0] = True
    loc = step.out_cache_loc.cpu().clone()
    for row in dropped.nonzero().flatten().tolist():
        loc[row] = absurd_slot(rng) if row else len(step.k_cache)
    (decode if width == 1 else verify)(step, out_cache_loc=loc.to(device))
    kept = (~dropped).nonzero().flatten().to(device)
    for cache, before, new in zip(
        (step.k_cache, step.v_cache), pools, (step.k_new, step.v_new), strict=True
    ):
        before[step.out_cache_loc[kept]] = new[kept]
        assert_bits_equal(cache, before, "pool")


@pytest.mark.parametrize("width", [1, 8])
def test_bad_table_entries_read_slot_0(width, device, rng):
    """In the committed part and in the window: garbage for its request, harmless for the others."""
    step = make_step(AttnCase((65, 70, 20), width=width, store=False), rng, device)
    heads, dim = step.k_cache.shape[1:]
    step.k_cache[0] = torch.randn(heads, dim, generator=rng).to(device)
    step.v_cache[0] = torch.randn(heads, dim, generator=rng).to(device)
    index = int(step.req_pool_indices[1])
    for position in (0, 33, 64, 69):
        step.req_to_token[index, position] = (-1, 2147480000, len(step.k_cache))[position % 3]
    (decode if width == 1 else verify)(step)
    step.req_to_token[index, [0, 33, 64, 69]] = 0  # the same by definition
    check_result(step)


def test_padded_rows_of_a_graph(device, rng):
    """A batch padded with index 0 and length 0 and slot 0: legal rows that hurt nobody."""
    width = 4
    step = make_step(AttnCase((65, 20, 0, 0), width=width), rng, device)
    live = torch.arange(4 * width) < 2 * width
    pools = expected_pools(step)
    padded = [t.clone() for t in (step.req_pool_indices, step.out_cache_loc)]
    free = int((~torch.isin(torch.arange(6), step.req_pool_indices.cpu())).nonzero()[0])
    padded[0][2:] = free
    padded[1][2 * width :] = 0
    verify(step, req_pool_indices=padded[0], out_cache_loc=padded[1])
    check_result(step, rows=live.to(device))
    for pool, cache in zip(pools, (step.k_cache, step.v_cache), strict=True):
        pool[step.columns[2:].to(device)] = float("nan")
        pool[0] = cache[0]  # whichever of the padded rows came last
        assert_bits_equal(cache, pool, "pool")
