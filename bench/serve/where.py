# SPDX-License-Identifier: Apache-2.0
"""Where the time of a decode step goes: `python -m bench.serve.where FILE.json` prints tables.

Every microsecond of a step on the GPU is of one kind: that of the work that runs, or a gap between
two. Where work overlaps, the time is that of what began first.
"""

import json
import re
import statistics
import sys
from pathlib import Path

KINDS = {  # by the kernel's name, the first that fits
    "commit": re.compile(r"row_stats|commit_kernel|compact"),
    "gemm": re.compile(r"nvjet|gemm|cutlass|cublas|splitKreduce", re.I),
    "attention": re.compile(r"attn|attention|fmha|flash|\bplan|words_from_mask|kv_indices", re.I),
    "top-k": re.compile(
        r"top_?k|arg_?max|softmax|reduce_kernel|draft_(grow|tree)|build_tree|Digit|WithinK|"
        r"KthCounts|ScanByKey|bitonicSort",
        re.I,
    ),
}
OTHER, OUTSIDE = "other in graphs", "other outside"
IN_GRAPHS, BETWEEN = "gaps in graphs", "gaps between"
ROWS = [*KINDS, OTHER, OUTSIDE, IN_GRAPHS, BETWEEN]


def kind(work, in_graph: bool) -> str:
    """What a kernel, copy or fill is for."""
    if work.category == "kernel":
        found = next((k for k, pattern in KINDS.items() if pattern.search(work.name)), None)
        if found is not None:
            return found
    return OTHER if in_graph else OUTSIDE


def shares(trace, step) -> dict[str, float]:
    """Microseconds of one step by ROWS; their sum is its length."""
    found = dict.fromkeys(ROWS, 0.0)
    work = [
        (w, call.id if call.kind == "graphs" else None)
        for call in trace.calls
        for w in trace.work.get(call.id, [])
        if w.begin < step.end and w.end > step.begin
    ]
    at, before = step.begin, None
    for w, graph in sorted(work, key=lambda entry: entry[0]):
        if w.begin > at:
            inside = graph is not None and graph == before
            found[IN_GRAPHS if inside else BETWEEN] += w.begin - at
            at = w.begin
        end = min(w.end, step.end)
        if end > at:
            found[kind(w, graph is not None)] += end - at
            at, before = end, graph
    found[BETWEEN] += max(step.end - at, 0.0)
    return found


def medians(trace, steps) -> dict[str, float]:
    """`shares` in the middle of several steps."""
    each = [shares(trace, step) for step in steps]
    return {row: round(statistics.median(one[row] for one in each), 1) for row in ROWS}


def table(cases: list[dict]) -> str:
    """Markdown: a row a kind, a column an engine and concurrency."""
    cases = [c for c in cases if "where_us" in c]
    if not cases:
        return "no table: no step was profiled on a GPU"
    titles = [f"{c['impl']} {c['id'].split('/')[-1]}" for c in cases]
    lines = [["us of a step", *titles], ["---", *["---:"] * len(cases)]]
    lines += [[row, *(f"{c['where_us'][row]:.0f}" for c in cases)] for row in ROWS]
    lines.append(["step", *(f"{c['step_us']:.0f}" for c in cases)])
    lines.append(["calls outside of graphs", *(f"{_calls(c):.0f}" for c in cases)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _calls(case: dict) -> float:
    return case["launches"] + case["copies"] + case["fills"]


if __name__ == "__main__":
    print(table(json.loads(Path(sys.argv[1]).read_text())["cases"]))
