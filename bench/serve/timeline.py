# SPDX-License-Identifier: Apache-2.0
"""Draws the timelines of a results file: `python -m bench.serve.timeline FILE.json DIR`."""

import argparse
import sys
from pathlib import Path

from bench import argtypes

HOST = ("scheduler", "host")  # rows above the streams


def rows(timeline: list[list]) -> list:
    """Names of the rows from top to bottom: the host's, then the streams that are busiest."""
    busy: dict = {}
    for _, row, _, duration in timeline:
        busy[row] = busy.get(row, 0) + duration
    streams = sorted((r for r in busy if r not in HOST), key=lambda r: -busy[r])
    return [*(r for r in HOST if r in busy), *streams]


def draw(cases: list[dict], folder: Path) -> str:
    """Writes steps-c8.png and so on, one panel an engine; returns what to say about it."""
    cases = [c for c in cases if c.get("timeline")]
    if not cases:
        return "no plot: no step was profiled"
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return "no plot: matplotlib is not installed"
    folder.mkdir(parents=True, exist_ok=True)
    paths = []
    for id_ in dict.fromkeys(c["id"] for c in cases):
        of_id = [c for c in cases if c["id"] == id_]
        longest = max(c["step_us"] for c in of_id)
        figure, panels = pyplot.subplots(
            len(of_id), figsize=(14, 2.4 * len(of_id)), squeeze=False, sharex=True
        )
        for case, axes in zip(of_id, panels[:, 0], strict=True):
            names = rows(case["timeline"])
            for i, name in enumerate(names):
                for j, (text, row, begin, duration) in enumerate(case["timeline"]):
                    if row != name:
                        continue
                    axes.broken_barh([(begin, duration)], (i - 0.4, 0.8), color=f"C{j % 10}")
                    if duration > longest / 25:
                        axes.text(begin + duration / 2, i, text[: int(duration / longest * 160)],
                                  ha="center", va="center", fontsize=6, clip_on=True)  # fmt: skip
            axes.axvline(case["step_us"], color="black", linewidth=0.8)
            axes.set_yticks(
                range(len(names)), [n if n in HOST else f"stream {n}" for n in names], fontsize=6
            )
            axes.invert_yaxis()
            axes.set_title(f"{id_} {case['impl']}", fontsize=8, loc="left")
        panels[-1, 0].set(xlim=(0, longest), xlabel="us from the start of the target's forward")
        path = folder / f"{id_.replace('/', '-')}.png"
        figure.savefig(path, dpi=130, bbox_inches="tight")
        pyplot.close(figure)
        paths.append(str(path))
    return f"wrote {', '.join(paths)}"


def main(argv: list[str]) -> int:
    p = argparse.ArgumentParser(prog="python -m bench.serve.timeline")
    p.add_argument("file", type=argtypes.results, help="of --suite steps, or with --profile")
    p.add_argument("dir", type=Path)
    args = p.parse_args(argv)
    print(draw(args.file["cases"], args.dir))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
