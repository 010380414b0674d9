# SPDX-License-Identifier: Apache-2.0
"""What switching costs, seen from inside the engine: memory, graphs, host time, and the catch-up.

One engine serves all schedules of a batch size, one generation each (see probe.py): `10` flips
every step, n zeros and a one leave n pairs to catch up. What must hold: memory and graphs stay as
they are over all flips, and changing the mode costs a GPU's host SWITCH_US at most.
"""

import math
import statistics
from typing import NamedTuple

from bench.serve.probe import Step, switches
from bench.serve.suite import Suite
from specfused.sglang.ring import configured_size

SWITCH_US = 20.0
WARM_STEPS = 200  # of flips, to the last request's end, before memory is looked at
ON_STEPS = 40  # that a step's time is the median of
SMALL_RINGS = (4, 16)
MOST_GENERATIONS = 20  # of one schedule
ANSWER_SECONDS = 300


class Run(NamedTuple):
    """One generation, as `Probe.answer` has written it."""

    steps: list[Step]
    memory: list[list[int]]
    graphs: dict[str, int]
    same_graphs: bool

    @classmethod
    def of(cls, reply: dict) -> "Run":
        return cls(**{**reply, "steps": [Step(*step) for step in reply["steps"]]})


def cycles(pending: int) -> int:
    """Catch-ups of that many pairs to measure."""
    return max(6, 32 // pending)


def median(values) -> float | None:
    """Of milliseconds, to a tenth of a microsecond; None of nothing."""
    values = list(values)
    return round(statistics.median(values), 4) if values else None


def over(value: float | None, base: float | None) -> float | None:
    return round(value / base, 3) if value is not None and base else None


# -- from steps to figures


def memory(runs: list[Run]) -> dict | None:
    """First, last and most of both figures; changes within a generation; None: nothing was seen."""
    seen = [sample for run in runs for sample in run.memory]
    if not seen:
        return None
    named = zip(("device_allocs", "reserved_bytes"), zip(*seen, strict=True), strict=True)
    pairs = [p for run in runs for p in zip(run.memory, run.memory[1:], strict=False)]
    return {
        **{name: [values[0], values[-1], max(values)] for name, values in named},
        "compared": len(pairs),
        "changes": sum(a != b for a, b in pairs),
    }


def host(runs: list[Run]) -> dict:
    """Median and p99 in us of entering and of choosing a mode, where it changes and where not."""
    pairs = [p for run in runs for p in zip(run.steps, run.steps[1:], strict=False)]
    found = {}
    for kind in ("switch", "stay"):
        steps = [b for a, b in pairs if (a.on != b.on) == (kind == "switch")]
        found[kind] = {"steps": len(steps)}
        for what in ("enter", "choose") if steps else ():
            values = sorted(getattr(step, f"{what}_us") for step in steps)
            at = values[int(0.99 * (len(values) - 1))]
            found[kind][what] = [round(statistics.median(values), 2), round(at, 2)]
    if pairs and all(kind["steps"] for kind in found.values()):
        both = [sum(found[kind][what][0] for what in ("enter", "choose")) for kind in found]
        found["difference"] = round(both[0] - both[1], 2)
    return found


def shown(figures: dict) -> str:
    """`host` in words."""
    kinds = ((kind, figures[kind]) for kind in ("switch", "stay") if figures[kind]["steps"])
    return "; ".join(
        f"{kind} {of['enter'][0]} us (p99 {of['enter'][1]}) after a choice of {of['choose'][0]} "
        f"({of['choose'][1]}), {of['steps']} steps"
        for kind, of in kinds
    )


def step_ms(runs: list[Run], bs: int, on: bool) -> float | None:
    """Median time of a step of `bs` requests that has nothing to catch up."""
    steps = [step for run in runs for step in run.steps if not step.pairs]
    return median(s.ms for s in steps if s.bs == bs and s.on == on and s.ms is not None)


def catch_up(runs: list[Run], bs: int, pending: int, plain: float | None, on: float | None) -> dict:
    """Catch-ups of exactly `pending` pairs of each of `bs` requests, beside a plain step.

    `extra_ms` is what a step with one took longer than one without, host and idle time included.
    """
    steps = [s for run in runs for s in run.steps if s.on and s.bs == bs]
    steps = [s for s in steps if s.fewest == s.most == pending]
    ms, whole = median(s.catch_up_ms for s in steps), median(s.ms for s in steps if s.ms)
    return {
        "pending": pending,
        "times": len(steps),
        "ms": ms,
        "of_plain": over(ms, plain),
        "extra_ms": round(whole - on, 4) if whole is not None and on is not None else None,
    }


def ring_cost(runs: list[Run], bs: int, ring: int) -> dict:
    """All catch-ups of a schedule, those of a full ring and those before drafting, by pair."""
    steps = [s for run in runs for s in run.steps if s.pairs and s.bs == bs]
    pairs, ms = sum(s.pairs for s in steps), [s.catch_up_ms for s in steps]
    return {
        "ring": ring,
        "times": len(steps),
        "us_per_token": round(1e3 * sum(ms) / pairs, 3) if pairs else None,
        "largest_ms": round(max(ms), 4) if ms else None,
    }


def broken(case: dict, runs: list[Run], wanted: int, cuda: bool) -> list[str]:
    """The promises that these runs do not keep."""
    found = []
    if case["flips"] < wanted:
        found.append(f"flips must be at least {wanted}, got {case['flips']}")
    seen = case["memory"]
    if cuda and not (seen and seen["compared"]):
        found.append("memory was not seen, a generation has too few steps")
    elif seen and seen["changes"]:
        found.append(f"memory must stay as it is, changed {seen['changes']} times")
    if any(not run.same_graphs or run.graphs != runs[0].graphs for run in runs):
        found.append(f"graphs must stay as they are, got {[run.graphs for run in runs]}")
    if cuda and not all(case["graphs"][name] for name in ("target_on", "target_off", "draft")):
        found.append(f"graphs must be captured, got {case['graphs']}")
    enter = case["host_us"]["switch"].get("enter", [math.inf])[0]
    if cuda and enter > SWITCH_US:
        found.append(f"a switch must take {SWITCH_US:.0f} us of the host at most, got {enter}")
    return found


# -- the suite


class Flips(Suite):
    """Engines that switch, one after the other, at every batch size."""

    probed = True

    def run(self) -> int:
        names = self.args.setups
        for i in range(0, len(names), self.args.parallel):
            if self.late():
                self.problem(f"time is up: {', '.join(names[i:])} not run")
                break
            for child in self.start(names[i : i + self.args.parallel]):
                for bs in self.args.concurrency:
                    if self.late():
                        self.problem(f"time is up: c{bs} of {child.setup.name} not run")
                        break
                    self.try_(child, lambda c=child, n=bs: self.point(c, n))
                child.close()
        return self.end()

    def point(self, child, bs: int) -> None:
        """All of one engine at one batch size."""
        case = {"id": self.case_id(bs), "impl": child.setup.name, "tokens_in": self.n_in(bs)}
        runs = self.flip(child, bs, case)
        self.cases.append(case)
        self.write()
        runs += self.catch_ups(child, bs, case)
        # Only now there are steps that stay in a mode, to compare with.
        case["host_us"] = host(runs)
        self.line(f"c{bs:<4d} host: {shown(case['host_us'])}")
        for text in broken(case, runs, self.args.flips, self.cuda):
            self.problem(f"{child.setup.name} c{bs}: {text}")
        self.write()

    def generate(self, child, bs: int, pattern: str, ring: int, wanted: int, count) -> list[Run]:
        """Generations under one schedule until `count` of their steps has reached `wanted`."""
        runs, done = [], 0
        per_step = 1 + 2 * pattern.count("1") / len(pattern)  # tokens, if two drafts are accepted
        change = {"schedule": f"schedule:{pattern}", "ring": ring}
        while done < wanted and len(runs) < MOST_GENERATIONS:
            n_out = min(math.ceil(1.1 * (wanted - done) * per_step) + 8, self.room(bs))
            ask = {"bs": bs, "n_in": self.n_in(bs), "n_out": max(n_out, 1)}
            runs.append(Run.of(child.ask(ANSWER_SECONDS, **ask, probe=change)))
            done += count(runs[-1].steps)
        return runs

    def flip(self, child, bs: int, case: dict) -> list[Run]:
        self.generate(child, bs, "10", configured_size(), min(WARM_STEPS, self.args.flips), len)
        runs = self.generate(child, bs, "10", configured_size(), self.args.flips, switches)
        case["steps"] = sum(len(run.steps) for run in runs)
        case["flips"] = sum(switches(run.steps) for run in runs)
        case["memory"] = memory(runs)
        case["graphs"] = runs[-1].graphs
        self.line(
            f"c{bs:<4d} {child.setup.name:28s} {case['flips']} flips in {case['steps']} steps, "
            f"memory {case['memory']}, graphs {case['graphs']}"
        )
        return runs

    def catch_ups(self, child, bs: int, case: dict) -> list[Run]:
        """Every number of pending pairs, then the most of them with smaller rings."""

        def full(steps: list[Step]) -> int:
            return sum(step.bs == bs for step in steps)

        whole, most = configured_size(), max(self.args.pending)
        by_pending = {
            n: self.generate(child, bs, "0" * n + "1", whole, cycles(n) * (n + 1), full)
            for n in self.args.pending
        }
        drafting = self.generate(child, bs, "1", whole, ON_STEPS, full)
        plain, on = step_ms(by_pending[most], bs, False), step_ms(drafting, bs, True)
        case |= {"plain_ms": plain, "on_ms": on}
        case["catch_up"] = [catch_up(r, bs, n, plain, on) for n, r in by_pending.items()]
        self.line(f"c{bs:<4d} a plain step {plain} ms, one that drafts {on} ms")
        for point in case["catch_up"]:
            self.line(
                f"c{bs:<4d} catch-up of {point['pending']:<3d} {point['ms']} ms = "
                f"{point['of_plain']} plain steps, its step {point['extra_ms']} ms longer"
            )
        self.write()
        by_ring = {
            size: self.generate(child, bs, "0" * most + "1", size, 3 * (most + 1), full)
            for size in SMALL_RINGS
            if size < most
        }
        by_ring[whole] = by_pending[most]
        case["ring"] = [ring_cost(r, bs, size) for size, r in by_ring.items()]
        for point in case["ring"]:
            self.line(
                f"c{bs:<4d} ring {point['ring']:<3d} catch-up {point['us_per_token']} us a token, "
                f"largest {point['largest_ms']} ms"
            )
        return sum([*by_pending.values(), drafting, *list(by_ring.values())[:-1]], [])
