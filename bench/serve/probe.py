# SPDX-License-Identifier: Apache-2.0
"""Looks into the scheduler process of a child engine, where nobody else can patch anything.

SGLang loads the plugins of the group `sglang.srt.plugins` in every process that it starts, so an
entry point on the child's PYTHONPATH is enough. It waits until the scheduler has built its worker,
wraps a few methods of that one object, and adds a method that `Engine.collective_rpc` calls between
two generations: write down what happened since the last call, then go on under another schedule.

A step costs two events and three clock readings more. Nothing waits for the GPU before that call.
"""

import json
import os
import time
from pathlib import Path
from typing import NamedTuple

import torch

FILE = "SPECFUSED_BENCH_PROBE"  # where the answers are written
METHOD = "specfused_probe"
NAME = "specfused_probe"
MEMORY_INTERVAL = 100  # steps between two looks at the allocator, and before the first


class Step(NamedTuple):
    """One decode step. Milliseconds are the GPU's where there is one."""

    on: bool
    bs: int
    choose_us: float  # host: the policy's decision
    enter_us: float  # host: the change of mode and what belongs to it
    ms: float | None  # end of the step before to the end of this one; None after a prefill
    fewest: int = 0  # pairs that a request had to catch up
    most: int = 0
    pairs: int = 0  # of all requests
    catch_up_ms: float = 0.0


# -- the process that starts the engine


def plant(folder: Path) -> str:
    """Writes the entry point into `folder`, which belongs on PYTHONPATH."""
    info = folder / f"{NAME}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {NAME}\nVersion: 0\n")
    text = f"[sglang.srt.plugins]\n{NAME} = {__name__}:register\n"
    (info / "entry_points.txt").write_text(text)
    return str(folder)


def environment(answers: Path) -> dict[str, str]:
    """Variables of the engine's processes; SGLANG_PLUGINS may let only some plugins in."""
    allowed = os.environ.get("SGLANG_PLUGINS")
    more = {"SGLANG_PLUGINS": f"{allowed},{NAME}"} if allowed else {}
    return {FILE: str(answers), **more}


def call(engine, **change) -> dict:
    """What happened since the last call; `change` are arguments of `Probe.answer`."""
    engine.collective_rpc(METHOD, **change)
    return json.loads(Path(os.environ[FILE]).read_text())


def switches(steps: list[Step]) -> int:
    """Steps in another mode than the one before."""
    return sum(a.on != b.on for a, b in zip(steps, steps[1:], strict=False))


def of_ranks(ranks: list[dict]) -> dict:
    """One account of all ranks: memory summed at each look, graphs the same on all or not."""
    looks = zip(*(rank["memory"] for rank in ranks), strict=True)
    graphs = ranks[0]["graphs"]
    return {
        "memory": [[sum(values) for values in zip(*look, strict=True)] for look in looks],
        "graphs": graphs,
        "same_graphs": all(r["same_graphs"] and r["graphs"] == graphs for r in ranks),
    }


# -- the engine's processes


def register() -> None:
    """The entry point."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    target = "sglang.srt.managers.scheduler.Scheduler.__init__"
    HookRegistry.register(target, _attach, HookType.AFTER)


def _attach(_result, scheduler, *_args, **_kwargs) -> None:
    if getattr(scheduler.draft_worker, "switches", False):
        probe = Probe(scheduler.draft_worker, Path(os.environ[FILE]))
        setattr(scheduler, METHOD, probe.answer)


class Probe:
    """Records the steps of one worker.

    Args:
        worker: `specfused.sglang.worker.SpecFusedWorker`, ready to serve.
        path: of the answers.
    """

    def __init__(self, worker, path: Path):
        self.worker, self.path = worker, path
        self.ranks = worker.switch.ranks
        self.cuda = torch.cuda if torch.device(worker.device).type == "cuda" else None
        self.ring_size = worker.ring.size
        self.graphs = self._graphs()
        self._previous = None  # the end of the last step, unless a prefill came after it
        self._start_anew()
        for owner, name, around in (
            (worker.switch, "choose", self._choose),
            (worker.switch, "launched", self._launched),
            (worker.switch, "prefill", self._prefill),
            (worker.modes, "enter", self._enter),
            (worker, "_forget_reads_done", self._enter),
            (worker.catch_up, "run", self._catch_up),
        ):
            setattr(owner, name, _wrapped(getattr(owner, name), around))

    def answer(self, schedule: str = "", ring: int = 0) -> None:
        """Writes the answer, on rank 0; no request may be running.

        Args:
            schedule: what the steps from now on do, as in SPECFUSED_MODE; empty: as before.
            ring: SPECFUSED_RING from now on, at most that of the start; 0: as before.
        """
        from specfused.sglang.report import Report
        from specfused.sglang.switch import policy_of

        if ring > self.ring_size:
            raise ValueError(f"probe: ring must be at most {self.ring_size}, got {ring}")
        steps = [self._resolved(*step) for step in self.steps]
        content = {"steps": steps, **of_ranks(self._gathered())}
        if self.ranks is None or self.ranks.rank_in_group == 0:
            partial = self.path.with_suffix(".partial")
            partial.write_text(json.dumps(content))
            partial.replace(self.path)
        if schedule:
            switch = self.worker.switch
            switch.policy = policy_of(schedule)
            self.worker.report = Report(switch.policy, self.worker.report.interval, metrics=False)
        # Nothing is pending between two generations, so the ring's cells may be numbered anew.
        self.worker.ring.size = ring or self.worker.ring.size
        self._start_anew()

    def _start_anew(self) -> None:
        self.steps: list[tuple] = []
        self.memory: list[list[int]] = []  # calls of cudaMalloc so far, bytes reserved
        self._step = None  # being launched

    # -- around the worker's methods

    def _choose(self, choose, reqs):
        begin = time.perf_counter()
        mode = choose(reqs)
        self._step = {"on": mode.value == "on", "bs": len(reqs), "enter_us": 0.0}
        self._step["choose_us"] = 1e6 * (time.perf_counter() - begin)
        return mode

    def _enter(self, enter, *args):
        begin = time.perf_counter()
        enter(*args)
        if self._step is not None:  # else a prefill's
            self._step["enter_us"] += 1e6 * (time.perf_counter() - begin)

    def _catch_up(self, run, batch, resume):
        from specfused.sglang import ring

        counts = [ring.pending(req) for req in batch.reqs]
        if not any(counts):
            return run(batch, resume)
        begin = self._mark()
        run(batch, resume)
        self._step["catch_up"] = (begin, self._mark())
        self._step |= {"fewest": min(counts), "most": max(counts), "pairs": sum(counts)}

    def _launched(self, launched):
        end = self._mark()
        launched()
        self.steps.append((self._step, self._previous, end))
        self._step, self._previous = None, end
        if self.cuda and len(self.steps) % MEMORY_INTERVAL == 0:
            stats = self.cuda.memory_stats()
            self.memory.append([stats["num_device_alloc"], stats["reserved_bytes.all.current"]])

    def _prefill(self, prefill):
        self._previous = None
        prefill()

    # -- time and graphs

    def _mark(self):
        if not self.cuda:
            return time.perf_counter()
        event = self.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ms(self, begin, end) -> float:
        if not self.cuda:
            return 1e3 * (end - begin)
        end.synchronize()
        return begin.elapsed_time(end)

    def _resolved(self, step: dict, previous, end) -> Step:
        catch_up = step.pop("catch_up", None)
        if catch_up:
            step["catch_up_ms"] = self._ms(*catch_up)
        return Step(ms=None if previous is None else self._ms(previous, end), **step)

    def _gathered(self) -> list[dict]:
        """Memory and graphs of every rank; a collective."""
        now = self._graphs()
        mine = {
            "memory": self.memory,
            "graphs": {name: len(graphs) for name, graphs in now.items()},
            "same_graphs": now == self.graphs,  # graphs compare by identity
        }
        if self.ranks is None:
            return [mine]
        found = [None for _ in self.ranks.ranks]
        torch.distributed.all_gather_object(found, mine, group=self.ranks.cpu_group)
        return found

    def _graphs(self) -> dict[str, list]:
        """The captured graphs by who replays them, empty where there are none."""
        modes, draft = self.worker.modes, self.worker.draft_worker
        runners = {
            "target_on": modes.on.graph_runner,
            "target_off": modes.off.graph_runner,
            "draft": draft.cuda_graph_runner,
            "draft_extend": draft.cuda_graph_runner_for_draft_extend,
        }
        return {
            name: list(getattr(getattr(runner, "backend", None), "_graphs", {}).values())
            for name, runner in runners.items()
        }


def _wrapped(method, around):
    return lambda *args, **kwargs: around(method, *args, **kwargs)
