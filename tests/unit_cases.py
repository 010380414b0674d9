# SPDX-License-Identifier: Apache-2.0
"""Shapes of the attention tests. (Not cases.py: the engine tests have a module of that name.)

SMOKE   a minute on two CPU cores: every group size, head_dim and dtype once.
CORNER  the borders: tile ends, empty prefix, one row, 64 rows, no request.
GRID    what takes a GPU.
"""

from dataclasses import dataclass, replace

import torch

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
GROUPS = (1, 2, 4, 5, 6, 7, 8, 12, 16)
WIDTHS = (1, 2, 3, 4, 8, 16, 31, 32, 33, 64)
CUDA_HEAD_DIMS = (64, 128, 256)


@dataclass(frozen=True)
class AttnCase:
    """A batch: one committed length per request, `width` rows each."""

    lengths: tuple[int, ...]
    width: int = 4
    group: int = 4
    kv_heads: int = 1
    head_dim: int = 64
    dtype: str = "bf16"
    page: int = 1
    tree: str = "random"  # or chain, cut (nodes that no link reaches), words (any bits, even none)
    store: bool = True  # the op stores the step's rows; else they are in the pool already
    includes_step: bool = False  # seq_lens counts the step's rows
    layout: str = "apart"  # or fused (K and V of a slot side by side), uneven (all strides differ)
    num_ctas: int | None = None  # of the plan; None: what the op asks for

    @property
    def id(self):
        lengths = ",".join(map(str, self.lengths[:4])) + ("…" if len(self.lengths) > 4 else "")
        flags = "".join(
            f"-{name}"
            for name, on in [
                (self.tree, self.tree != "random"),
                ("nostore", not self.store),
                ("incl", self.includes_step),
                (self.layout, self.layout != "apart"),
                (f"ctas{self.num_ctas}", self.num_ctas),
            ]
            if on
        )
        return (
            f"bs{len(self.lengths)}-kv{lengths}-w{self.width}-g{self.group}x{self.kv_heads}"
            f"-d{self.head_dim}-{self.dtype}-page{self.page}{flags}"
        )

    @property
    def torch_dtype(self):
        return DTYPES[self.dtype]

    def with_(self, **changes):
        return replace(self, **changes)


SMOKE = [
    AttnCase((65,), width=3, group=1, kv_heads=2),
    AttnCase((0, 127, 64), width=4, group=2, kv_heads=2, head_dim=128, page=16),
    AttnCase((200, 1, 63), width=8, group=4, kv_heads=2, dtype="fp16", tree="cut"),
    AttnCase((127,), width=16, group=5, head_dim=128, page=64, includes_step=True),
    AttnCase((64, 65), width=2, group=6, kv_heads=2, dtype="fp32", tree="words"),
    AttnCase((200, 0), width=4, group=7, head_dim=64, store=False),
    AttnCase((1, 63), width=31, group=8, kv_heads=2, head_dim=64, layout="uneven"),
    AttnCase((65, 64), width=4, group=12, head_dim=128, dtype="fp16", page=16, tree="chain"),
    AttnCase((127,), width=4, group=16, head_dim=256, tree="words", store=False),
    AttnCase((1000,), width=8, group=4, head_dim=64, page=16),
    AttnCase((63, 64, 65), width=16, group=1, head_dim=256, dtype="fp32", layout="fused"),
]

CORNER = [
    AttnCase((), width=1),
    AttnCase((0,), width=1, group=1),
    AttnCase((0, 0, 0), width=2, group=5, tree="words"),
    AttnCase((63, 64, 0), width=1, group=8, head_dim=128),
    AttnCase((1,), width=64, group=1),
    AttnCase((64,), width=64, group=2, tree="words", dtype="fp16"),
    AttnCase((63,), width=33, group=1, kv_heads=2, page=16, tree="chain"),
    AttnCase((127, 0), width=32, group=1, tree="cut", includes_step=True),
    AttnCase((5,) * 17, width=3, group=2, page=16, layout="fused"),
    AttnCase((0,), width=64, group=16, tree="words", store=False),
]

# Only the CPU serves other head_dims and larger groups.
CPU_ONLY = [
    AttnCase((65, 3), width=4, group=2, head_dim=80),
    AttnCase((17,), width=8, group=3, head_dim=16, dtype="fp32", tree="words"),
    AttnCase((70,), width=2, group=24, head_dim=16, dtype="fp16"),
]


def _grid():
    """Every group with every width, head_dims and dtypes taking turns; then long contexts."""
    cases = []
    lengths = ((0, 1, 63), (64, 65, 127), (200, 1000, 0), (5000,), tuple(range(17)))
    for i, group in enumerate(GROUPS):
        for j, width in enumerate(WIDTHS):
            n = i * len(WIDTHS) + j
            cases.append(
                AttnCase(
                    lengths[n % len(lengths)],
                    width=width,
                    group=group,
                    kv_heads=(1, 2, 8)[n % 3],
                    head_dim=CUDA_HEAD_DIMS[(i + j) % 3],
                    dtype=("bf16", "fp16", "bf16", "fp32")[(n // 3) % 4],
                    page=(1, 16, 64)[(n // 2) % 3],
                    tree=("random", "words", "cut", "chain")[n % 4],
                    store=n % 5 != 0,
                    includes_step=n % 7 == 0,
                    layout=("apart", "fused", "uneven")[n % 3],
                )
            )
    # A unit over many CTAs, many units in one CTA, and segments that end on every border.
    for dtype in ("bf16", "fp16"):
        for head_dim in CUDA_HEAD_DIMS:
            for width in (1, 4, 16, 64):
                for num_ctas in (None, 1, 3, 37, 1000):
                    cases.append(
                        AttnCase(
                            (5000, 0, 64, 1000),
                            width=width,
                            kv_heads=2,
                            head_dim=head_dim,
                            dtype=dtype,
                            num_ctas=num_ctas,
                        )
                    )
    return cases


GRID = _grid()


def _work(case):
    """Multiply-adds of a case; a CPU core does about a thousand million in a second."""
    rows = len(case.lengths) * case.width * case.group * case.kv_heads
    longest = max(case.lengths, default=0) + case.width
    return 2 * rows * longest * case.head_dim


# The part of the grid that two CPU cores do in seconds.
CPU_GRID = [case for case in GRID if case.num_ctas is None and _work(case) < 30e6]


def ids(cases):
    return [case.id for case in cases]
