# SPDX-License-Identifier: Apache-2.0
"""decode_attn: the same harness with one row per request, and its identity with verify_attn."""

import pytest
import torch
from attn_setup import check_pools, check_result, decode, expected_pools, make_step, verify
from compare import assert_bits_equal
from unit_cases import CUDA_HEAD_DIMS, GROUPS, AttnCase, ids

CASES = [
    AttnCase(
        ((0, 1, 63), (64, 65), (127, 200, 0), (1000,))[i % 4],
        width=1,
        group=group,
        kv_heads=1 + i % 3,
        head_dim=(64, 128, 256, 16, 80)[i % 5],
        dtype=("bf16", "fp16", "fp32")[(i // 2) % 3],
        page=(1, 16, 64)[i % 3],
        tree=("random", "chain")[i % 2],
        store=i % 4 != 3,
        includes_step=i % 2 == 0,
        layout=("apart", "fused", "uneven")[i % 3],
    )
    for i, group in enumerate(GROUPS * 2)
] + [AttnCase((), width=1), AttnCase((5,) * 17, width=1, includes_step=True)]

CUDA_CASES = [
    AttnCase(lengths, 1, group, 2, head_dim, dtype, 16, num_ctas=num_ctas)
    for group in GROUPS
    for head_dim in CUDA_HEAD_DIMS
    for dtype in ("bf16", "fp16", "fp32")
    for lengths, num_ctas in [((5000, 0, 64), None), (tuple(range(0, 170, 10)), None), ((999,), 3)]
]


def skip_unless_served(case, device):
    if device != "cpu" and case.head_dim not in CUDA_HEAD_DIMS:
        pytest.skip(f"CUDA serves head_dim {CUDA_HEAD_DIMS}, not {case.head_dim}")


def check(case, rng, device):
    step = make_step(case, rng, device)
    pools = expected_pools(step)
    decode(step)
    check_result(step)
    check_pools(step, pools)


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_matches_reference(case, device, rng):
    skip_unless_served(case, device)
    check(case, rng, device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CUDA_CASES, ids=ids(CUDA_CASES))
def test_grid(case, cuda, rng):
    check(case, rng, cuda)


@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_one_row_verify_is_decode(case, device, rng):
    """The two modes are one step: the same bits in out, lse and pool."""
    skip_unless_served(case, device)
    step = make_step(case, rng, device)
    pools = step.k_cache.clone(), step.v_cache.clone()
    decode(step)
    kept = [t.clone() for t in (step.out, step.lse, step.k_cache, step.v_cache)]
    step.k_cache.copy_(pools[0])
    step.v_cache.copy_(pools[1])
    step.out.fill_(float("nan"))
    step.lse.fill_(float("nan"))
    verify(step)
    for name, before in zip(("out", "lse", "k_cache", "v_cache"), kept, strict=True):
        assert_bits_equal(step.tensors[name], before, name)


def test_first_token(device, rng):
    """C = 0: the row sees itself alone, so its output is its own V."""
    step = make_step(AttnCase((0, 0), width=1, group=4, kv_heads=2), rng, device)
    decode(step)
    assert_bits_equal(step.out, step.v_new.repeat_interleave(4, dim=1) + 0.0, "out")
    scores = (step.q.double() * step.k_new.double().repeat_interleave(4, dim=1)).sum(-1)
    torch.testing.assert_close(step.lse.double(), scores * step.scale, atol=1e-4, rtol=1e-5)
