# SPDX-License-Identifier: Apache-2.0
"""Attention cases: inputs, an fp32 reference of sampled rows, and our implementation."""

import contextlib
import math
import random
from dataclasses import dataclass

import torch

import specfused
from bench.cases import ELEMENT_BYTES, AttnCase, PlanCase
from bench.timing import Harness

DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}
# ||out - reference|| / ||reference|| of a row, P and out in the case's dtype.
TOLERANCE = {"bf16": 1e-2, "f16": 2e-3, "f32": 1e-4}
SAMPLED_REQUESTS = 3
SAMPLED_ROWS = 8


def random_parents(w: int, rng: random.Random) -> list[int]:
    """Parent of each node; the root's is -1, others have a smaller index."""
    return [-1] + [rng.randrange(i) for i in range(1, w)]


def words_of(parents: list[int]) -> list[int]:
    """Signed 64-bit tree words: each node sees its ancestors and itself."""
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | 1 << node)
    return [w - (1 << 64) if w >> 63 else w for w in words]


def visible(words: torch.Tensor, w: int) -> torch.Tensor:
    """[bs, W, W] bool: may row i see window column c."""
    columns = torch.arange(w, device=words.device)
    return (words.unsqueeze(-1) >> columns) & 1 == 1


@dataclass
class AttnSet:
    """One rotation's data: a layer of its own, with slots of its own."""

    storage: torch.Tensor  # uint8; K and V are views of it, and it is what the read kernel reads
    k: torch.Tensor
    v: torch.Tensor
    q: torch.Tensor
    out: torch.Tensor
    table: torch.Tensor
    k_new: torch.Tensor
    v_new: torch.Tensor
    out_cache_loc: torch.Tensor


class AttnData:
    """Inputs of one case, rotated over enough sets to exceed the L2."""

    def __init__(self, case: AttnCase, harness: Harness, seed: int = 0):
        self.case, self.device = case, harness.device
        rng = random.Random(seed)
        self.generator = torch.Generator(device=self.device).manual_seed(seed)
        self.dtype = DTYPES[case.dtype]
        self.lens = case.lens
        self.scale = 1.0 / math.sqrt(case.d)
        order = list(range(case.bs))
        rng.shuffle(order)
        self.rows = order  # request -> row of the slot table
        self.req_pool_indices = self._tensor(order)
        self.seq_lens = self._tensor(self.lens)
        trees = [words_of(random_parents(case.w, rng)) for _ in range(case.bs)]
        self.words = self._tensor(trees)
        self.sets = [self._make_set() for _ in range(harness.num_sets(case.kv_bytes))]
        self.sample = self._sample(rng)

    def _tensor(self, values) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def _normal(self, *shape: int) -> torch.Tensor:
        out = torch.empty(shape, dtype=self.dtype, device=self.device)
        return out.normal_(generator=self.generator)

    def _make_set(self) -> AttnSet:
        c = self.case
        pages = [-(-(n + c.w) // c.page) for n in self.lens]
        slots = (sum(pages) + 1) * c.page  # page 0 is nobody's
        half = -(-slots * c.hkv * c.d * ELEMENT_BYTES[c.dtype] // 256) * 256
        size = max(2 * half, -(-c.bytes // 256) * 256)
        storage = torch.zeros(size, dtype=torch.uint8, device=self.device)
        used = slots * c.hkv * c.d * ELEMENT_BYTES[c.dtype]
        k, v = (
            storage[at : at + used].view(self.dtype).view(slots, c.hkv, c.d) for at in (0, half)
        )
        k.normal_(generator=self.generator)
        v.normal_(generator=self.generator)
        shuffled = torch.randperm(sum(pages), generator=self.generator, device=self.device) + 1
        table = torch.zeros((c.bs, max(pages) * c.page), dtype=torch.int32, device=self.device)
        offsets = torch.arange(c.page, device=self.device)
        start, window = 0, []
        for request, count in enumerate(pages):
            ids = shuffled[start : start + count]
            start += count
            row = (ids.unsqueeze(1) * c.page + offsets).reshape(-1)
            table[self.rows[request], : row.numel()] = row.int()
            mine = row[self.lens[request] : self.lens[request] + c.w]
            # Window values weigh as much as the committed ones together, so that the check
            # sees a wrong tree bit at any length.
            v[mine] *= math.sqrt(self.lens[request])
            window.append(mine)
        where = torch.cat(window)
        rows = c.bs * c.w
        return AttnSet(
            storage=storage[: -(-c.bytes // 16) * 16],
            k=k,
            v=v,
            q=self._normal(rows, c.hq, c.d),
            out=torch.empty((rows, c.hq, c.d), dtype=self.dtype, device=self.device),
            table=table,
            k_new=k[where].contiguous(),
            v_new=v[where].contiguous(),
            out_cache_loc=where,
        )

    def _sample(self, rng: random.Random) -> list[tuple[int, int]]:
        """(request, row) pairs that are compared with the reference."""
        c = self.case
        requests = {0, c.bs - 1} | {rng.randrange(c.bs) for _ in range(SAMPLED_REQUESTS - 2)}
        rows = {0, c.w - 1} | {rng.randrange(c.w) for _ in range(SAMPLED_ROWS - 2)}
        return [(r, i) for r in sorted(requests) for i in sorted(rows)]

    def slots(self, s: AttnSet, request: int, count: int) -> torch.Tensor:
        """Slots of a request's first `count` positions, int64."""
        return s.table[self.rows[request], :count].long()

    def full_mask(self) -> torch.Tensor:
        """Flat bool mask, request after request: W rows of committed + W cells."""
        tree, w = visible(self.words, self.case.w), self.case.w
        parts = []
        for request, n in enumerate(self.lens):
            cells = torch.ones((w, n + w), dtype=torch.bool, device=self.device)
            cells[:, n:] = tree[request]
            parts.append(cells.view(-1))
        return torch.cat(parts)

    def error(self, out: torch.Tensor, chain: bool) -> float:
        """Largest relative error of a sampled row of set 0; inf if any row is not finite."""
        if not bool(torch.isfinite(out).all()):
            return math.inf
        c, s = self.case, self.sets[0]
        tree, worst = visible(self.words, c.w), 0.0
        for request in sorted({r for r, _ in self.sample}):
            n = self.lens[request]
            where = self.slots(s, request, n + c.w)
            k, v = s.k[where].float(), s.v[where].float()
            rows = self._tensor([i for r, i in self.sample if r == request])
            flat = request * c.w + rows
            q = s.q[flat].float().view(len(rows), c.hkv, c.hq // c.hkv, c.d)
            scores = torch.einsum("rhgd,thd->rhgt", q, k) * self.scale
            sees = tree[request][rows]
            if chain:
                sees = torch.arange(c.w, device=self.device) <= rows.unsqueeze(1)
            scores[..., n:].masked_fill_(~sees[:, None, None], -math.inf)
            ref = torch.einsum("rhgt,thd->rhgd", scores.softmax(-1), v).reshape(len(rows), -1)
            got = out[flat].float().reshape(len(rows), -1)
            worst = max(worst, float(((got - ref).norm(dim=1) / ref.norm(dim=1)).max()))
        return worst


class SpecFused:
    """Our attention: one launch per layer; the plan is made once, as in a step."""

    name = "specfused"

    def available(self, device: torch.device) -> str | None:
        if device.type == "cuda" and not specfused.ops.build_info()["archs"]:
            return "this build of specfused has no CUDA kernels"
        return None

    def applies(self, case: AttnCase) -> bool:
        return True

    def chain(self, case: AttnCase) -> bool:
        return case.w == 1

    def prepare(self, data: AttnData):
        c = data.case
        self.data, self.plan, self.workspace = data, None, None
        if data.device.type == "cuda":
            ctas = specfused.ops.attn_num_ctas(data.device.index or 0, c.d)
            self.plan = make_plan_tensor(c.bs, ctas, data.device)
            specfused.ops.plan(data.seq_lens, c.hkv, ctas, self.plan)
            size = specfused.ops.attn_workspace_bytes(ctas, c.w * c.hq // c.hkv, c.d)
            self.workspace = torch.zeros(size, dtype=torch.uint8, device=data.device)

    def launch(self, i: int) -> torch.Tensor:
        data, s = self.data, self.data.sets[i]
        where = (s.q, s.k, s.v, s.table, data.req_pool_indices, data.seq_lens)
        shared = {"plan": self.plan, "workspace": self.workspace, "sm_scale": data.scale}
        if data.case.store:
            shared |= {"k_new": s.k_new, "v_new": s.v_new, "out_cache_loc": s.out_cache_loc}
        if data.case.w == 1:
            specfused.ops.decode_attn(*where, s.out, **shared)
        else:
            specfused.ops.verify_attn(*where, data.words, s.out, **shared)
        return s.out


class SpecFusedNoPdl(SpecFused):
    """The same, each launch after the end of the one in front of it."""

    name = "specfused-nopdl"

    def available(self, device: torch.device) -> str | None:
        return super().available(device) or no_overlap(device)

    def launch(self, i: int) -> torch.Tensor:
        with launches_apart():
            return super().launch(i)


def no_overlap(device: torch.device) -> str | None:
    """Why launches do not overlap on this device anyway."""
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9:
        return None
    return "programmatic dependent launch needs sm_90"


@contextlib.contextmanager
def launches_apart():
    """Without programmatic dependent launch, while launches are made or captured."""
    set_overlap(False)
    try:
        yield
    finally:
        set_overlap(True)


def set_overlap(on: bool):
    torch.ops.specfused.bench_overlap(on)


def make_plan_tensor(bs: int, ctas: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(specfused.ops.plan_numel(bs, ctas), dtype=torch.int32, device=device)


class PlanLaunch:
    """The split plan of a batch alone."""

    def __init__(self, case: PlanCase, device: torch.device):
        self.case = case
        self.ctas = specfused.ops.attn_num_ctas(device.index or 0, case.d)
        self.out = make_plan_tensor(case.bs, self.ctas, device)
        self.lens = torch.full((case.bs,), case.kv, dtype=torch.int64, device=device)
        self.bytes = self.lens.numel() * 8 + self.out.numel() * 4

    def launch(self, i: int):
        specfused.ops.plan(self.lens, self.case.hkv, self.ctas, self.out)
