# SPDX-License-Identifier: Apache-2.0
"""What is measured: cases, their ids (never renamed) and the suites they form."""

import itertools
import re
from dataclasses import dataclass

ELEMENT_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


@dataclass(frozen=True)
class AttnCase:
    """Attention of `w` rows per request over `kv` committed tokens and the window."""

    bs: int
    kv: int
    w: int
    hq: int = 32
    hkv: int = 8
    d: int = 128
    dtype: str = "bf16"
    page: int = 1
    rest: int | None = None  # length of all requests but the first; None: kv for all
    store: bool = False  # the launch also stores the step's K/V rows

    @property
    def id(self) -> str:
        kv = f"kv{self.kv}" + (f"-rest{self.rest}" if self.rest is not None else "")
        tail = "/store" if self.store else ""
        return (
            f"attn/bs{self.bs}/{kv}/w{self.w}/hq{self.hq}/hkv{self.hkv}/d{self.d}/{self.dtype}"
            f"/page{self.page}{tail}"
        )

    @property
    def label(self) -> str:
        kv = f"{self.kv}" if self.rest is None else f"{self.kv}+{self.rest}.."
        return (
            f"attn   bs {self.bs:3d} kv {kv:>12s} w {self.w:2d} h {f'{self.hq}/{self.hkv}':5s} "
            f"d{self.d:<3d} {self.dtype:4s} p{self.page:<2d}" + (" +store" if self.store else "")
        )

    @property
    def lens(self) -> list[int]:
        """Committed length of each request."""
        return [self.kv] + [self.kv if self.rest is None else self.rest] * (self.bs - 1)

    @property
    def kv_bytes(self) -> int:
        rows = sum(self.lens) + self.bs * self.w
        return rows * self.hkv * self.d * 2 * ELEMENT_BYTES[self.dtype]

    @property
    def bytes(self) -> int:
        """K and V of every committed and window row once, q once, out once."""
        return self.kv_bytes + 2 * self.bs * self.w * self.hq * self.d * ELEMENT_BYTES[self.dtype]

    @property
    def flops(self) -> int:
        """Of Q K^T and P V over the committed rows; what a row sees of the window is left out."""
        return 4 * sum(self.lens) * self.w * self.hq * self.d


ATTN_ID = re.compile(
    r"attn/bs(?P<bs>\d+)/kv(?P<kv>\d+)(-rest(?P<rest>\d+))?/w(?P<w>\d+)"
    r"/hq(?P<hq>\d+)/hkv(?P<hkv>\d+)/d(?P<d>\d+)/(?P<dtype>\w+)/page(?P<page>\d+)(?P<store>/store)?"
)


def attn_case(id_: str) -> AttnCase | None:
    """The attention case that has this id; None if it is another kind's."""
    found = ATTN_ID.fullmatch(id_)
    if found is None:
        return None
    parts = found.groupdict()
    numbers = {k: int(parts[k]) for k in ("bs", "kv", "w", "hq", "hkv", "d", "page")}
    rest = None if parts["rest"] is None else int(parts["rest"])
    return AttnCase(**numbers, rest=rest, dtype=parts["dtype"], store=parts["store"] is not None)


@dataclass(frozen=True)
class PlanCase:
    """The split plan, made once per step for all layers; beside the attention cases."""

    bs: int
    kv: int
    hkv: int = 8
    d: int = 128

    @property
    def id(self) -> str:
        return f"plan/bs{self.bs}/kv{self.kv}/hkv{self.hkv}/d{self.d}"

    @property
    def label(self) -> str:
        return f"plan   bs {self.bs:3d} kv {self.kv:12d}      hkv {self.hkv} d{self.d}"


@dataclass(frozen=True)
class CommitCase:
    """The end of a step over trees of `w` nodes, KV of all layers included."""

    bs: int
    w: int
    layers: int = 32
    hkv: int = 8
    d: int = 128
    dtype: str = "bf16"
    vocab: int | None = None  # None: targets are given
    logits_dtype: str = "f32"  # what SGLang's logits processor hands on
    sample: bool = False  # from the logits at a temperature; else their argmax
    hidden: int = 0  # elements of a hidden state that moves with the KV (EAGLE-3: 3 x 4096)

    @property
    def kind(self) -> str:
        if self.vocab is None:
            return "targets"
        suffix = "" if self.logits_dtype == "f32" else f"-{self.logits_dtype}"
        return f"{'sample' if self.sample else 'argmax'}-v{self.vocab}{suffix}"

    @property
    def id(self) -> str:
        return (
            f"commit/bs{self.bs}/w{self.w}/l{self.layers}/hkv{self.hkv}/d{self.d}/{self.dtype}"
            f"/{self.kind}" + (f"/hidden{self.hidden}" if self.hidden else "")
        )

    @property
    def label(self) -> str:
        kind = self.kind + (f" +hidden {self.hidden}" if self.hidden else "")
        return f"commit bs {self.bs:3d} w {self.w:2d} l {self.layers:2d} {self.dtype} {kind}"

    @property
    def max_path(self) -> int:
        """Width of accept_index: draft steps + 1 (3-4-16 trees; 7 steps for 64 nodes)."""
        return 4 if self.w <= 16 else 8

    @property
    def row_bytes(self) -> int:
        return self.hkv * self.d * ELEMENT_BYTES[self.dtype]

    @property
    def logits_bytes(self) -> int:
        return self.bs * self.w * (self.vocab or 0) * ELEMENT_BYTES[self.logits_dtype]


Case = AttnCase | PlanCase | CommitCase

SHAPES = ((1, 1024), (1, 8192), (1, 65536), (16, 8192), (64, 4096), (128, 1024))
WIDTHS = (1, 4, 16, 64)


def _attn() -> list[Case]:
    cases: list[Case] = []
    for bs, kv in SHAPES:
        cases += [AttnCase(bs, kv, w) for w in WIDTHS]
        cases.append(PlanCase(bs, kv))
    return cases


def _attn_extra() -> list[Case]:
    at = (64, 4096)
    heads = ((64, 8), (40, 8), (28, 4), (96, 8), (32, 32))
    cases: list[Case] = [AttnCase(*at, w, page=page) for page in (16, 64) for w in (1, 16)]
    cases += [AttnCase(*at, w, hq=hq, hkv=hkv) for hq, hkv in heads for w in (1, 4, 16)]
    cases += [AttnCase(*at, w, d=d) for d in (64, 256) for w in (1, 4, 16)]
    cases += [AttnCase(64, 131072, w, rest=1024) for w in (1, 4, 16)]
    cases += [AttnCase(*at, 16, dtype="f16")]
    cases += [AttnCase(*at, w, store=True) for w in (1, 4, 16)]
    return cases


def _commit() -> list[Case]:
    cases: list[Case] = []
    for bs, w in itertools.product((1, 16, 64, 128), (16, 64)):
        cases.append(CommitCase(bs, w))
        cases += [CommitCase(bs, w, vocab=128256, logits_dtype=t) for t in ("f32", "bf16")]
        cases.append(CommitCase(bs, w, vocab=128256, sample=True))
        if w == 16:
            cases.append(CommitCase(bs, w, hidden=3 * 4096))
    return cases


def _quick() -> list[Case]:
    shapes = ((1, 8192, 1), (1, 8192, 16), (16, 8192, 4), (64, 4096, 1), (64, 4096, 4))
    cases: list[Case] = [AttnCase(*s) for s in (*shapes, (64, 4096, 16), (64, 4096, 64))]
    cases += [PlanCase(64, 4096), CommitCase(1, 16), CommitCase(64, 16)]
    return cases + [CommitCase(16, 16, vocab=128256, sample=sample) for sample in (False, True)]


def _cpu_attn() -> list[Case]:
    small = {"hq": 8, "hkv": 2, "d": 64}
    cases = [AttnCase(1, 256, w, dtype="f32", **small) for w in (1, 4, 16)]
    cases += [AttnCase(4, 128, w, dtype="bf16", **small) for w in (1, 16)]
    return [*cases, AttnCase(2, 96, 4, dtype="f32", page=16, rest=32, **small)]


def _cpu_commit() -> list[Case]:
    small = {"layers": 2, "hkv": 2, "d": 64, "dtype": "f32"}
    logits = {"vocab": 4096, **small}
    cases = [CommitCase(4, 16, **small), CommitCase(4, 16, hidden=256, **small)]
    return cases + [CommitCase(2, 16, sample=sample, **logits) for sample in (False, True)]


def suite(name: str, device: str) -> list[Case]:
    """Cases of a suite. Without a GPU the same suites hold a few small cases with ids of their own.

    Args:
        name: quick, attn, commit or all.
        device: cuda or cpu.
    """
    if device == "cpu":
        parts = {"attn": _cpu_attn(), "commit": _cpu_commit()}
        return parts.get(name, parts["attn"] + parts["commit"])
    if name == "quick":
        return _quick()
    if name == "attn":
        return _attn()
    if name == "commit":
        return _commit()
    return _attn() + _attn_extra() + _commit()


def select(cases: list[Case], pattern: str | None) -> list[Case]:
    """Cases whose id contains `pattern`, or matches it as a regular expression if none does."""
    if not pattern:
        return cases
    found = [c for c in cases if pattern in c.id]
    return found or [c for c in cases if re.search(pattern, c.id)]
