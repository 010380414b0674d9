# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism as the ops see it: a rank's heads give the rows that all heads give."""

from dataclasses import replace

import pytest
import torch
from attn_setup import (
    add_plan,
    check_pools,
    check_result,
    decode,
    expected_pools,
    make_step,
    verify,
)
from compare import assert_bits_equal
from unit_cases import AttnCase, ids

KV_HEADS, GROUP = 8, 4
CASES = [
    AttnCase((0, 70, 201), width, GROUP, KV_HEADS, 64, dtype, page=16)
    for width, dtype in ((1, "bf16"), (16, "bf16"), (4, "fp32"))
]
PER_HEAD = ("k_cache", "v_cache", "k_new", "v_new")


def run(step):
    (decode if step.case.width == 1 else verify)(step)


def share(step, rank, ranks):
    """(step, query heads, KV heads) of one rank; more ranks than KV heads share copies of them."""
    q_count, kv_count = KV_HEADS * GROUP // ranks, max(KV_HEADS // ranks, 1)
    first = rank * KV_HEADS // ranks
    queries = slice(rank * q_count, (rank + 1) * q_count)
    keys = slice(first, first + kv_count)
    case = step.case.with_(group=q_count // kv_count, kv_heads=kv_count)
    rows, dim = step.q.shape[0], case.head_dim
    out_base = torch.full_like(step.out_base[:, : q_count + 1], float("nan")).contiguous()
    tensors = {
        **step.tensors,
        **{name: step.tensors[name][:, keys].contiguous() for name in PER_HEAD},
        "q": step.q[:, queries].contiguous(),
        "out": out_base[:, 1:, :dim],
        "lse": torch.full((rows, q_count), float("nan"), device=step.q.device),
    }
    fresh = tuple(new[:, keys] for new in step.fresh)
    mine = replace(step, case=case, tensors=tensors, fresh=fresh, out_base=out_base, extra={})
    if step.q.is_cuda:
        add_plan(mine)
    return mine, queries, keys


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize("case", CASES, ids=ids(CASES))
def test_a_share_of_the_heads_gives_the_same_rows(case, ranks, device, rng):
    """On the CPU bit by bit; on a GPU fewer heads are cut into other pieces."""
    whole = make_step(case, rng, device)
    pools = expected_pools(whole)
    shares = [share(whole, rank, ranks) for rank in range(ranks)]
    run(whole)
    check_result(whole)
    for mine, queries, keys in shares:
        run(mine)
        check_pools(mine, tuple(pool[:, keys] for pool in pools))
        check_result(mine)
        if device == "cpu":
            assert_bits_equal(mine.out, whole.out[:, queries], "out")
            assert_bits_equal(mine.lse, whole.lse[:, queries], "lse")
