# SPDX-License-Identifier: Apache-2.0
"""The roofline: time of a launch against the bytes it must move."""

import re
from pathlib import Path

OURS = "specfused"
SHAPE = re.compile(r"attn/.*/w(?P<w>\d+)/hq32/hkv8/d128/bf16/page1$")


def series(cases: list[dict]) -> dict[tuple[str, int], list[tuple[int, float]]]:
    """(impl, W) -> points (bytes, us) by bytes, of the base shapes or, without any, of all."""
    base = [c for c in cases if SHAPE.match(c["id"])]
    points: dict[tuple[str, int], list[tuple[int, float]]] = {}
    for c in base or [c for c in cases if c["id"].startswith("attn/")]:
        w = int(re.search(r"/w(\d+)/", c["id"]).group(1))
        points.setdefault((c["impl"], w), []).append((c["bytes"], c["us"]))
    return {key: sorted(p) for key, p in sorted(points.items())}


def draw(meta: dict, cases: list[dict], folder: Path) -> str:
    """Writes attn.png into `folder`; returns what to say about it."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: matplotlib is not installed"
    points = series(cases)
    if not points:
        return "no plot: no attention case was measured"
    figure, axes = pyplot.subplots(figsize=(9, 6))
    markers = "osv^Dx*"
    impls = sorted({impl for impl, _ in points}, key=lambda i: (i != OURS, i))
    widths = sorted({w for _, w in points})
    for (impl, w), line in points.items():
        axes.plot(
            *zip(*line, strict=True),
            color=f"C{widths.index(w)}",
            marker=markers[impls.index(impl) % len(markers)],
            linestyle="-" if impl == OURS else ":",
            linewidth=2 if impl == OURS else 0.8,
            label=f"{impl} W={w}",
        )
    reads = sorted({(c["bytes"], c["t_read_us"]) for c in cases if c["t_read_us"]})
    low, high = (f(b for line in points.values() for b, _ in line) for f in (min, max))
    reads = [r for r in reads if low <= r[0] <= high]
    if reads:
        axes.plot(*zip(*reads, strict=True), color="black", linewidth=1, label="t_read")
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="us per launch")
    axes.set_title(f"attention, {meta['gpu'] or 'CPU'}, {(meta['commit'] or 'unknown')[:10]}")
    axes.legend(fontsize="x-small", ncols=2)
    axes.grid(True, which="both", linewidth=0.2)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "attn.png"
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return f"wrote {path}"
