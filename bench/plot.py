# SPDX-License-Identifier: Apache-2.0
"""The roofline of attention: time of a launch against the bytes it must move.

`python -m bench.plot FILE PNG` draws from a results file.
"""

import argparse
import sys
from pathlib import Path

from bench import argtypes, cases
from bench.targets import TFLOPS

OURS = "specfused"
# Okabe and Ito's colours, told apart with any colour vision.
COLOURS = ("#0072B2", "#009E73", "#E69F00", "#D55E00", "#CC79A7")
Points = list[tuple[int, float]]  # (bytes, us)


def is_base(case: cases.AttnCase) -> bool:
    """Equal lengths, 32 query and 8 KV heads of 128, bf16, page 1."""
    return case == cases.AttnCase(case.bs, case.kv, case.w)


def chosen(found: list[dict]) -> list[tuple[cases.AttnCase, dict]]:
    """Measured attention cases: of the base shapes or, without any, all."""
    attention = [(cases.attn_case(c["id"]), c) for c in found]
    attention = [(case, c) for case, c in attention if case]
    return [(case, c) for case, c in attention if is_base(case)] or attention


def series(found: list[dict]) -> dict[tuple[str, int], Points]:
    """(impl, W) -> points by bytes; without our own launches in another setting."""
    points: dict[tuple[str, int], Points] = {}
    for case, c in chosen(found):
        if c["impl"] == OURS or not c["impl"].startswith(OURS):
            points.setdefault((c["impl"], case.w), []).append((c["bytes"], c["us"]))
    return {key: sorted(p) for key, p in sorted(points.items())}


def bounds(found: list[dict]) -> tuple[Points, Points]:
    """t_read over bytes, and the time of the widest step's FLOPs at `TFLOPS`."""
    measured = chosen(found)
    widest = max(case.w for case, _ in measured)
    reads = {(c["bytes"], c["t_read_us"]) for _, c in measured if c["t_read_us"]}
    compute = {(c["bytes"], case.flops / TFLOPS * 1e-6) for case, c in measured if case.w == widest}
    return sorted(reads), sorted(compute)


def labels(found: list[dict]) -> dict[tuple[int, float], str]:
    """(bytes, t_read) -> requests x context, of the narrowest steps; as many bytes share one."""
    measured = [(case, c) for case, c in chosen(found) if c["impl"] == OURS]
    narrowest = min((case.w for case, _ in measured), default=1)
    names: dict[int, tuple[int, float, list[str]]] = {}
    for case, c in measured:
        if case.w == narrowest:
            at = names.setdefault(
                round(c["bytes"], -7), (c["bytes"], c["t_read_us"] or c["us"], [])
            )
            at[2].append(f"{case.bs} x {case.kv}")
    return {at[:2]: "\n".join(at[2]) for at in names.values()}


def draw(meta: dict, found: list[dict], path: Path) -> str:
    """Writes the figure to `path`; returns what to say about it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: matplotlib is not installed"
    points = series(found)
    if not points:
        return "no plot: no attention case was measured"
    figure, axes = pyplot.subplots(figsize=(8, 6))
    widths = sorted({w for _, w in points})
    reads, compute = bounds(found)
    axes.plot(*zip(*reads, strict=True), color="black", linewidth=1.2, label="t_read")
    label = f"{TFLOPS} TFLOP/s at W {widths[-1]}"
    axes.plot(*zip(*compute, strict=True), color="black", linewidth=1, linestyle="--", label=label)
    for (impl, w), line in points.items():
        own = impl == OURS
        axes.plot(
            *zip(*line, strict=True),
            color=COLOURS[widths.index(w) % len(COLOURS)],
            marker="o" if own else "_",
            linestyle="-" if own else "",
            linewidth=1.2,
            markersize=5 if own else 7,
            alpha=1 if own else 0.5,
            label=f"W {w}" if own else None,
        )
    if any(impl != OURS for impl, _ in points):
        axes.plot([], [], "_", color="grey", label="peers, in the colour of their W")
    for at, text in labels(found).items():
        place = {"textcoords": "offset points", "ha": "center", "va": "top"}
        axes.annotate(text, at, (0, -12), fontsize="small", **place)
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us per launch")
    axes.set_title(f"attention, {meta['gpu'] or 'CPU'}, {(meta['commit'] or 'unknown')[:10]}")
    axes.legend(frameon=False, loc="upper left")
    axes.grid(True, which="both", linewidth=0.2)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
    return f"wrote {path}"


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.plot")
    p.add_argument("file", type=argtypes.results, help="of bench/run.py --suite attn or all")
    p.add_argument("png", type=Path)
    args = p.parse_args(argv)
    print(draw(args.file["meta"], args.file["cases"], args.png))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
