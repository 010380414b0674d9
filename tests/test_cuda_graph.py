# SPDX-License-Identifier: Apache-2.0
"""One captured graph serves every step of its mode and batch size.

Lengths, tables, trees and plans are read on the device; nothing allocates or synchronises.
"""

import pytest
import reference
import torch
from attn_setup import check_result, decode, expected_pools, links, make_plan, make_step, verify
from compare import assert_bits_equal
from unit_cases import AttnCase

from specfused import ops

pytestmark = pytest.mark.gpu
CONTEXT, PAGES = 1500, 400
SHAPE = {"page": 16, "group": 4, "kv_heads": 2, "head_dim": 128}
LAYERS = 2


class Engine:
    """Static buffers of a batch size, and the graph of one whole step over them."""

    def __init__(self, width, bs, rng, device):
        self.width, self.bs, self.rng, self.device = width, bs, rng, device
        self.steps = [self.fresh([3] * bs) for _ in range(LAYERS)]
        first = self.steps[0]
        for step in self.steps[1:]:  # one set of metadata for all layers, as in an engine
            for name in ("req_to_token", "req_pool_indices", "seq_lens", "tree_words", "plan"):
                step.tensors[name] = first.tensors[name]
            step.tensors["out_cache_loc"] = first.tensors["out_cache_loc"]
            step.tensors["workspace"] = first.tensors["workspace"]
        self.links = links(first, device)

        def integers(*shape, dtype=torch.int32):
            return torch.full(shape, -9, dtype=dtype, device=device)

        self.loc = first.out_cache_loc.contiguous()
        self.draft = integers(bs, width, dtype=torch.int64)
        self.targets = integers(bs, width, dtype=torch.int64)
        self.outs = {
            "accept_index": integers(bs, width),
            "num_correct_drafts": integers(bs),
            "accept_lens": integers(bs),
            "accept_tokens": integers(bs, width),
            "bonus_tokens": integers(bs),
            "new_seq_lens": integers(bs, dtype=torch.int64),
        }
        caches = [cache for step in self.steps for cache in (step.k_cache, step.v_cache)]
        self.table = dict(
            zip(("kv_ptrs", "kv_row_bytes", "num_slots"), ops.kv_table(caches), strict=True)
        )

    def fresh(self, lengths):
        case = AttnCase(tuple(lengths), self.width, **SHAPE)
        return make_step(case, self.rng, self.device, context=CONTEXT, pages=PAGES)

    def run(self):
        make_plan(self.steps[0])
        for step in self.steps:
            (decode if self.width == 1 else verify)(step)
        ops.commit(
            self.draft,
            self.steps[0].seq_lens,
            **self.outs,
            targets=self.targets,
            retrieve_next_token=self.links[0],
            retrieve_next_sibling=self.links[1],
            out_cache_loc=self.loc,
            **self.table,
        )

    def capture(self):
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            self.run()
        stream.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.run()

    def load(self, lengths):
        """Other lengths, tables, trees, rows and pools into the static buffers."""
        shared = self.fresh(lengths)
        for layer, step in enumerate(self.steps):
            source = shared if layer == 0 else self.fresh(lengths)
            for name in ("q", "k_new", "v_new"):
                step.tensors[name].copy_(source.tensors[name])
            for cache, other in ((step.k_cache, source.k_cache), (step.v_cache, source.v_cache)):
                cache.fill_(float("nan"))
                for r, committed in enumerate(lengths):  # layer 1 keeps the slots of layer 0
                    to = shared.req_to_token[shared.req_pool_indices[r], :committed].long()
                    of = source.req_to_token[source.req_pool_indices[r], :committed].long()
                    cache[to] = other[of]
            step.out.fill_(float("nan"))
            step.case, step.fresh = shared.case, source.fresh
            step.visible, step.parents, step.columns = (
                shared.visible,
                shared.parents,
                shared.columns,
            )
        first = self.steps[0]
        for name in ("req_to_token", "req_pool_indices", "seq_lens", "tree_words"):
            if first.tensors[name] is not None:
                first.tensors[name].copy_(shared.tensors[name])
        first.out_cache_loc.copy_(shared.out_cache_loc)
        self.loc.copy_(shared.out_cache_loc)
        for buffer, fresh in zip(self.links, links(shared, self.device), strict=True):
            buffer.copy_(fresh)
        shape = self.bs, self.width
        self.draft.copy_(torch.randint(0, 3, shape, generator=self.rng))
        self.targets.copy_(torch.randint(0, 3, shape, generator=self.rng))

    def check(self, live):
        """Every layer's rows and pools, and the decision, of the first `live` requests."""
        rows = slice(0, live * self.width)
        slots = self.loc.view(self.bs, -1).tolist()
        paths = [
            reference.greedy_path(
                *(t[r].tolist() for t in (*self.links, self.draft, self.targets)), self.width
            )
            for r in range(live)
        ]
        for layer, (step, pools) in enumerate(zip(self.steps, self.pools, strict=True)):
            check_result(step, what=f"of layer {layer}", rows=rows)
            for cache, stored in zip((step.k_cache, step.v_cache), pools, strict=True):
                for r, path in enumerate(paths):
                    stored = reference.compacted(stored, slots[r], path)
                for r in range(live, self.bs):
                    stored[step.columns[r].to(self.device)] = float("nan")
                assert_bits_equal(cache, stored, f"pool of layer {layer}")
        lengths = [len(path) for path in paths]
        assert self.outs["accept_lens"][:live].tolist() == lengths
        index = self.outs["accept_index"].tolist()
        for r, path in enumerate(paths):
            assert index[r][: len(path)] == [r * self.width + node for node in path]

    def replay(self, lengths, live):
        self.load(lengths)
        self.pools = [expected_pools(step) for step in self.steps]
        indices = self.steps[0].req_pool_indices
        kept = indices.clone()
        indices[live:] = -1  # padding: requests that do not exist
        self.graph.replay()
        torch.cuda.synchronize()
        indices.copy_(kept)
        self.check(live)


@pytest.mark.parametrize("width,bs", [(1, 4), (4, 4), (16, 3), (64, 2)])
def test_replays_with_other_content(width, bs, cuda, rng):
    engine = Engine(width, bs, rng, cuda)
    engine.capture()
    for replay in range(8):
        lengths = torch.randint(0, CONTEXT - width + 1, (bs,), generator=rng).tolist()
        lengths[0] = (0, 63, 64, CONTEXT - width)[replay % 4]
        engine.replay(lengths, live=bs if replay % 2 == 0 else bs - 1)


@pytest.mark.parametrize("width", [1, 4, 16])
def test_many_replays_leave_the_workspace_fit(width, cuda, rng):
    """Counters return to zero in each launch: replay 300 has the bits of replay 1."""
    step = make_step(AttnCase((1400, 0, 64), width, **SHAPE), rng, cuda, context=CONTEXT)
    verify(step)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        make_plan(step)
        verify(step)
    graph.replay()
    out = step.out.clone()
    for _ in range(300):
        graph.replay()
    assert_bits_equal(step.out, out, "out")
    check_result(step)


def test_workspace_serves_every_shape(cuda, rng):
    """One workspace of the largest size, used in turn by steps of other widths and head_dims."""
    steps = [
        make_step(AttnCase((3000, 5, 64), width, 4, 2, head_dim), rng, cuda)
        for width, head_dim in [(64, 256), (1, 64), (4, 128), (16, 256), (33, 64)]
    ]
    largest = max((step.workspace for step in steps), key=len)
    for _ in range(3):
        for step in steps:
            step.out.fill_(float("nan"))
            verify(step, workspace=largest)
            check_result(step)


def test_current_stream_is_used(cuda, rng):
    """On a side stream the op runs behind that stream's work, not beside it."""
    step = make_step(AttnCase((200, 10), 4, **SHAPE), rng, cuda)
    q = step.q.clone()
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        step.q.fill_(float("nan"))
        torch.cuda._sleep(50_000_000)
        step.q.copy_(q)
        verify(step)
    stream.synchronize()
    check_result(step)
