# SPDX-License-Identifier: Apache-2.0
"""One attention step in memory, as hostile as an engine's: pools, tables, rows, trees.

Every slot that no row may see holds NaN, the tables hold absurd ids behind the window, inputs and
outputs are slices of larger tensors, and slots come from shuffled pages.
"""

from dataclasses import dataclass, field

import reference
import torch
from compare import assert_bits_equal, assert_close
from tree_setup import chain_parents, links_of_parents, randint, random_parents

from specfused import ops

NAN = float("nan")
ABSURD = (2147480000, -1)
SPARE_REQUESTS = 2  # rows of the table that no request of the batch owns
PAD = 8  # elements between rows of a slice; keeps the 16-byte borders that CUDA asks for


@dataclass
class Step:
    """The tensors of one call, and what is needed to know its answer."""

    case: object
    tensors: dict  # arguments of verify_attn
    visible: torch.Tensor  # [bs, W, W] bool: rows and window columns
    parents: list  # one tree per request
    columns: torch.Tensor  # [bs, W] slots of the window
    fresh: tuple  # (k, v) of the window's rows, [bs * W, Hkv, D]
    out_base: torch.Tensor
    extra: dict = field(default_factory=dict)

    def __getattr__(self, name):
        try:
            return self.__dict__["tensors"][name]
        except KeyError:
            raise AttributeError(name) from None

    @property
    def scale(self):
        return self.tensors["sm_scale"] or self.case.head_dim**-0.5


def slice_of_larger(values, device, row_pad=PAD, head_pad=0):
    """A view that holds `values` [rows, heads, D], with strangers (NaN) around every row."""
    rows, heads, dim = values.shape
    wide = dim + head_pad
    base = torch.full((rows, heads * wide + 2 * row_pad), NAN, dtype=values.dtype, device=device)
    view = base[:, row_pad : row_pad + heads * wide].unflatten(1, (heads, wide))[..., :dim]
    view.copy_(values)
    return view


def make_pool(layout, num_slots, heads, dim, dtype, device):
    """(k_cache, v_cache) full of NaN."""

    def full(*shape):
        return torch.full(shape, NAN, dtype=dtype, device=device)

    if layout == "fused":
        return full(num_slots, 2, heads, dim).unbind(1)
    if layout == "uneven":
        return full(num_slots, heads, dim), full(num_slots, heads + 1, dim + PAD)[:, 1:, :dim]
    return full(2, num_slots, heads, dim).unbind(0)


def draw_trees(case, rng):
    """(parents, visible [bs, W, W]) of every request."""
    bs, width = len(case.lengths), case.width
    keep = 0.7 if case.tree == "cut" else 1.0
    chain = case.tree == "chain"
    parents = [
        chain_parents(width) if chain else random_parents(width, rng, keep) for _ in range(bs)
    ]
    if case.tree == "words":
        return parents, torch.rand(bs, width, width, generator=rng) < 0.4
    seen = [reference.ancestors_and_self(tree) for tree in parents]
    return parents, torch.stack(seen) if seen else torch.zeros(0, width, width, dtype=torch.bool)


def make_step(case, rng, device, *, context=None, pages=None, first_page=1, tree=None):
    """A random step of the case. context and pages fix the shapes (graph replays need that).

    first_page keeps the slots above a place in the pool; tree = (parents, visible) replaces chance.
    """
    bs, width, page, dim = len(case.lengths), case.width, case.page, case.head_dim
    dtype, heads = case.torch_dtype, case.kv_heads
    needed = [-(-(committed + width) // page) for committed in case.lengths]
    pages = pages or first_page + sum(needed) + 5
    context = context or max(case.lengths, default=0) + width + 3
    num_slots = pages * page

    # Slots: shuffled pages, none of them the engine's dummy page 0.
    order = (first_page + torch.randperm(pages - first_page, generator=rng)).tolist()
    num_reqs = bs + SPARE_REQUESTS
    table = torch.tensor(ABSURD, dtype=torch.int32).repeat(num_reqs * (context + PAD))
    table = table[: num_reqs * (context + PAD)].view(num_reqs, context + PAD)
    index = torch.randperm(num_reqs, generator=rng)[:bs]
    owned = []
    for request, committed in enumerate(case.lengths):
        mine = [order.pop() for _ in range(needed[request])]
        slots = (torch.tensor(mine)[:, None] * page + torch.arange(page)).flatten()
        owned.append(slots[: committed + width])
        table[index[request], : committed + width] = owned[-1].int()
    empty = torch.zeros(0, width, dtype=torch.int64)
    columns = torch.stack([slots[-width:] for slots in owned]) if bs else empty

    # Pool: NaN, then the committed rows.
    k_cache, v_cache = make_pool(case.layout, num_slots, heads, dim, dtype, device)
    for request, committed in enumerate(case.lengths):
        prefix = owned[request][:committed].to(device)
        for cache in (k_cache, v_cache):
            cache[prefix] = torch.randn(committed, heads, dim, generator=rng).to(device, dtype)

    parents, visible = tree or draw_trees(case, rng)
    rows = bs * width
    fused = torch.randn(rows, case.group + 2, heads, dim, generator=rng).to(dtype)
    used = visible.any(1).flatten()  # a row that nobody sees may hold anything
    k_new, v_new = (torch.where(used[:, None, None], fused[:, i], NAN) for i in (-2, -1))
    q = fused[:, :-2].transpose(1, 2).reshape(rows, heads * case.group, dim)
    if not case.store:
        for cache, new in ((k_cache, k_new), (v_cache, v_new)):
            cache[columns.flatten().to(device)] = new.to(device)

    if case.layout == "uneven":  # three tensors, no two of the same strides
        q, k_new_view, v_new_view = (
            slice_of_larger(values, device, row_pad=PAD * i, head_pad=PAD * i)
            for i, values in enumerate((q, k_new, v_new), 1)
        )
    else:
        qkv = slice_of_larger(torch.cat([q, k_new, v_new], dim=1), device)
        q, k_new_view, v_new_view = qkv.split((q.shape[1], heads, heads), dim=1)
    out_base = torch.full((rows, heads * case.group + 1, dim + PAD), NAN, dtype=dtype)
    out_base = out_base.to(device)
    loc = torch.full((rows, 3), ABSURD[0], dtype=torch.int64)
    loc[:, 1] = columns.flatten()
    lengths = torch.tensor(case.lengths, dtype=torch.int64)
    tensors = {
        "q": q,
        "k_cache": k_cache,
        "v_cache": v_cache,
        "req_to_token": table.to(device)[:, :context],
        "req_pool_indices": index.to(device),
        "seq_lens": (lengths + (width if case.includes_step else 0)).to(device),
        "tree_words": None if case.tree == "chain" else reference.to_words(visible).to(device),
        "out": out_base[:, 1:, :dim],
        "lse": torch.full((rows, q.shape[1]), NAN, device=device),
        "k_new": k_new_view if case.store else None,
        "v_new": v_new_view if case.store else None,
        "out_cache_loc": loc.to(device)[:, 1] if case.store else None,
        "seq_lens_offset": -width if case.includes_step else 0,
        "sm_scale": None,
    }
    step = Step(case, tensors, visible, parents, columns, (k_new, v_new), out_base)
    if device != "cpu":
        add_plan(step)
    return step


def add_plan(step):
    """What only CUDA needs: the split plan of these lengths, and a workspace of zeros."""
    case, device = step.case, step.q.device
    num_ctas = case.num_ctas or ops.attn_num_ctas(device.index or 0, case.head_dim)
    numel = ops.plan_numel(len(case.lengths), num_ctas)
    plan = torch.full((numel,), -7, dtype=torch.int32, device=device)
    step.extra["num_ctas"] = num_ctas
    step.tensors["plan"] = plan
    make_plan(step)
    size = ops.attn_workspace_bytes(num_ctas, case.width * case.group, case.head_dim)
    step.tensors["workspace"] = torch.zeros(size, dtype=torch.uint8, device=device)


def make_plan(step):
    ops.plan(
        step.seq_lens,
        step.case.kv_heads,
        step.extra["num_ctas"],
        step.plan,
        seq_lens_offset=step.seq_lens_offset,
    )


def verify(step, **changes):
    ops.verify_attn(**{**step.tensors, **changes})


def decode(step, **changes):
    """The same step by the other op; the case has one row per request."""
    arguments = {**step.tensors, **changes}
    for name in ("tree_words", "window_slots"):
        arguments.pop(name, None)
    ops.decode_attn(**arguments)


def keys_of(step, request, committed=None):
    """(k, v) [C + W, Hkv, D] of a request: the pool's prefix, then the rows of the step."""
    committed = step.case.lengths[request] if committed is None else committed
    index = step.req_pool_indices[request]
    prefix = step.req_to_token[index, :committed].long()
    width = step.case.width
    rows = slice(request * width, (request + 1) * width)
    return tuple(
        torch.cat([cache[prefix], new[rows].to(cache.device)])
        for cache, new in zip((step.k_cache, step.v_cache), step.fresh, strict=True)
    )


def visible_of(step, request, visible=None):
    """[W, C + W] bool."""
    visible = step.visible if visible is None else visible
    committed = step.case.lengths[request]
    prefix = torch.ones(step.case.width, committed, dtype=torch.bool)
    return torch.cat([prefix, visible[request]], dim=1).to(step.q.device)


def expected(step, dtype=torch.float64, visible=None, of_values=lambda v: v):
    """(out, lse) of the whole batch by the reference, over what `of_values` makes of V."""
    width = step.case.width
    outs = [torch.zeros(0, *step.out.shape[1:], dtype=dtype, device=step.q.device)]
    lses = [torch.zeros(0, step.out.shape[1], dtype=dtype, device=step.q.device)]
    for request in range(len(step.case.lengths)):
        q = step.q[request * width : (request + 1) * width]
        k, v = keys_of(step, request)
        seen = visible_of(step, request, visible)
        out, lse = reference.attention(q, k, of_values(v), seen, step.scale, dtype)
        outs.append(out)
        lses.append(lse)
    return torch.cat(outs), torch.cat(lses)


def check_result(step, visible=None, what="", rows=slice(None)):
    """out and lse against float64, of all rows or of some.

    FlashAttention's rule: at most twice the error of torch in the same dtype. The floor is half a
    unit in the last place, which rounding the exact answer may cost. In float32 the order of sums
    and the exponential's own error count, too: some units of the sum of absolute terms. A log-sum
    of float32 scores is held to float32, whatever the dtype of q.
    """
    out, lse = expected(step, visible=visible)
    peer, _ = expected(step, step.case.torch_dtype, visible)
    _, peer_lse = expected(step, torch.float32, visible)
    if out[rows].numel() == 0:
        return
    finite = lse.isfinite()
    units, terms = 0.51, out
    if step.case.dtype == "fp32":
        units, (terms, _) = 4, expected(step, visible=visible, of_values=torch.abs)
    floor = units * torch.finfo(step.case.torch_dtype).eps * float(terms.abs().max()) + 1e-7
    tolerance = 2 * float((peer - out).abs().max()) + floor
    assert_close(step.out[rows], out[rows], tolerance, f"out {what}")
    if step.lse is not None:
        off = float((peer_lse - lse)[finite].abs().max()) if finite.any() else 0.0
        assert_close(step.lse[rows], lse[rows], 2 * off + 1e-4, f"lse {what}")
    gaps = step.out_base[:, 0], step.out_base[:, 1:, step.case.head_dim :]
    assert all(gap.isnan().all() for gap in gaps), f"elements beside out were written {what}"


def expected_pools(step):
    """(k_cache, v_cache) after the step's rows are stored: copies, made before the call."""
    pools = []
    for cache, new in zip((step.k_cache, step.v_cache), step.fresh, strict=True):
        after = cache.clone()
        if step.case.store:
            after[step.columns.flatten().to(cache.device)] = new.to(cache.device)
        pools.append(after)
    return tuple(pools)


def check_pools(step, pools, what=""):
    assert_bits_equal(step.k_cache, pools[0], f"k_cache {what}")
    assert_bits_equal(step.v_cache, pools[1], f"v_cache {what}")


def links(step, device=None):
    """[bs, W] link tensors of the step's trees."""
    pairs = [links_of_parents(parents) for parents in step.parents]
    return tuple(
        torch.tensor([pair[i] for pair in pairs], dtype=torch.int64, device=device)
        for i in range(2)
    )


def absurd_slot(rng):
    """A slot id that no pool has."""
    return (-1, 2147480000, 1 << 40, -(1 << 62))[randint(rng, 0, 4)]
