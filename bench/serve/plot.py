# SPDX-License-Identifier: Apache-2.0
"""Draws what the serving suites measured: `python -m bench.serve.plot FILE DIR`.

serve: rate over concurrency, one figure per shape of speculation, with the concurrency where
drafting stops paying. load: rate over time, with the mode of the policy behind it.
"""

import argparse
import math
import re
import sys
from pathlib import Path

from bench import argtypes
from bench.serve import timeline
from bench.serve.setups import ADAPTIVE, ANCHOR, SHAPES, check

# Okabe and Ito's colours, told apart with any colour vision.
BLUE, RED, GREEN, PURPLE, SKY, YELLOW, BLACK, GREY = (
    "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000", "#777777"
)  # fmt: skip
BY_DETAIL = {"on": BLUE, "off": RED, "auto": GREEN, ADAPTIVE: YELLOW}
MODE_SHADE = {"on": "#CFE3F1", "off": "#F9DFCC"}
Line = list[tuple[int, float]]  # (concurrency, tok/s)


def style(impl: str) -> dict:
    """Colour by mode; dashed, squares: SGLang's own; dotted, hollow: ours over a stock backend."""
    library, mode, detail, backend = check(impl)
    if mode == "plain":
        colour = BLACK if library == "sglang" else GREY
    else:
        colour = BY_DETAIL.get(detail, SKY if library == "sglang" else PURPLE)
    dashes = "--" if library == "sglang" else ":" if backend else "-"
    return {
        "color": colour,
        "linestyle": dashes,
        "marker": "s" if library == "sglang" else "o",
        "markerfacecolor": "white" if backend else colour,
    }


# -- the serve suite: arithmetic


def lines(cases: list[dict]) -> dict[str, Line]:
    """impl -> (concurrency, tok/s at the nominal accept length), by concurrency."""
    found: dict[str, Line] = {}
    for c in cases:
        size = re.search(r"/c(\d+)$", c["id"])
        if size and "tok_s_nominal" in c:
            found.setdefault(c["impl"], []).append((int(size[1]), c["tok_s_nominal"]))
    return {impl: sorted(line) for impl, line in found.items()}


def ratio(line: Line, other: Line) -> Line:
    """line / other where both were measured."""
    below = dict(other)
    return [(c, y / below[c]) for c, y in line if below.get(c)]


def crossings(on: Line, off: Line) -> list[float]:
    """Concurrencies where the rates meet: log(on / off) is taken as linear in log(concurrency)."""
    points = [(math.log(c), math.log(r)) for c, r in ratio(on, off)]
    meet = [x for x, y in points if y == 0]
    for (x0, y0), (x1, y1) in zip(points, points[1:], strict=False):
        if y0 * y1 < 0:
            meet.append(x0 + (x1 - x0) * y0 / (y0 - y1))
    return [math.exp(x) for x in sorted(meet)]


def pairs(found: dict[str, Line]) -> list[tuple[str, str]]:
    """(on, off) of our worker, per shape and backend."""
    names = [name for name in found if re.fullmatch(r"specfused-\w+-on(@\w+)?", name)]
    both = [(name, name.replace("-on", "-off")) for name in names]
    return [(on, off) for on, off in both if off in found]


def verdicts(found: dict[str, Line]) -> list[str]:
    """Per pair: where on and off meet, in words."""
    texts = []
    for on, off in pairs(found):
        points = ratio(found[on], found[off])
        if not points:
            continue
        meet = crossings(found[on], found[off])
        if meet:
            text = f"on and off meet at concurrency {', '.join(f'{c:.1f}' for c in meet)}"
        else:
            better = "on" if points[0][1] > 1 else "off"
            text = f"{better} is faster from concurrency {points[0][0]} to {points[-1][0]}"
        texts.append(f"{on} / {off.removeprefix('specfused-')}: {text}")
    return texts


def apart(positions: list[float], least: float) -> list[float]:
    """Positions moved as little as it takes to be `least` apart, in their order."""
    order = sorted(range(len(positions)), key=lambda i: positions[i])
    groups: list[tuple[list[int], float]] = []  # members, position of the middle
    for i in order:
        members, middle = [i], positions[i]
        while groups:
            before, at = groups[-1]
            if at + least * (len(before) + len(members)) / 2 <= middle:
                break
            groups.pop()
            members = before + members
            middle = (at * len(before) + middle * (len(members) - len(before))) / len(members)
        groups.append((members, middle))
    moved = list(positions)
    for members, middle in groups:
        for k, i in enumerate(members):
            moved[i] = middle + least * (k - (len(members) - 1) / 2)
    return moved


# -- the load suite: arithmetic


def smooth(values: list[float], width: int = 3) -> list[float]:
    """Mean over `width` values around each."""
    half = width // 2
    windows = [values[max(0, i - half) : i + half + 1] for i in range(len(values))]
    return [sum(w) / len(w) for w in windows]


def stretches(on: list[float | None]) -> list[tuple[int, int, str]]:
    """(first bin, bin behind the last, mode of most steps); a bin without steps is as before."""
    found: list[tuple[int, int, str]] = []
    for i, part in enumerate(on):
        mode = found[-1][2] if part is None and found else "on" if (part or 0) >= 0.5 else "off"
        if found and found[-1][2] == mode:
            found[-1] = (found[-1][0], i + 1, mode)
        elif part is not None:
            found.append((i, i + 1, mode))
    return found


# -- drawing


def _label_ends(axes, found: dict[str, Line], points: float = 11):
    """Names at the right end of the lines, which need no legend."""
    figure = axes.figure
    figure.canvas.draw()
    to_pixels, to_data = axes.transData.transform, axes.transData.inverted().transform
    ends = {impl: line[-1] for impl, line in found.items() if line}
    heights = [to_pixels(end)[1] for end in ends.values()]
    moved = apart(heights, points * figure.dpi / 72)
    for (impl, end), at in zip(ends.items(), moved, strict=True):
        axes.annotate(
            impl, xy=end, xytext=(1.03, to_data((0, at))[1]),
            textcoords=("axes fraction", "data"), color=style(impl)["color"],
            fontsize=8.5, va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": "#CCCCCC", "lw": 0.6, "relpos": (0, 0.5)},
        )  # fmt: skip


def _title(meta: dict) -> str:
    where = meta.get("gpu") or "CPU"
    return f"{meta.get('model')}, {where}, commit {(meta.get('commit') or 'unknown')[:10]}"


def _clean(axes):
    axes.grid(True, which="major", linewidth=0.4, color="#DDDDDD")
    axes.spines[["top", "right"]].set_visible(False)


def spaced(sizes: list[int]) -> list[str]:
    """Labels of a logarithmic axis, without those that would overlap the one before."""
    labels, last = [], 0.0
    for size in sizes:
        clear = size >= 1.3 * last
        labels.append(str(size) if clear else "")
        last = size if clear else last
    return labels


def draw_serve(pyplot, meta: dict, found: dict[str, Line], shape: str, folder: Path) -> str:
    """Rates, and their ratios to plain decoding where that was measured."""
    chosen = {i: line for i, line in found.items() if check(i)[1] in ("plain", shape)}
    plain = next((i for i in (ANCHOR, *chosen) if i in chosen and check(i)[1] == "plain"), None)
    rows = 2 if plain else 1
    figure, panels = pyplot.subplots(
        rows, 1, sharex=True, squeeze=False, figsize=(8.5, 4.2 * rows), layout="constrained"
    )
    views = [(panels[0][0], chosen, "tokens per second")]
    if plain:
        ratios = {i: ratio(line, chosen[plain]) for i, line in chosen.items()}
        views.append((panels[1][0], ratios, f"ratio to {plain}"))
    for axes, view, label in views:
        for impl, line in view.items():
            if line:
                axes.plot(*zip(*line, strict=True), linewidth=1.8, markersize=4, **style(impl))
        axes.set_ylabel(label)
        _clean(axes)
    top, bottom = panels[0][0], panels[-1][0]
    top.set(xscale="log", yscale="log")
    shown = "-".join(map(str, SHAPES[shape][:3]))
    top.set_title(f"{shape} {shown}: {_title(meta)}", loc="left", fontsize=10)
    _plain_ticks(top.yaxis)
    sizes = sorted({c for line in chosen.values() for c, _ in line})
    bottom.set_xticks(sizes, spaced(sizes))
    bottom.minorticks_off()
    bottom.set_xlabel("concurrent requests")
    figure.align_ylabels()
    for on, off in pairs(chosen):
        for c in crossings(chosen[on], chosen[off]):
            for axes, _, _ in views:
                axes.axvline(c, color=GREY, linewidth=1, linestyle=style(on)["linestyle"])
            right = c > math.sqrt(sizes[0] * sizes[-1])  # of the middle: no room beyond
            bottom.annotate(
                f" on = off at {c:.0f} {off.partition('@')[2]} ", xy=(c, 0.02), fontsize=8.5,
                xycoords=("data", "axes fraction"), color=GREY, ha="right" if right else "left",
            )  # fmt: skip
    for axes, view, _ in views:
        _label_ends(axes, view)
    return _save(pyplot, figure, folder / f"serve-{shape}.png")


def _save(pyplot, figure, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return f"wrote {path}"


def draw_load(pyplot, meta: dict, series: dict[str, dict], folder: Path) -> str:
    """The clients above, then a panel per engine that switched, the other engines thin in it."""
    switching = [
        impl for impl, s in series.items() if len({mode for *_, mode in stretches(s["on"])}) > 1
    ]
    panels = switching or [next(iter(series))]
    figure, (top, *others) = pyplot.subplots(
        1 + len(panels), 1, sharex=True, figsize=(10, 1.6 + 3.6 * len(panels)),
        height_ratios=[1, *[3.4] * len(panels)], layout="constrained",
    )  # fmt: skip
    first = series[panels[0]]
    seconds = first["bin_s"]
    at = [seconds * i for i in range(len(first["clients"]))]
    top.step(at, first["clients"], where="post", color=BLACK, linewidth=1.4)
    top.fill_between(at, first["clients"], step="post", color="#EEEEEE")
    top.set_ylabel("clients at work")
    top.yaxis.get_major_locator().set_params(integer=True)
    top.set_title(f"A step in load: {_title(meta)}", loc="left", fontsize=10)
    _clean(top)
    for axes, shown in zip(others, panels, strict=True):
        for impl in sorted(series, key=lambda i: i == shown):
            rate = smooth([n / seconds for n in series[impl]["tokens"]])
            line = [(seconds * (i + 0.5), y) for i, y in enumerate(rate) if y > 0]
            own = {**style(impl), "marker": None, "linewidth": 2.4 if impl == shown else 1.2}
            axes.plot(*zip(*line, strict=True), **own, label=impl)
        for bound in first["bounds"][1:-1]:
            axes.axvline(bound, color=GREY, linewidth=0.8)
        axes.set_ylabel("tokens per second")
        axes.set_yscale("log")
        _clean(axes)
        _plain_ticks(axes.yaxis)
        _mode_shades(axes, series[shown], seconds)
        order = {impl: i for i, impl in enumerate(series)}
        handles, names = axes.get_legend_handles_labels()
        both = sorted(zip(handles, names, strict=True), key=lambda h: order[h[1]])
        axes.legend(*zip(*both, strict=True), loc="upper left", bbox_to_anchor=(1, 1),
                    frameon=False, fontsize=9)  # fmt: skip
    top.set_xlim(0, max(len(s["tokens"]) for s in series.values()) * seconds)
    others[-1].set_xlabel("seconds")
    return _save(pyplot, figure, folder / "load.png")


def _plain_ticks(axis):
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator  # if it is installed

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))


def _mode_shades(axes, series: dict, seconds: float):
    """The background, with each mode's name over its longest stretch."""
    found = stretches(series["on"])
    for begin, end, mode in found:
        axes.axvspan(begin * seconds, end * seconds, color=MODE_SHADE[mode], linewidth=0, zorder=0)
    longest = {mode: (begin, end) for begin, end, mode in sorted(found, key=lambda f: f[1] - f[0])}
    for mode, (begin, end) in longest.items():
        axes.annotate(
            f"drafting {mode}", xy=((begin + end) / 2 * seconds, 1.0), ha="center", va="bottom",
            xycoords=("data", "axes fraction"), fontsize=8.5, color=BY_DETAIL[mode],
        )  # fmt: skip


def draw(results: dict, folder: Path) -> list[str]:
    """Draws all that a results file has; returns what to say about it."""
    found = lines(results["cases"])
    said = verdicts(found)
    series = {c["impl"]: c for c in results["cases"] if c["id"].endswith("/series")}
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return [*said, "no plot: matplotlib is not installed"]
    shapes = [s for s in SHAPES if any(check(impl)[1] == s for impl in found)]
    said += [draw_serve(pyplot, results["meta"], found, s, folder) for s in shapes]
    if series:
        said.append(draw_load(pyplot, results["meta"], series, folder))
    if any(c.get("timeline") for c in results["cases"]):
        said.append(timeline.draw(results["cases"], folder))
    return said or ["no plot: nothing to draw was measured"]


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.serve.plot")
    p.add_argument("file", type=argtypes.results, help="of a suite of whole engines")
    p.add_argument("dir", type=Path)
    args = p.parse_args(argv)
    print("\n".join(draw(args.file, args.dir)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
