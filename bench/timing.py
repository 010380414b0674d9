# SPDX-License-Identifier: Apache-2.0
"""The harness: one graph of many launches over rotated data, timed in interleaved rounds.

On CUDA a contestant is captured once, as a graph of at least 20 launches that walk over data sets
larger than three times the L2 cache in total, so no launch finds its data there. A round replays
the graph of every contestant of a case once, each round starting with another one; drift of clocks
and temperature so falls on all of them. A sample is the time of a replay over its launches.
"""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIN_LAUNCHES = 20
MAX_LAUNCHES = 1024
MIN_ROUNDS = 15
MAX_ROUNDS = 60
REPLAY_US = 1000.0  # a replay should last this long, so that its own launch does not show
L2_FACTOR = 3
SLEEP_CYCLES = 400_000  # about 0.2 ms

Launch = Callable[[int], object]  # launches the work on data set i


@dataclass(frozen=True)
class Stats:
    """Microseconds of one launch over the rounds."""

    us: float
    p10: float
    p90: float
    rounds: int


def percentile(samples: list[float], fraction: float) -> float:
    """Linear interpolation between the closest ranks."""
    ordered = sorted(samples)
    position = fraction * (len(ordered) - 1)
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def stats(samples: list[float]) -> Stats:
    return Stats(
        percentile(samples, 0.5), percentile(samples, 0.1), percentile(samples, 0.9), len(samples)
    )


@dataclass
class Replay:
    """`launches` launches, started by one call."""

    run: Callable[[], None]
    launches: int
    graph: object = None  # keeps a captured graph alive


class Harness:
    """Captures and times on one device.

    Args:
        device: where the work runs.
        repeats: rounds of a case; None: as many as fit into `seconds`, 15 to 60.
        seconds: wanted time of one case's rounds.
    """

    def __init__(self, device: torch.device, repeats: int | None = None, seconds: float = 2.0):
        self.device = device
        self.cuda = device.type == "cuda"
        self.repeats = repeats
        self.seconds = seconds
        self.l2_bytes = 0
        if self.cuda:
            self.l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size

    def num_sets(self, bytes_per_set: int, most: int = MAX_LAUNCHES) -> int:
        """Data sets whose total exceeds three times the L2; two on the CPU."""
        if not self.cuda:
            return 2
        wanted = L2_FACTOR * self.l2_bytes // max(bytes_per_set, 1) + 1
        return max(2, min(wanted, most))

    def num_launches(self, num_sets: int, expected_us: float) -> int:
        """Launches of a graph: whole walks over the sets, 20 or more, about REPLAY_US in all."""
        if not self.cuda:
            return num_sets
        wanted = max(MIN_LAUNCHES, math.ceil(REPLAY_US / max(expected_us, 2.0)))
        return math.ceil(min(wanted, MAX_LAUNCHES) / num_sets) * num_sets

    def capture(self, launch: Launch, num_sets: int, launches: int) -> Replay:
        """A graph of `launches` launches; on the CPU a plain loop."""
        if not self.cuda:
            return self.eager(launch, num_sets, launches)
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # compiles and initialises what is lazy
            for i in range(num_sets):
                launch(i)
        torch.cuda.current_stream().wait_stream(side)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(launches):
                launch(i % num_sets)
        torch.cuda.synchronize()
        return Replay(graph.replay, launches, graph)

    def eager(self, launch: Launch, num_sets: int, launches: int) -> Replay:
        """The same launches one by one from Python: the host's time counts where it is longer."""

        def run():
            for i in range(launches):
                launch(i % num_sets)

        run()
        return Replay(run, launches)

    def time(self, replays: dict[str, Replay]) -> dict[str, Stats]:
        """Interleaved rounds over all contestants; statistics per contestant."""
        names = list(replays)
        estimate = sum(self._timed_alone(r) for r in replays.values())
        rounds = self.repeats or max(
            MIN_ROUNDS, min(MAX_ROUNDS, int(self.seconds / max(estimate, 1e-9)))
        )
        samples: dict[str, list[float]] = {name: [] for name in names}
        if self.cuda:
            self._rounds_cuda(replays, rounds, samples)
        else:
            for r in range(rounds):
                for name in self._order(names, r):
                    start = time.perf_counter()
                    replays[name].run()
                    elapsed = (time.perf_counter() - start) * 1e6
                    samples[name].append(elapsed / replays[name].launches)
        return {name: stats(s) for name, s in samples.items()}

    def _rounds_cuda(self, replays, rounds, samples):
        # The device sleeps while the host queues the next graph, so the time between two events
        # holds no launch latency of the host; there is no synchronisation in between.
        names = list(replays)
        events = []
        replays[names[-1]].run()
        for r in range(rounds):
            for name in self._order(names, r):
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                if replays[name].graph is not None:
                    torch.cuda._sleep(SLEEP_CYCLES)
                start.record()
                replays[name].run()
                end.record()
                events.append((name, start, end))
        torch.cuda.synchronize()
        for name, start, end in events:
            samples[name].append(start.elapsed_time(end) * 1e3 / replays[name].launches)

    def _timed_alone(self, replay: Replay) -> float:
        """Seconds of one replay after one warm-up replay."""
        replay.run()
        self.sync()
        start = time.perf_counter()
        replay.run()
        self.sync()
        return time.perf_counter() - start

    @staticmethod
    def _order(names: list[str], r: int) -> list[str]:
        return names[r % len(names) :] + names[: r % len(names)]

    def sync(self):
        if self.cuda:
            torch.cuda.synchronize()

    def release(self):
        """Gives freed memory back between cases."""
        if self.cuda:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


class Yardsticks:
    """What the device can do at best: our read kernel, an empty kernel, a copy."""

    def __init__(self, harness: Harness):
        self.harness = harness
        self.read_source, self.read = self._reader()
        self.read_gbps, self.copy_gbps = self._rates()
        self.empty_source, self.launch_floor_us = self._floor()

    def read_replay(self, sources: list[torch.Tensor], launches: int) -> Replay:
        """Reads each source once per walk; every source is a contiguous uint8 tensor."""
        return self.harness.capture(lambda i: self.read(sources[i]), len(sources), launches)

    def _reader(self):
        device = self.harness.device
        if not self.harness.cuda:
            return "torch sum on the CPU", lambda src: src.view(torch.int64).sum()
        sink = torch.zeros(1, dtype=torch.int64, device=device)
        try:
            op = torch.ops.specfused.bench_read
            op(torch.zeros(4096, dtype=torch.uint8, device=device), sink)
            return "specfused.bench_read", lambda src: op(src, sink)
        except (AttributeError, NotImplementedError, RuntimeError):
            return "torch sum (no specfused.bench_read here)", lambda s: s.view(torch.float32).sum()

    def _rates(self) -> tuple[float, float]:
        size = 1 << (30 if self.harness.cuda else 25)
        sets = [torch.zeros(size, dtype=torch.uint8, device=self.harness.device) for _ in "ab"]
        launches = self.harness.num_launches(2, size / 4e6)
        replays = {
            "read": self.read_replay(sets, launches),
            "copy": self.harness.capture(lambda i: sets[i].copy_(sets[1 - i]), 2, launches),
        }
        times = self.harness.time(replays)
        return size / times["read"].us * 1e-3, 2 * size / times["copy"].us * 1e-3

    def _floor(self) -> tuple[str, float]:
        anchor = torch.zeros(1, dtype=torch.int32, device=self.harness.device)
        source, launch = "torch add on one element", lambda i: anchor.add_(1)
        if self.harness.cuda:
            try:
                op = torch.ops.specfused.bench_empty
                op(anchor)
                source, launch = "specfused.bench_empty", lambda i: op(anchor)
            except (AttributeError, NotImplementedError, RuntimeError):
                pass
        launches = self.harness.num_launches(1, 2.0) if self.harness.cuda else 100
        replay = self.harness.capture(launch, 1, launches)
        return source, self.harness.time({"empty": replay})["empty"].us
