# SPDX-License-Identifier: Apache-2.0
"""Compares two result files of bench/run.py: `python bench/compare.py OLD NEW`. Needs no GPU."""

import argparse
import math
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parent.parent)  # the repository, as in run.py

from bench import argtypes  # noqa: E402

SAME_RUN = ("gpu", "torch", "cuda")  # a difference here makes the times incomparable


def load(path: str) -> dict:
    """Results file as {"meta", "cases": {(id, impl): case}}; cases without `us` are left out."""
    data = argtypes.results(path)
    timed = {(c["id"], c["impl"]): c for c in data["cases"] if "us" in c}
    return {"meta": data["meta"], "cases": timed}


def compare(old: dict, new: dict, tolerance: float, impl: str) -> tuple[list[str], list[str]]:
    """Lines to print and the regressions among them.

    Slower counts if the median grew by more than `tolerance` and the new fast tenth is above the
    old slow tenth, so that the spread of one run does not decide.

    Args:
        impl: whose slower cases are regressions; others are shown only.
    """
    lines, regressions, ratios = [], [], {}
    for key in ("meta." + k for k in SAME_RUN):
        a, b = (d["meta"].get(key.split(".")[1]) for d in (old, new))
        if a != b:
            lines.append(f"# {key} differs: {a} and {b}")
    for key, before in old["cases"].items():
        after = new["cases"].get(key)
        name = f"{key[0]:64s} {key[1]:20s}"
        if after is None:
            lines.append(f"{name} only in the old file")
            continue
        ratio = after["us"] / before["us"]
        ratios.setdefault(key[1], []).append(ratio)
        verdict = ""
        if ratio > 1 + tolerance and after["p10"] > before["p90"]:
            verdict = "slower"
            if key[1] == impl:
                regressions.append(key[0])
        elif ratio < 1 - tolerance and after["p90"] < before["p10"]:
            verdict = "faster"
        lines.append(
            f"{name} {before['us']:10.2f} -> {after['us']:10.2f} us {ratio:6.3f} {verdict}"
        )
    lines += [
        f"{key[0]:64s} {key[1]:20s} only in the new file"
        for key in new["cases"]
        if key not in old["cases"]
    ]
    for name, values in ratios.items():
        mean = math.exp(sum(map(math.log, values)) / len(values))
        lines.append(f"geomean new / old {name}: {mean:.3f} ({len(values)})")
    return lines, regressions


def main(argv: list[str]) -> int:
    """Returns 1 if a case of --impl became slower, 2 if nothing can be compared."""
    p = argparse.ArgumentParser(prog="python bench/compare.py", description=__doc__)
    p.add_argument("old", type=load)
    p.add_argument("new", type=load)
    p.add_argument("--tolerance", type=float, default=0.05, help="share of the old time, 0.05")
    p.add_argument("--impl", default="specfused", help="whose regressions fail the comparison")
    args = p.parse_args(argv)
    if not args.old["cases"].keys() & args.new["cases"].keys():
        p.error("old and new must have a timed case of --suite attn, commit or all in common")
    lines, regressions = compare(args.old, args.new, args.tolerance, args.impl)
    print("\n".join(lines))
    if regressions:
        print(f"{len(regressions)} regressions of {args.impl}: " + ", ".join(regressions))
    return 1 if regressions else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
