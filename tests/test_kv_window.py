# SPDX-License-Identifier: Apache-2.0
"""The KV window over many steps: store, commit, slide, with the modes alternating.

A toy target model says which token follows and what K and V a token at a position has. After every
step the pool's rows 0..C-1 must be what plain decoding of the emitted tokens would have written.
"""

import pytest
import reference
import torch
from commit_setup import outputs
from compare import assert_bits_equal
from tree_setup import chain_parents, links_of_parents, randint, random_parents

from specfused import ops

VOCAB, LAYERS, HEADS, DIM = 50, 3, 2, 64
CONTEXT = 200


def next_token(history):
    """Greedy choice of the toy model: depends on all of the history."""
    value = 17
    for token in history:
        value = (value * 31 + token * 7 + 3) % 10007
    return value % VOCAB


def row(token, position, layer, kind, dtype=torch.bfloat16):
    """[HEADS, DIM]: unlike for any two (token, position, layer, kind)."""
    key = ((token * CONTEXT + position) * LAYERS + layer) * 2 + kind
    generator = torch.Generator().manual_seed(key)
    return torch.randn(HEADS, DIM, generator=generator).to(dtype)


class Server:
    """The engine's part: slots, tables, drafts. Requests own whole pages and never share one."""

    def __init__(self, bs, page, rng, device):
        self.bs, self.page, self.rng, self.device = bs, page, rng, device
        num_slots = (bs * -(-CONTEXT // page) + 1) * page
        nan = float("nan")
        shape = (LAYERS, 2, num_slots, HEADS, DIM)
        self.pool = torch.full(shape, nan, dtype=torch.bfloat16, device=device)
        self.free = (1 + torch.randperm(num_slots // page - 1, generator=rng)).tolist()
        self.table = torch.full((bs + 1, CONTEXT), -1, dtype=torch.int32)
        self.index = torch.randperm(bs + 1, generator=rng)[:bs]
        self.reserved = [0] * bs
        self.committed = [0] * bs
        # The root of the first step is the last prompt token: emitted, without KV.
        self.tokens = [[randint(rng, 0, VOCAB)] for _ in range(bs)]
        self.buffers = [self.pool[i, kind] for i in range(LAYERS) for kind in range(2)]
        self.kv = dict(
            zip(("kv_ptrs", "kv_row_bytes", "num_slots"), ops.kv_table(self.buffers), strict=True)
        )

    def reserve(self, width):
        """Slots up to C + W; nothing is ever freed while a request runs."""
        for r in range(self.bs):
            while self.reserved[r] < self.committed[r] + width:
                first = self.free.pop() * self.page
                end = min(self.reserved[r] + self.page, CONTEXT)
                slots = torch.arange(first, first + end - self.reserved[r], dtype=torch.int32)
                self.table[self.index[r], self.reserved[r] : end] = slots
                self.reserved[r] = end

    def draft(self, width, chain):
        """A tree per request whose tokens are the target's choice more often than not."""
        trees, tokens, targets = [], [], []
        for r in range(self.bs):
            parents = chain_parents(width) if chain else random_parents(width, self.rng)
            history, chosen = {}, []
            for node, parent in enumerate(parents):
                before = self.tokens[r][:-1] if parent is None else history[parent]
                token = self.tokens[r][-1]
                if parent is not None:
                    right = randint(self.rng, 0, 10) < 7
                    token = next_token(before) if right else randint(self.rng, 0, VOCAB)
                history[node] = [*before, token]
                chosen.append(token)
            trees.append(parents)
            tokens.append(chosen)
            targets.append([next_token(history[node]) for node in range(width)])
        return trees, tokens, targets

    def step(self, width, chain):
        self.reserve(width)
        trees, tokens, targets = self.draft(width, chain)
        seen = torch.stack([reference.ancestors_and_self(tree) for tree in trees])
        depth = seen.sum(2) - 1
        loc = torch.stack(
            [
                self.table[self.index[r], self.committed[r] : self.committed[r] + width]
                for r in range(self.bs)
            ]
        ).flatten()
        assert (loc >= 0).all()
        lengths = torch.tensor(self.committed, device=self.device)
        metadata = {
            "req_to_token": self.table.to(self.device),
            "req_pool_indices": self.index.to(self.device),
            "seq_lens": lengths,
            "out_cache_loc": loc.long().to(self.device),
        }
        if self.device != "cpu":
            ctas = ops.attn_num_ctas(0, DIM)
            size = ops.plan_numel(self.bs, ctas), ops.attn_workspace_bytes(ctas, width * 2, DIM)
            metadata["plan"] = torch.zeros(size[0], dtype=torch.int32, device=self.device)
            ops.plan(lengths, HEADS, ctas, metadata["plan"])
            metadata["workspace"] = torch.zeros(size[1], dtype=torch.uint8, device=self.device)
        for layer in range(LAYERS):
            self.attend(layer, width, tokens, depth, seen, metadata)
        links = [links_of_parents(tree) for tree in trees]

        def int64s(values):
            return torch.tensor(values, dtype=torch.int64, device=self.device)

        out = outputs(self.bs, width, self.device)
        ops.commit(
            int64s(tokens),
            lengths,
            **out,
            targets=int64s(targets),
            retrieve_next_token=None if chain else int64s([pair[0] for pair in links]),
            retrieve_next_sibling=None if chain else int64s([pair[1] for pair in links]),
            out_cache_loc=metadata["out_cache_loc"],
            **self.kv,
        )
        counts, emitted = out["accept_lens"].tolist(), out["accept_tokens"].tolist()
        for r in range(self.bs):
            self.tokens[r] += emitted[r][: counts[r]]
            self.committed[r] += counts[r]
            assert out["bonus_tokens"][r] == self.tokens[r][-1]
        assert out["new_seq_lens"].tolist() == self.committed
        return counts

    def attend(self, layer, width, tokens, depth, seen, metadata):
        """Stores the step's rows and checks the rows of all nodes against their own history."""
        fresh = [
            torch.stack(
                [
                    row(tokens[r][node], self.committed[r] + int(depth[r, node]), layer, kind)
                    for r in range(self.bs)
                    for node in range(width)
                ]
            ).to(self.device)
            for kind in range(2)
        ]
        q = torch.randn(self.bs * width, 2 * HEADS, DIM, generator=self.rng)
        q = q.to(torch.bfloat16).to(self.device)
        out = torch.full_like(q, float("nan"))
        call = {
            "q": q,
            "k_cache": self.pool[layer, 0],
            "v_cache": self.pool[layer, 1],
            "out": out,
            "k_new": fresh[0],
            "v_new": fresh[1],
            **metadata,
        }
        if width == 1:
            ops.decode_attn(**call)
        else:
            ops.verify_attn(**call, tree_words=reference.to_words(seen).to(self.device))
        r = randint(self.rng, 0, self.bs)
        history = self.plain_rows(r, layer)
        rows = slice(r * width, (r + 1) * width)
        k, v = (
            torch.cat([past.to(self.device), new[rows]])
            for past, new in zip(history, fresh, strict=True)
        )
        visible = torch.ones(width, len(k), dtype=torch.bool)
        visible[:, self.committed[r] :] = seen[r]
        want, _ = reference.attention(q[rows], k, v, visible.to(self.device), DIM**-0.5)
        torch.testing.assert_close(out[rows].double(), want, atol=0.02, rtol=0.02)

    def plain_rows(self, r, layer):
        """K and V of positions 0..C-1 as plain decoding of the same tokens writes them."""
        pairs = list(enumerate(self.tokens[r][: self.committed[r]]))
        return [
            torch.stack([row(token, at, layer, kind) for at, token in pairs])
            if pairs
            else torch.zeros(0, HEADS, DIM, dtype=torch.bfloat16)
            for kind in range(2)
        ]

    def check(self):
        taken = []
        for r in range(self.bs):
            history = [self.tokens[r][0]]
            while len(history) < len(self.tokens[r]):
                history.append(next_token(history))
            assert self.tokens[r] == history, "not the tokens of plain greedy decoding"
            assert len(history) == self.committed[r] + 1, "exactly the root has no KV"
            slots = self.table[self.index[r], : self.committed[r]].long()
            taken += slots.tolist()
            for layer in range(LAYERS):
                for kind, want in enumerate(self.plain_rows(r, layer)):
                    got = self.pool[layer, kind, slots.to(self.device)]
                    assert_bits_equal(got, want, f"request {r} layer {layer} kind {kind}")
        assert len(taken) == len(set(taken)), "two committed positions share a slot"
        assert self.pool[:, :, 0].isnan().all(), "the dummy slot was written"


@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize(
    "modes",
    [((8, False),), ((1, True),), ((8, False), (1, True)), ((4, True), (1, True), (16, False))],
    ids=["tree", "plain", "alternating", "chain-plain-tree"],
)
def test_window_over_many_steps(modes, page, device, rng):
    """Modes in blocks of random length: a switch moves nothing and loses nothing."""
    server = Server(3, page, rng, device)
    longest, counts = max(width for width, _ in modes), []
    while max(server.committed) + longest + 1 < CONTEXT // 2 and len(counts) < 40:
        width, chain = modes[randint(rng, 0, len(modes))]
        for _ in range(randint(rng, 1, 4)):
            if max(server.committed) + width >= CONTEXT:
                break
            counts += server.step(width, chain)
        server.check()
    if longest > 1:
        assert max(counts) > 1, "no draft was ever accepted: nothing was tested"


def test_simulation_notices_a_missing_compaction(rng):
    """Negative control: without the KV part of commit a tree's rows are wrong."""
    server = Server(2, 1, rng, "cpu")
    server.kv = {}
    with pytest.raises(AssertionError):
        for _ in range(10):
            server.step(8, False)
            server.check()


def test_slide(host):
    assert host.slide(100, 1) == 101
    assert host.slide((1 << 40), 5) == (1 << 40) + 5
    assert host.max_window == 64
