# SPDX-License-Identifier: Apache-2.0
"""What all policies share, and those that need no measurement."""

import enum
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

# No decode step is shorter or longer, no context longer; keeps all arithmetic finite.
SECONDS = (1e-6, 3600.0)
CONTEXT = 1e9


class Mode(enum.Enum):
    """How a decode batch runs."""

    ON = "on"  # draft and verify: W rows a request, accept_lens tokens a step
    OFF = "off"  # plain decode: one row, one token

    @property
    def other(self) -> "Mode":
        return Mode.OFF if self is Mode.ON else Mode.ON


@dataclass(frozen=True)
class Decision:
    """The mode of one step and why.

    Attributes:
        mode: What to run.
        reason: One word for counters; each policy lists its own.
        detail: The numbers that decided, in one line.
    """

    mode: Mode
    reason: str
    detail: str


def require(holds: bool, argument: str, requirement: str, got) -> None:
    """Raises ValueError `policy: <argument> must <requirement>, got <value>`."""
    if not holds:
        raise ValueError(f"policy: {argument} must {requirement}, got {got!r}")


def is_count(value, least: int = 1) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


class Policy:
    """Base: counts steps, switches and observations; a subclass chooses.

    An observation that cannot be right (a step outside of SECONDS, an accept length below 1) is
    counted as `bad_observations` and otherwise ignored. A batch of no requests is answered with the
    mode of the step before ("idle") and is no step for dwell and probes.
    """

    name = "policy"
    uses_times = False  # whether calibrate() and observe_step() change decisions

    def __init__(self):
        self._mode: Mode | None = None  # of the last decision
        self._held = 0  # steps in a row in this mode
        self._context = 0.0
        self._last: Decision | None = None
        self._counts = {"steps": 0, "switches": 0, "bad_observations": 0}
        for mode in Mode:
            for what in ("steps", "observed_steps", "requests", "tokens"):
                self._counts[f"{what}_{mode.value}"] = 0
            self._counts[f"seconds_{mode.value}"] = 0.0

    # -- what the engine calls ------------------------------------------------------------------

    def decide(self, batch_size: int, mean_context: float) -> Decision:
        """The mode of the decode step about to be launched. Call once per step.

        Args:
            batch_size: Requests in the batch.
            mean_context: Mean committed tokens per request.
        """
        if batch_size < 1:
            decision = Decision(self._mode or Mode.ON, "idle", f"batch size {batch_size}")
            self._count("reason_idle")
            self._last = decision
            return decision
        if math.isfinite(mean_context):  # else that of the step before
            self._context = min(max(float(mean_context), 0.0), CONTEXT)
        decision = self._choose(int(batch_size), self._context)
        if decision.mode is not self._mode:
            if self._mode is not None:
                self._count("switches")
            self._held = 0
            self._mode = decision.mode
        self._held += 1
        self._count("steps")
        self._count(f"steps_{decision.mode.value}")
        self._count(f"reason_{decision.reason}")
        self._last = decision
        return decision

    def observe_step(
        self, mode: Mode, batch_size: int, mean_context: float, seconds: float
    ) -> None:
        """A measured step: its mode, batch size, mean context and duration. In any order."""
        mode = Mode(mode)
        good = batch_size >= 1 and math.isfinite(mean_context)
        if not (good and SECONDS[0] <= seconds <= SECONDS[1]):
            self._count("bad_observations")
            return
        self._count(f"observed_steps_{mode.value}")
        self._count(f"seconds_{mode.value}", float(seconds))
        context = min(max(float(mean_context), 0.0), CONTEXT)
        self._saw_step(mode, int(batch_size), context, float(seconds))

    def observe_accept(self, mode: Mode, accept_lens: Sequence[int]) -> None:
        """The tokens that each request of a finished step emitted, bonus token included."""
        mode = Mode(mode)
        lens = [int(length) for length in accept_lens]
        if not lens:
            return
        if min(lens) < 1:
            self._count("bad_observations")
            return
        self._count(f"requests_{mode.value}", len(lens))
        self._count(f"tokens_{mode.value}", sum(lens))
        self._saw_accept(mode, lens)

    def calibrate(self, points: Iterable[tuple[Mode, int, float, float]]) -> None:
        """Measured step times, (mode, batch_size, context, seconds) each; of use to "auto" only."""

    def counters(self) -> dict[str, float | int]:
        """Everything countable: steps and observations per mode, steps per reason, switches."""
        return dict(sorted(self._counts.items()))

    def explain(self) -> str:
        """The last decision in words."""
        if self._last is None:
            return f"{self.name}: no decision yet"
        last = self._last
        return (
            f"{self.name}: {last.mode.value} ({last.reason}) for {self._held} steps; {last.detail}"
        )

    def state_digest(self) -> str:
        """16 hex digits of everything that will decide: equal on ranks that agree."""
        mode = self._mode.value if self._mode else None
        state = (self.name, mode, self._held, self._counts["steps"], self._context, self._state())
        return hashlib.blake2b(_canonical(state).encode(), digest_size=8).hexdigest()

    # -- what a subclass defines ----------------------------------------------------------------

    def _choose(self, batch_size: int, context: float) -> Decision:
        raise NotImplementedError

    def _saw_step(self, mode: Mode, batch_size: int, context: float, seconds: float) -> None:
        pass

    def _saw_accept(self, mode: Mode, accept_lens: list[int]) -> None:
        pass

    def _state(self) -> tuple:
        """Settings and state of the subclass, of numbers, strings, None and tuples of them."""
        return ()

    def _count(self, key: str, by: float = 1) -> None:
        self._counts[key] = self._counts.get(key, 0) + by


def _canonical(value) -> str:
    """Text that is equal if and only if all bits of all numbers are."""
    if isinstance(value, tuple):
        return f"({','.join(map(_canonical, value))})"
    return value.hex() if isinstance(value, float) else repr(value)


class Forced(Policy):
    """One mode for ever. Reason "forced"."""

    def __init__(self, mode: Mode):
        super().__init__()
        self.name = mode.value
        self._decision = Decision(mode, "forced", f"configured to be {mode.value}")

    def _choose(self, batch_size: int, context: float) -> Decision:
        return self._decision


class Schedule(Policy):
    """A pattern of modes, one per step, repeated; for tests. Reason "schedule".

    Args:
        pattern: 1 for on and 0 for off, e.g. "1101".
    """

    name = "schedule"

    def __init__(self, pattern: str):
        super().__init__()
        valid = isinstance(pattern, str) and pattern and not set(pattern) - {"0", "1"}
        require(valid, "schedule", "be a string of 0 and 1, e.g. schedule:1100", pattern)
        self._pattern = pattern

    def _choose(self, batch_size: int, context: float) -> Decision:
        at = self._counts["steps"] % len(self._pattern)
        mode = Mode.ON if self._pattern[at] == "1" else Mode.OFF
        return Decision(mode, "schedule", f"step {at} of a pattern of {len(self._pattern)}")

    def _state(self) -> tuple:
        return (self._pattern,)


class Table(Policy):
    """A mode per range of batch sizes. Reasons "table", and "dwell" where a switch has to wait.

    Args:
        entries: batch size -> mode from that size on; smaller batches take the first entry's.
        dwell: Least number of steps between two switches, for batches that hover at a border.
    """

    name = "table"

    def __init__(self, entries: Mapping[int, Mode], dwell: int = 16):
        super().__init__()
        require(len(entries) > 0, "table", "have an entry, e.g. table:1=on,32=off", dict(entries))
        for size in entries:
            require(is_count(size), "a batch size of the table", "be an integer >= 1", size)
        require(is_count(dwell), "dwell", "be an integer >= 1", dwell)
        self._entries = sorted(((size, Mode(mode)) for size, mode in entries.items()), key=_size)
        self._dwell = dwell

    def _choose(self, batch_size: int, context: float) -> Decision:
        start, mode = self._entries[0]
        for size, entry in self._entries:
            if size <= batch_size:
                start, mode = size, entry
        detail = f"batch size {batch_size}, entry {start}={mode.value}"
        if self._mode not in (None, mode) and self._held < self._dwell:
            return Decision(self._mode, "dwell", f"{detail} after {self._held}/{self._dwell} steps")
        return Decision(mode, "table", detail)

    def _state(self) -> tuple:
        return (self._dwell, *((size, mode.value) for size, mode in self._entries))


def _size(entry: tuple[int, Mode]) -> int:
    return entry[0]
