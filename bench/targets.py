# SPDX-License-Identifier: Apache-2.0
"""What attention was to reach, beside what a results file has: `python -m bench.targets FILE`."""

import argparse
import sys
from dataclasses import dataclass, replace

from bench import argtypes
from bench.cases import SHAPES, AttnCase, attn_case

OURS = "specfused"
TFLOPS = 550  # that wgmma is expected to reach where it, and not KV, is the bound
KINDS = ("share of t_read", "start", "one long request", "pages", "head_dim", "peers")


@dataclass(frozen=True)
class Target:
    case: AttnCase
    kind: str  # of KINDS
    text: str
    us: float
    limit: float  # us

    @property
    def met(self) -> bool:
        """Faster than a peer, else not slower than the limit."""
        return self.us < self.limit or (self.kind != "peers" and self.us == self.limit)


def of_t_read(case: AttnCase, t_read: float) -> tuple[str, float]:
    """For the base shapes: in words, and in us."""
    if case.w == 64:
        compute = case.flops / TFLOPS * 1e-6
        bound = "1.1 t_read" if 1.1 * t_read > compute else f"{TFLOPS} TFLOP/s"
        return f"{bound} + 5", max(1.1 * t_read, compute) + 5
    if case.w == 16:
        return "1.08 t_read + 4", 1.08 * t_read + 4
    if case.w == 4:
        return "1.01 x (1.03 t_read + 3)", 1.01 * (1.03 * t_read + 3)
    return "1.03 t_read + 3", 1.03 * t_read + 3


def targets(found: list[dict]) -> list[Target]:
    """All targets whose cases, and what these are compared with, were measured.

    Args:
        found: cases of a results file of the attn suite.
    """
    ours, peers = {}, {}
    for c in found:
        case = attn_case(c["id"])
        if case and c["impl"] == OURS:
            ours[case] = c
        elif case and not c["impl"].startswith(OURS):  # not ours in another setting
            peers.setdefault(case, []).append(c)
    rows = []

    def add(case: AttnCase, kind: str, text: str, limit: float):
        rows.append(Target(case, kind, text, ours[case]["us"], limit))

    for case, c in ours.items():
        t_read, page1, d128 = c["t_read_us"], replace(case, page=1), replace(case, d=128)
        if t_read and (case.bs, case.kv) in SHAPES and case == AttnCase(case.bs, case.kv, case.w):
            add(case, "share of t_read", *of_t_read(case, t_read))
        if case == AttnCase(1, 1024, case.w) and case.w <= 16:
            add(case, "start", "7 us", 7.0)
        if t_read and case.rest is not None:
            add(case, "one long request", "1.15 x (t_read + 3)", 1.15 * (t_read + 3))
        if case.page > 1 and page1 in ours:
            add(case, "pages", "page 1 + 2 %", 1.02 * ours[page1]["us"])
        if case.d != 128 and d128 in ours:
            limit = c["bytes"] / (0.8 * ours[d128]["bytes"]) * ours[d128]["us"]
            add(case, "head_dim", "80 % of the GB/s at head_dim 128", limit)
        for peer in sorted(peers.get(case, []), key=lambda p: p["us"]):
            add(case, "peers", f"faster than {peer['impl']}", peer["us"])
    return sorted(rows, key=lambda t: KINDS.index(t.kind))


def report(rows: list[Target]) -> list[str]:
    """A Markdown table, how many are met, and what the file has no case for.

    Of the peers that a case is faster than, the table has the fastest.
    """
    lines = ["| case | target | limit us | us | us / limit | |", "|---|---|---|---|---|---|"]
    seen = set()
    for t in rows:
        if t.kind == "peers" and t.met and t.case in seen:
            continue
        if t.kind == "peers":
            seen.add(t.case)
        name = t.case.id.removeprefix("attn/")
        ratio = t.us / t.limit
        met = "met" if t.met else "missed"
        lines.append(f"| {name} | {t.text} | {t.limit:.1f} | {t.us:.1f} | {ratio:.3f} | {met} |")
    lines.append("")
    for kind in KINDS:
        of_kind = [t for t in rows if t.kind == kind]
        met = f"{sum(t.met for t in of_kind)} of {len(of_kind)} met" if of_kind else "not measured"
        lines.append(f"{kind}: {met}")
    return lines


def main(argv: list[str]) -> int:
    """Returns 1 if a target is missed or was not measured."""
    p = argparse.ArgumentParser(prog="python -m bench.targets", description=__doc__)
    p.add_argument(
        "file", type=argtypes.results, help="results of bench/run.py --suite attn or all"
    )
    rows = targets(p.parse_args(argv).file["cases"])
    print("\n".join(report(rows)))
    return 0 if all(t.met for t in rows) and {t.kind for t in rows} == set(KINDS) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
