# SPDX-License-Identifier: Apache-2.0
"""verify_attn against float64, and the identities that hold without a tolerance."""

import pytest
import reference
import torch
from attn_setup import (
    add_plan,
    check_pools,
    check_result,
    expected,
    expected_pools,
    make_step,
    verify,
)
from compare import assert_bits_equal
from tree_setup import chain_parents, randint, random_parents
from unit_cases import CORNER, CPU_GRID, CPU_ONLY, GRID, SMOKE, AttnCase, ids

from specfused import ops


def check(case, rng, device, **how):
    """The whole contract of one call: result, stored rows, everything else untouched."""
    step = make_step(case, rng, device, **how)
    pools = expected_pools(step)
    verify(step)
    check_result(step)
    check_pools(step, pools)
    return step


@pytest.mark.parametrize("case", SMOKE + CORNER, ids=ids(SMOKE + CORNER))
def test_matches_reference(case, device, rng):
    check(case, rng, device)


@pytest.mark.parametrize("case", CPU_ONLY, ids=ids(CPU_ONLY))
def test_cpu_serves_any_head_dim_and_group(case, rng):
    check(case, rng, "cpu")


@pytest.mark.parametrize("case", GRID, ids=ids(GRID))
@pytest.mark.gpu
def test_grid(case, cuda, rng):
    check(case, rng, cuda)


@pytest.mark.parametrize("case", CPU_GRID, ids=ids(CPU_GRID))
def test_grid_on_the_cpu(case, rng):
    check(case, rng, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_pool_beyond_32_bits(dtype, cuda, rng):
    """Only slots whose first element is behind 2^31; a 32-bit offset would read NaN or crash."""
    case = AttnCase((300, 0, 65), width=8, kv_heads=8, head_dim=256, page=16, dtype=dtype)
    first_page = (1 << 31) // (8 * 256 * 16) + 1
    check(case, rng, cuda, first_page=first_page)


@pytest.mark.parametrize("scale", [0.003, 0.3, 1.0])
def test_sm_scale(scale, device, rng):
    step = make_step(AttnCase((70,), width=4), rng, device)
    step.tensors["sm_scale"] = scale
    verify(step)
    check_result(step)


@pytest.mark.parametrize("width", [1, 4, 33, 64])
def test_chain_tree_equals_no_tree(width, device, rng):
    """A tree that is a chain, and tree_words None, are the same bits; so is the causal mask."""
    step = make_step(AttnCase((65, 0), width=width, tree="chain", group=2), rng, device)
    verify(step)
    out, lse = step.out.clone(), step.lse.clone()
    causal = torch.ones(width, width, dtype=torch.bool).tril().expand(2, -1, -1)
    check_result(step, visible=causal)
    seen = reference.ancestors_and_self(chain_parents(width)).expand(2, -1, -1)
    verify(step, tree_words=reference.to_words(seen).to(device))
    assert_bits_equal(step.out, out, "out of a chain tree")
    assert_bits_equal(step.lse, lse, "lse of a chain tree")


def test_comparison_notices_a_causal_mask(device, rng):
    """Negative control: the causal mask in place of a branching tree must fail the check."""
    case = AttnCase((65, 20), width=8)
    parents = [[None] + [0] * 7] * 2
    seen = torch.stack([reference.ancestors_and_self(tree) for tree in parents])
    step = make_step(case, rng, device, tree=(parents, seen))
    verify(step, tree_words=None)
    with pytest.raises(AssertionError, match="out"):
        check_result(step)
    verify(step)
    check_result(step)


def test_comparison_notices_a_wrong_slot(device, rng):
    """Negative control: one table entry that names a neighbour's slot must fail the check."""
    step = make_step(AttnCase((70, 70), width=4), rng, device)
    answer = expected(step)
    index = step.req_pool_indices.tolist()
    step.req_to_token[index[0], 33] = step.req_to_token[index[1], 33]
    verify(step)
    assert float((step.out.double() - answer[0]).abs().max()) > 0.02


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("width,committed", [(64, 0), (64, 130), (17, 63), (33, 64), (5, 1000)])
def test_visibility_is_exact(width, committed, dtype, device, rng):
    """With Q = K = 0 a row is the mean of the V it sees, and V can spell out which those are.

    Dimension c < 64 counts window column c, dimension 64 + j the committed positions 64 n + j.
    """
    case = AttnCase((committed, committed), width=width, head_dim=128, group=2, dtype=dtype)
    case = case.with_(tree="words" if committed else "random")
    step = make_step(case, rng, device)
    step.q.zero_()
    step.k_new.zero_()
    for request, index in enumerate(step.req_pool_indices.tolist()):
        slots = step.req_to_token[index, :committed].long()
        step.k_cache[slots] = 0
        place = 64 + torch.arange(committed, device=device) % 64
        step.v_cache[slots] = torch.eye(128, device=device)[place][:, None].to(step.v_cache.dtype)
        rows = slice(request * width, (request + 1) * width)
        step.v_new[rows] = torch.eye(128, device=device)[:width, None].to(step.v_new.dtype)
    verify(step)
    seen = step.visible.flatten(0, 1).double()
    want = torch.zeros(2 * width, 128, dtype=torch.float64)
    want[:, :width] = seen
    want[:, 64:] = torch.bincount(torch.arange(committed) % 64, minlength=64).double()
    got = step.out.double().cpu() * want.sum(1)[:, None, None]
    assert torch.equal(got.round(), want[:, None].expand_as(got)), "a row sees the wrong rows"
    count = want.sum(1)[:, None].expand(-1, 2)
    torch.testing.assert_close(step.lse.double().cpu(), count.log(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bf16", "fp16", "fp32"])
def test_one_visible_row_is_copied(dtype, rng):
    """A row that sees one key has weight 1: its V comes through every rounding unchanged."""
    step = make_step(AttnCase((0,), width=64, group=1, dtype=dtype), rng, "cpu")
    bits = torch.arange(64 * 64, dtype=torch.int32) * 13
    exotic = torch.randn(64, 1, 64, generator=rng).mul(2.0 ** (bits.view(64, 1, 64) % 40 - 24.0))
    step.v_new.copy_(exotic.to(step.v_new.dtype))
    only_self = torch.eye(64, dtype=torch.bool)[None]
    verify(step, tree_words=reference.to_words(only_self))
    assert_bits_equal(step.out, step.v_new + 0.0, "out")  # the sum starts at +0


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_rounds_to_nearest_even(dtype, rng):
    """The mean of two elements, exact in double: the CPU must round it as torch does."""
    step = make_step(AttnCase((0,), width=2, group=1, dtype=dtype, head_dim=4096), rng, "cpu")
    step.q.zero_()
    raw = torch.randint(-(1 << 15), 1 << 15, (2, 1, 4096), generator=rng, dtype=torch.int16)
    values = raw.view(step.v_new.dtype)
    step.v_new.copy_(torch.where(values.isfinite(), values, 0))
    verify(step, tree_words=torch.full((1, 2), 3, dtype=torch.int64))
    mean = (step.v_new.double().sum(0) / 2 + 0.0).float().to(step.v_new.dtype)
    assert_bits_equal(step.out[0], mean, "out")


def test_row_that_sees_nothing(device, rng):
    """0 and LSE -inf for it alone; its neighbours in the same step are not disturbed."""
    case = AttnCase((0, 0, 5), width=8, group=4, tree="words")
    parents = [random_parents(8, rng) for _ in range(3)]
    seen = torch.rand(3, 8, 8, generator=rng) < 0.5
    seen[:2, 3] = False
    seen[1] = False
    step = make_step(case, rng, device, tree=(parents, seen))
    verify(step)
    check_result(step)
    blind = ~seen.any(2).flatten()
    blind[16:] = False
    assert blind.sum() >= 9
    assert_bits_equal(step.out[blind.to(device)], torch.zeros_like(step.out[blind.to(device)]))
    assert (step.lse[blind.to(device)] == float("-inf")).all()


def test_one_tree_for_all_requests(device, rng):
    """tree_words expanded from one row: stride 0 between requests."""
    parents = random_parents(8, rng)
    seen = reference.ancestors_and_self(parents).expand(3, -1, -1)
    step = make_step(AttnCase((65, 0, 9), width=8), rng, device, tree=([parents] * 3, seen))
    words = reference.to_words(seen[:1]).to(device).expand(3, -1)
    assert words.stride(0) == 0
    verify(step, tree_words=words)
    check_result(step)


def test_bits_behind_the_window_are_ignored(device, rng):
    """A word may have bits of columns that the step does not have; no row stands behind them."""
    step = make_step(AttnCase((63, 64, 10), width=5), rng, device)
    behind = torch.randint(0, 1 << 40, (3, 5), generator=rng) << 5
    verify(step, tree_words=step.tree_words | behind.to(device) | -(1 << 63))
    check_result(step)


@pytest.mark.parametrize("optional", ["lse", "store"])
def test_optional_arguments_change_nothing(optional, device, rng):
    """Without lse, and with the rows stored beforehand, out has the same bits."""
    step = make_step(AttnCase((65, 200), width=8), rng, device)
    verify(step)
    out = step.out.clone()
    step.out.fill_(float("nan"))
    if optional == "lse":
        verify(step, lse=None)
    else:
        verify(step, k_new=None, v_new=None, out_cache_loc=None)
    assert_bits_equal(step.out, out, f"out without {optional}")


@pytest.mark.parametrize("num_steps,topk", [(5, 4), (3, 8), (1, 4), (8, 8), (4, 1)])
def test_draft_branches(num_steps, topk, device, rng):
    """The draft's own steps: topk branches, whose columns are anywhere (window_slots).

    Branch t has columns t * num_steps ..; at step i it sees its first i + 1 of them.
    """
    columns = topk * num_steps
    now = randint(rng, 0, num_steps)
    lengths = (65, 0, 20)
    step = make_step(AttnCase(lengths, width=topk, store=False), rng, device)
    # A pool's worth of strangers: the table's own window slots are NaN and must not be read.
    step.k_cache[step.columns.to(device)] = float("nan")
    step.v_cache[step.columns.to(device)] = float("nan")
    spare = torch.randperm(3 * columns, generator=rng).view(3, columns)
    slots = spare + step.k_cache.shape[0]
    heads, dim = step.k_cache.shape[1:]
    for name in ("k_cache", "v_cache"):
        tail = torch.full((3 * columns, heads, dim), float("nan"), dtype=step.k_cache.dtype)
        used = slots.view(3, topk, num_steps)[:, :, : now + 1].flatten() - len(step.k_cache)
        tail[used] = torch.randn(len(used), heads, dim, generator=rng).to(tail.dtype)
        step.tensors[name + "_new"] = torch.cat([step.tensors[name], tail.to(device)])
    k_cache, v_cache = step.tensors.pop("k_cache_new"), step.tensors.pop("v_cache_new")
    seen = torch.zeros(topk, columns, dtype=torch.bool)
    for branch in range(topk):
        seen[branch, branch * num_steps : branch * num_steps + now + 1] = True
    words = reference.to_words(seen[None]).to(device).expand(3, -1)
    strided = torch.full((3, columns + 2), -1, dtype=torch.int64)
    strided[:, :columns] = slots
    window = strided.to(device)[:, :columns]
    pools = k_cache.clone(), v_cache.clone()
    verify(step, k_cache=k_cache, v_cache=v_cache, tree_words=words, window_slots=window)
    want, peer = [], []
    for request, committed in enumerate(lengths):
        prefix = step.req_to_token[step.req_pool_indices[request], :committed].long()
        all_slots = torch.cat([prefix, window[request]])
        mask = torch.cat([torch.ones(topk, committed, dtype=torch.bool), seen], 1).to(device)
        q = step.q[request * topk : (request + 1) * topk]
        for dtype, results in ((torch.float64, want), (torch.bfloat16, peer)):
            answer = reference.attention(
                q, k_cache[all_slots], v_cache[all_slots], mask, step.scale, dtype
            )
            results.append(answer)
    out = torch.cat([w[0] for w in want])
    error = float((torch.cat([w[0] for w in peer]) - out).abs().max())
    assert float((step.out - out).abs().max()) <= 2 * error + 0.004 * float(out.abs().max())
    lse = torch.cat([w[1] for w in want])
    assert float((step.lse - lse).abs().max()) <= 1e-3
    assert_bits_equal(k_cache, pools[0])
    assert_bits_equal(v_cache, pools[1])


def test_store_elsewhere_than_the_window(device, rng):
    """out_cache_loc alone says where rows go; the table says what is read."""
    case = AttnCase((65, 9), width=4)
    step = make_step(case, rng, device)
    verify(step)
    out, k_cache = step.out.clone(), step.k_cache.clone()
    free = (step.k_cache.flatten(1).isnan().all(1)).nonzero().flatten()[:8]
    assert len(free) >= 5
    loc = torch.full((8,), -1, dtype=torch.int64, device=device)
    loc[: len(free)] = free
    verify(step, out_cache_loc=loc)
    assert_bits_equal(step.out, out, "out")
    stored = (loc >= 0).nonzero().flatten()
    k_cache[loc[stored]] = step.k_new[stored]
    assert_bits_equal(step.k_cache, k_cache, "k_cache")


@pytest.mark.parametrize("width", [1, 4, 64])
def test_no_request(width, device, rng):
    """bs 0 is a valid batch of any width: an idle rank calls the op like every other."""
    step = make_step(AttnCase((2,), width=width), rng, device)
    tensors = dict(step.tensors)
    for name in ("q", "out", "k_new", "v_new", "lse", "out_cache_loc"):
        tensors[name] = tensors[name][:0]
    for name in ("req_pool_indices", "seq_lens", "tree_words"):
        tensors[name] = tensors[name][:0]
    if device != "cpu":
        empty = make_step(AttnCase((), width=width), rng, device)
        add_plan(empty)
        tensors["plan"], tensors["workspace"] = empty.plan, empty.workspace
    pools = step.k_cache.clone(), step.v_cache.clone()
    ops.verify_attn(**tensors)
    check_pools(step, pools)
