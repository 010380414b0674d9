# SPDX-License-Identifier: Apache-2.0
"""Commit cases: trees with a random accepted path per request, KV of all layers, our one op.

Each data set has its own trees, tokens and window slots in one pool, so the rows that move are not
in the L2. Repeating a set moves the same rows again: same bytes, same path.
"""

import random
from dataclasses import dataclass

import torch

import specfused
from bench.attn import DTYPES, launches_apart, no_overlap
from bench.cases import ELEMENT_BYTES, CommitCase
from bench.timing import Harness

MAX_SETS = 640
UNDRAFTED = 7  # a token that no draft proposes; drafts are 8 and above


def random_tree(w: int, max_path: int, rng: random.Random):
    """A tree with an accepted path of increasing nodes.

    Returns:
        parent of each node (-1: root) and the path, root first, 1 to max_path nodes.
    """
    length = rng.randint(1, min(max_path, w))
    path = [0, *sorted(rng.sample(range(1, w), length - 1))]
    parents = [-1] + [rng.randrange(i) for i in range(1, w)]
    for parent, node in zip(path, path[1:], strict=False):
        parents[node] = parent
    return parents, path


def links(parents: list[int]) -> tuple[list[int], list[int]]:
    """First child and next sibling of each node, -1 for none."""
    first, sibling, last = ([-1] * len(parents) for _ in range(3))
    for node, parent in enumerate(parents):
        if parent < 0:
            continue
        if first[parent] < 0:
            first[parent] = node
        else:
            sibling[last[parent]] = node
        last[parent] = node
    return first, sibling


@dataclass
class CommitSet:
    """Inputs and outputs of one step."""

    paths: list[list[int]]
    draft_tokens: torch.Tensor
    targets: torch.Tensor
    next_token: torch.Tensor
    next_sibling: torch.Tensor
    out_cache_loc: torch.Tensor
    seq_lens: torch.Tensor
    logits: torch.Tensor | None
    coins: torch.Tensor | None
    coins_final: torch.Tensor | None
    hidden: torch.Tensor | None
    accept_index: torch.Tensor
    outputs: dict[str, torch.Tensor]


class CommitData:
    """Pool and rotated sets of one case."""

    def __init__(self, case: CommitCase, harness: Harness, seed: int = 0, sets: int | None = None):
        self.case, self.device = case, harness.device
        rng = random.Random(seed)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        guess = self._moved_bytes(case.bs * (case.max_path + 1) / 4) + case.logits_bytes
        sets = sets or harness.num_sets(int(guess), MAX_SETS)
        rows = case.bs * case.w
        slots = sets * rows + 1  # slot 0 is nobody's
        self.pool = torch.empty(
            (2 * case.layers, slots, case.hkv, case.d),
            dtype=DTYPES[case.dtype],
            device=self.device,
        ).normal_(generator=self.generator)
        self.buffers = list(self.pool)
        shuffled = torch.randperm(slots - 1, generator=self.generator, device=self.device) + 1
        self.sets = [self._make_set(shuffled[i * rows :][:rows], rng) for i in range(sets)]
        moved = [sum(n != j for p in s.paths for j, n in enumerate(p)) for s in self.sets]
        self.moved_rows = sum(moved) / len(moved)
        self.bytes = int(self._moved_bytes(self.moved_rows)) + case.logits_bytes

    def _moved_bytes(self, rows: float) -> float:
        """Read once, written once, in K and V of every layer and in the hidden states."""
        kv = 2 * self.case.layers * self.case.row_bytes
        return rows * (kv + self.case.hidden * ELEMENT_BYTES[self.case.dtype]) * 2

    def _make_set(self, window: torch.Tensor, rng: random.Random) -> CommitSet:
        c, device = self.case, self.device
        drafts, targets, first, sibling, paths = [], [], [], [], []
        for _ in range(c.bs):
            parents, path = random_tree(c.w, c.max_path, rng)
            tokens = [8 + node for node in range(c.w)]
            wanted = [UNDRAFTED] * c.w
            for node, child in zip(path, path[1:], strict=False):
                wanted[node] = tokens[child]
            a, b = links(parents)
            drafts.append(tokens)
            targets.append(wanted)
            first.append(a)
            sibling.append(b)
            paths.append(path)

        def ints(values, dtype=torch.int64):
            return torch.tensor(values, dtype=dtype, device=device)

        def out(*shape, dtype=torch.int32):
            return torch.full(shape, -2, dtype=dtype, device=device)

        choice = ints(targets)
        logits = None
        if c.vocab is not None:
            logits = torch.empty((c.bs * c.w, c.vocab), dtype=DTYPES[c.logits_dtype], device=device)
            logits.normal_(generator=self.generator)
            logits.scatter_(1, choice.view(-1, 1), 30.0)  # a probability of 1 in float32

        def coins(*shape):  # off the ends, where 1 and 1 - 1e-8 decide alike
            if not c.sample:
                return None
            return torch.empty(shape, device=device).uniform_(0.1, 0.9, generator=self.generator)

        hidden = None
        if c.hidden:
            hidden = torch.empty(c.bs * c.w, c.hidden, dtype=DTYPES[c.dtype], device=device)
            hidden.normal_(generator=self.generator)
        return CommitSet(
            paths=paths,
            draft_tokens=ints(drafts),
            targets=choice,
            next_token=ints(first),
            next_sibling=ints(sibling),
            out_cache_loc=window.contiguous(),
            seq_lens=ints([rng.randint(16, 128) for _ in range(c.bs)]),
            logits=logits,
            coins=coins(c.bs, c.w),
            coins_final=coins(c.bs),
            hidden=hidden,
            accept_index=out(c.bs, c.max_path),
            outputs={
                "num_correct_drafts": out(c.bs),
                "accept_lens": out(c.bs),
                "accept_tokens": out(c.bs, c.max_path),
                "bonus_tokens": out(c.bs),
                "new_seq_lens": out(c.bs, dtype=torch.int64),
                "next_token_ids": out(c.bs * c.w, dtype=torch.int64),
                "select_index": out(c.bs, dtype=torch.int64),
                "positions": out(c.bs * c.w, dtype=torch.int64),
                "window_ends": out(c.bs, dtype=torch.int64),
                "invalid_logits": out(c.bs),
            },
        )

    def read_sources(self) -> list[torch.Tensor]:
        """What the read kernel reads for t_read: the logits, or as many bytes as commit moves."""
        if self.case.vocab is not None:
            return [s.logits.view(-1).view(torch.uint8) for s in self.sets]
        flat, size = self.pool.view(-1).view(torch.uint8), max(self.bytes // 256, 1) * 256
        count = max(1, min(len(self.sets), flat.numel() // size))
        return [flat[i * size : (i + 1) * size] for i in range(count)]

    def rows(self) -> torch.Tensor:
        """Window rows of set 0 in the first, a middle and the last buffer."""
        picks = sorted({0, self.case.layers, 2 * self.case.layers - 1})
        return self.pool[picks][:, self.sets[0].out_cache_loc].clone()

    def mismatch(self, impl) -> str | None:
        """Runs the implementation on set 0: what differs from the drawn paths, or None."""
        c, s = self.case, self.sets[0]
        before = self.rows()
        hidden = None if s.hidden is None else s.hidden.clone()
        result = impl.launch(0)
        after = self.rows()
        moved = result.get("hidden", s.hidden)  # in place, or first rows of a copy
        expected = torch.full((c.bs, c.max_path), -1, dtype=torch.int64)
        for r, path in enumerate(s.paths):
            for j, node in enumerate(path):
                expected[r, j] = r * c.w + node
                if not torch.equal(after[:, r * c.w + j], before[:, r * c.w + node]):
                    return f"KV of request {r}, path position {j}"
                if hidden is not None and not torch.equal(
                    moved[r * c.w + j], hidden[r * c.w + node]
                ):
                    return f"hidden state of request {r}, path position {j}"
        lens = torch.tensor([len(p) for p in s.paths])
        drafted = s.draft_tokens.view(-1).cpu()
        bonus = torch.full((c.bs,), UNDRAFTED)
        for name, want in {
            "accept_index": expected,
            "accept_lens": lens,
            "bonus_tokens": bonus,
            "new_seq_lens": s.seq_lens.cpu() + lens,
        }.items():
            if not torch.equal(result[name].cpu().long(), want):
                return name
        if "accept_tokens" in result:
            for r, path in enumerate(s.paths):
                want = [int(drafted[r * c.w + n]) for n in path[1:]] + [UNDRAFTED]
                if result["accept_tokens"][r, : len(path)].tolist() != want:
                    return f"accept_tokens of request {r}"
        return None


class SpecFusedCommit:
    """Our commit: one launch, two with logits."""

    name = "specfused"
    eager = False

    def available(self, device: torch.device) -> str | None:
        if device.type == "cuda" and not specfused.ops.build_info()["archs"]:
            return "this build of specfused has no CUDA kernels"
        return None

    def prepare(self, data: CommitData):
        c = data.case
        self.data = data
        self.kv_ptrs, self.kv_row_bytes, self.num_slots = specfused.ops.kv_table(data.buffers)
        self.workspace = None
        if c.vocab is not None:
            size = specfused.ops.commit_workspace_bytes(c.bs, c.w, c.vocab)
            self.workspace = torch.zeros(size, dtype=torch.uint8, device=data.device)
        self.temperatures = torch.ones(c.bs, device=data.device) if c.sample else None

    def launch(self, i: int) -> dict[str, torch.Tensor]:
        s = self.data.sets[i]
        given = s.logits is not None
        specfused.ops.commit(
            s.draft_tokens,
            s.seq_lens,
            s.accept_index,
            **s.outputs,
            logits=s.logits,
            targets=None if given else s.targets,
            retrieve_next_token=s.next_token,
            retrieve_next_sibling=s.next_sibling,
            out_cache_loc=s.out_cache_loc,
            kv_ptrs=self.kv_ptrs,
            kv_row_bytes=self.kv_row_bytes,
            num_slots=self.num_slots,
            workspace=self.workspace,
            hidden_states=s.hidden,
            temperatures=self.temperatures,
            coins=s.coins,
            coins_final=s.coins_final,
        )
        return {"accept_index": s.accept_index, **s.outputs}


class SpecFusedCommitNoPdl(SpecFusedCommit):
    """The same, each launch after the end of the one in front of it."""

    name = "specfused-nopdl"

    def available(self, device: torch.device) -> str | None:
        return super().available(device) or no_overlap(device)

    def launch(self, i: int) -> dict[str, torch.Tensor]:
        with launches_apart():
            return super().launch(i)


def count_launches(launch) -> int | None:
    """Kernels, copies and fills that one call puts on the GPU, from the profiler."""
    from torch.profiler import ProfilerActivity, profile

    launch(0)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as prof:
        launch(0)
        torch.cuda.synchronize()
    device_events = [
        e for e in prof.events() if e.device_type == torch.autograd.DeviceType.CUDA and e.name
    ]
    return len(device_events) or None
