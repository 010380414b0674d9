# SPDX-License-Identifier: Apache-2.0
"""What a decode step consists of, read from a chrome trace of torch's profiler.

A step begins where SGLang enters the target's forward, a span `step[TARGET_VERIFY bs=8]` (in 0.5.23
`step[VERIFY ...]`, without speculation `step[DECODE ...]`), and ends where it enters the next one.
On the GPU it lasts from the start of the target's graph to the start of the next step's. Work on
the GPU belongs to the call that has its correlation id; all nodes of a graph have that of the
graph's launch. Times are microseconds. Needs neither torch nor a GPU.
"""

import bisect
import functools
import gzip
import json
import re
import statistics
from pathlib import Path
from typing import NamedTuple

from bench.serve import where

SPAN = re.compile(r"step\[(TARGET_VERIFY|VERIFY|DECODE) bs=(\d+)")
KINDS = {  # of calls, by the names of the runtime and of the driver
    "launches": re.compile(r"cu(da)?Launch(Cooperative)?Kernel"),
    "graphs": re.compile(r"cu(da)?GraphLaunch"),
    "copies": re.compile(r"cu(da)?Memcpy"),
    "fills": re.compile(r"cu(da)?Memset"),
    "syncs": re.compile(r"cu(da)?(Stream|Event|Device|Ctx)Synchronize"),
}
WORK = ("kernel", "gpu_memcpy", "gpu_memset")
MOST_ENTRIES = 400  # of a timeline


class Span(NamedTuple):
    begin: float
    end: float
    name: str


class Call(NamedTuple):
    """A call of CUDA's runtime or driver that puts work on the GPU or waits for it."""

    begin: float
    end: float
    name: str
    kind: str
    id: int


class Work(NamedTuple):
    """A kernel, copy or fill on the GPU."""

    begin: float
    end: float
    name: str
    category: str
    stream: int


class Step(NamedTuple):
    """One step: when, what was called in it, and how the target ran."""

    begin: float  # on the GPU, or on the host where nothing ran on a GPU
    end: float
    target_end: float  # of the target's work on the GPU
    ahead: float  # how long the target's graph was in the queue of the GPU
    calls: list[Call]
    after_target: list[Call]  # from the target's graph to the next graph of any kind
    ops: int


@functools.cache
def kind(name: str) -> str | None:
    return next((k for k, pattern in KINDS.items() if pattern.match(name)), None)


class Trace:
    """The events of a trace that matter here, each list in order of time."""

    def __init__(self, events: list[dict]):
        self.spans: list[Span] = []
        self.calls: list[Call] = []
        self.work: dict[int, list[Work]] = {}
        self.ops: list[float] = []
        calls: dict[int, Call] = {}
        for e in events:
            category = e.get("cat")
            if e.get("ph") != "X" or category is None:
                continue
            begin, end, name = e["ts"], e["ts"] + e["dur"], e["name"]
            if category == "cpu_op":
                self.ops.append(begin)
            elif category in WORK:
                args = e["args"]
                work = Work(begin, end, name, category, args["stream"])
                self.work.setdefault(args["correlation"], []).append(work)
            elif category in ("cuda_runtime", "cuda_driver"):
                if (k := kind(name)) is not None:
                    id_ = e["args"]["correlation"]
                    # The driver's call inside of the runtime's has the same id: one call.
                    if id_ not in calls or begin < calls[id_].begin:
                        calls[id_] = Call(begin, end, name, k, id_)
            elif category == "user_annotation":
                self.spans.append(Span(begin, end, name))
        self.calls = sorted(calls.values())
        self.spans.sort()
        self.ops.sort()
        for nodes in self.work.values():
            nodes.sort()
        self.busy = union([w for nodes in self.work.values() for w in nodes])

    def within(self, begin: float, end: float) -> list[Call]:
        low, high = (bisect.bisect_left(self.calls, (t,)) for t in (begin, end))
        return self.calls[low:high]

    def idle(self, begin: float, end: float) -> list[float]:
        """Lengths of the times between `begin` and `end` in which nothing runs on the GPU."""
        gaps, at = [], begin
        first = bisect.bisect_right(self.busy, (begin,)) - 1
        for start, stop in self.busy[max(first, 0) :]:
            if start >= end:
                break
            if start > at:
                gaps.append(start - at)
            at = max(at, stop)
        return [*gaps, end - at] if at < end else gaps

    def targets(self) -> list[Span]:
        """The target's forwards in decode steps of the whole batch."""
        found = [(m[1], int(m[2]), s) for s in self.spans if (m := SPAN.match(s.name))]
        if not found:
            return []
        # Without its graphs the draft model's forwards are DECODE too.
        names = {name for name, _, _ in found}
        wanted = next(n for n in ("TARGET_VERIFY", "VERIFY", "DECODE") if n in names)
        whole = max(bs for name, bs, _ in found if name == wanted)
        return [s for name, bs, s in found if (name, bs) == (wanted, whole)]

    def target_graph(self, span: Span) -> tuple[Call | None, list[Work]]:
        """The longest graph launched in a forward, else all that it launched outside of graphs."""
        launched = self.within(*span[:2])
        graphs = [c for c in launched if c.kind == "graphs"]
        if not graphs:
            return None, sorted(w for c in launched for w in self.work.get(c.id, []))
        return max(((c, self.work.get(c.id, [])) for c in graphs), key=lambda cw: length(cw[1]))


def union(work: list[Work]) -> list[tuple[float, float]]:
    """Times in which anything runs, in order and apart from each other."""
    merged: list[tuple[float, float]] = []
    for w in sorted(work):
        if merged and w.begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], w.end))
        else:
            merged.append((w.begin, w.end))
    return merged


def last(work: list[Work]) -> float:
    return max(w.end for w in work)


def length(work: list[Work]) -> float:
    return last(work) - work[0].begin if work else 0.0


def read(path: Path) -> Trace:
    """A trace file, .json or .json.gz."""
    data = path.read_bytes()
    if path.suffix == ".gz":
        data = gzip.decompress(data)
    return Trace(json.loads(data)["traceEvents"])


def steps(trace: Trace, skip: int, most: int) -> list[Step]:
    """Decode steps of the whole batch: `most` at most, without the first `skip` and the last."""
    spans = trace.targets()[skip : skip + most + 1]
    targets = [trace.target_graph(s) for s in spans]
    launches = [c for c in trace.calls if c.kind == "graphs"]
    found = []
    for i, (span, following) in enumerate(zip(spans, spans[1:], strict=False)):
        calls = trace.within(span.begin, following.begin)
        low, high = (bisect.bisect_left(trace.ops, s.begin) for s in (span, following))
        (graph, work), (_, work_after) = targets[i : i + 2]
        if not trace.work:
            found.append(Step(span.begin, following.begin, span.end, 0, calls, [], high - low))
        elif work and work_after:  # else the profiler lost it
            begin, end, ahead, after = work[0].begin, work_after[0].begin, 0.0, []
            if graph is not None:
                ahead = begin - graph.end
                rest = launches[bisect.bisect_right(launches, graph) :]
                until = rest[0].begin if rest else following.begin
                after = [c for c in trace.within(graph.end, until) if c.kind != "syncs"]
            found.append(Step(begin, end, last(work), ahead, calls, after, high - low))
    return found


def figures(trace: Trace, step: Step) -> dict[str, float]:
    """What one step consists of, see bench/README.md. Without a GPU there is little to tell."""
    host = {"step_us": step.end - step.begin, "host_ops": step.ops}
    if not trace.work:
        return host
    calls = {k: [c for c in step.calls if c.kind == k] for k in KINDS}
    work = {c.id: trace.work.get(c.id, []) for c in step.calls}
    blocking = [
        c
        for c in calls["copies"]
        if "Async" not in c.name or any("-> Pageable" in w.name for w in work[c.id])
    ]
    in_graphs = sum(w.category == "kernel" for c in calls["graphs"] for w in work[c.id])
    kernels = sum(w.category == "kernel" for nodes in work.values() for w in nodes)
    idle = trace.idle(step.begin, step.end)
    return {
        **host,
        **{k: len(found) for k, found in calls.items()},
        "blocking_copies": len(blocking),
        "after_target": len(step.after_target),
        "kernels": kernels - in_graphs,
        "graph_kernels": in_graphs,
        "host_launch_us": sum(c.end - c.begin for c in step.calls if c.kind != "syncs"),
        "host_sync_us": sum(c.end - c.begin for c in calls["syncs"]),
        "ahead_us": step.ahead,
        "target_us": step.target_end - step.begin,
        "busy_us": step.end - step.begin - sum(idle),
        "idle_us": sum(idle),
        "idle_after_target_us": sum(trace.idle(step.target_end, step.end)),
        "largest_gap_us": max(idle, default=0.0),
    }


def short(name: str) -> str:
    """A kernel's name without its namespaces and types, 40 characters at most."""
    name = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    return re.split(r"[<(]", name, maxsplit=1)[0].split("::")[-1][:40] or name[:40]


def timeline(trace: Trace, step: Step) -> list[list]:
    """[name, row, start, duration] of all that ran while the step was on the GPU.

    Rows are streams, `host` for CUDA's calls and `scheduler` for SGLang's spans. A graph is one
    entry. Of more than MOST_ENTRIES the longest are kept. Starts count from the step's.
    """
    found = []

    def add(begin: float, end: float, name: str, row):
        if begin < step.end and end > step.begin:
            entry = [name, row, round(begin - step.begin, 2), round(end - begin, 2)]
            found.append(entry)

    for c in trace.calls:
        add(c.begin, c.end, c.name, "host")
        work = trace.work.get(c.id, [])
        if c.kind == "graphs" and work:
            add(work[0].begin, last(work), f"graph of {len(work)}", work[0].stream)
            continue
        for w in work:
            name = short(w.name) if w.category == "kernel" else w.name[:40]
            add(w.begin, w.end, name, w.stream)
    for s in trace.spans:
        if s.name.startswith("scheduler."):
            add(*s[:2], s.name.removeprefix("scheduler."), "scheduler")
    found.sort(key=lambda entry: -entry[3])
    return sorted(found[:MOST_ENTRIES], key=lambda entry: entry[2])


def summary(trace: Trace, skip: int, most: int) -> dict:
    """Medians over the steps, where their time goes, and the timeline of one of median length.

    Raises:
        ValueError: there are fewer than 3 steps.
    """
    chosen = steps(trace, skip, most)
    if len(chosen) < 3:
        raise ValueError(
            f"trace must have 3 steady decode steps, got {len(chosen)} of "
            f"{len(trace.targets())} forwards, {len(trace.calls)} calls and "
            f"{len(trace.work)} of them with work on the GPU"
        )
    each = [figures(trace, s) for s in chosen]
    middle = {k: round(statistics.median(f[k] for f in each), 1) for k in each[0]}
    lengths = [s.end - s.begin for s in chosen]
    typical = min(chosen, key=lambda s: abs(s.end - s.begin - statistics.median(lengths)))
    names = [short(w.name) for c in typical.after_target for w in trace.work.get(c.id, [])]
    return {
        "steps": len(chosen),
        **middle,
        "after_target_names": names,
        **({"where_us": where.medians(trace, chosen)} if trace.work else {}),
        "timeline": timeline(trace, typical),
    }


def describe(case: dict) -> str:
    """A case in one line."""
    ms, rest = case["step_us"] / 1e3, case["ms_per_step"]
    text = f"{ms:8.2f} ms/step profiled" + (f" ({rest:.2f} without)" if rest else "")
    if "graphs" not in case:
        return f"{text}, {case['host_ops']:g} host ops"
    calls = f"{case['launches']:g}+{case['copies']:g}+{case['fills']:g}"
    return (
        f"{text}  calls {calls} and {case['graphs']:g} graphs, {case['after_target']:g} after the "
        f"target  kernels {case['kernels']:g}+{case['graph_kernels']:g}  syncs {case['syncs']:g}  "
        f"target {case['target_us']:.0f} us, {case['ahead_us']:.0f} queued  idle "
        f"{case['idle_us']:.0f} us, {case['idle_after_target_us']:.0f} after the target, "
        f"{case['largest_gap_us']:.0f} at once"
    )
