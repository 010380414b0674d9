# SPDX-License-Identifier: Apache-2.0
"""Step times: a calibrated surface per mode, corrected by what steps turn out to take."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import astuple, dataclass

from specfused.policy.base import CONTEXT, SECONDS, Mode, is_count, is_number, require

FLAT_SECONDS = 0.005  # without calibration; only ratios to it are learned, so any value does
MEMORY = 32  # steps that a correction averages over
CLIP = 1.25  # a step counts as at most this many times longer than expected,
CLIP_SHORT = 0.5  # and at least this many, ...
FIRST = 3  # steps before a mode counts as measured at a size, where nothing is calibrated
CLIPPED_IN_A_ROW = 8  # ... unless so many in a row say so: then it is the expectation that is wrong


def region(batch_size: int) -> int:
    """Batch sizes 1, 2, 3, 4-5, 6-7, 8-11, 12-15, ... share one correction."""
    octave = batch_size.bit_length() - 1
    return 2 * octave + (batch_size >> (octave - 1) & 1 if octave else 0)


class Surface:
    """Seconds over (batch size, context), through measured points.

    Linear between points in both directions, which is exact for a + b bs + c bs context. Below the
    smallest measured batch size or context: the value there. Above the largest: the last slope, if
    it is positive. The grid may be ragged; a batch size measured at one context only takes the
    context slope of its nearest neighbour in proportion to batch size, as KV reads do.
    """

    def __init__(self, points: list[tuple[int, float, float]]):
        rows: dict[int, list[tuple[float, float]]] = {}
        for batch_size, context, seconds in sorted(points):
            rows.setdefault(batch_size, []).append((context, seconds))
        self._sizes = sorted(rows)
        slopes = {size: _last_slope(row) for size, row in rows.items() if len(row) > 1}
        self._rows = []
        for size in self._sizes:
            near = min(slopes, key=lambda other: (abs(other - size), other), default=None)
            slope = slopes[near] * size / near if near is not None else 0.0
            self._rows.append((rows[size], slope))

    def at(self, batch_size: int, context: float) -> float:
        """Seconds of a step."""
        right = bisect_right(self._sizes, batch_size)
        if right == 0:
            return _along(*self._rows[0], context)
        if right < len(self._sizes):
            left = right - 1
        elif right == 1:
            return _along(*self._rows[0], context)
        else:
            left, right = right - 2, right - 1
        x0, x1 = self._sizes[left], self._sizes[right]
        y0, y1 = _along(*self._rows[left], context), _along(*self._rows[right], context)
        if batch_size >= x1:
            return y1 + max(y1 - y0, 0.0) / (x1 - x0) * (batch_size - x1)
        return y0 + (y1 - y0) * (batch_size - x0) / (x1 - x0)


def _last_slope(row: list[tuple[float, float]]) -> float:
    (x0, y0), (x1, y1) = row[-2:]
    return max(y1 - y0, 0.0) / (x1 - x0)


def _along(row: list[tuple[float, float]], slope: float, context: float) -> float:
    """A row of (context, seconds) at `context`; `slope` behind its end."""
    x1, y1 = row[-1]
    if context >= x1:
        return y1 + slope * (context - x1)
    right = bisect_right(row, context, key=_first)
    if right == 0:
        # A single point has no left neighbour: its slope holds on both sides, down to one half.
        return max(y1 + slope * (context - x1), 0.5 * y1) if len(row) == 1 else row[0][1]
    (x0, y0), (x1, y1) = row[right - 1 : right + 1]
    return y0 + (y1 - y0) * (context - x0) / (x1 - x0)


def _first(point: tuple[float, float]) -> float:
    return point[0]


@dataclass
class Ratio:
    """Mean of measured over expected seconds in one region, over the last MEMORY steps or so.

    The first step of a server may take seconds, and most outliers are slow. So a ratio that starts
    from nothing (count 0) is the lower median of its first three; one that starts from a
    calibration (count 1) clips from the beginning.
    """

    value: float = 1.0
    count: int = 0  # at most MEMORY - 1
    first: tuple[float, ...] = ()
    clipped: tuple[float, ...] = ()  # in a row, on one side

    def add(self, ratio: float) -> bool:
        """Takes a measurement; False if it had to be clipped."""
        if self.count == len(self.first) < FIRST:
            self.first = (*self.first, ratio)
            self.value, self.count = _median(self.first), len(self.first)
            return True
        longest, shortest = self.value * CLIP, self.value * CLIP_SHORT
        usual = shortest <= ratio <= longest
        if usual or (self.clipped and (self.clipped[0] > longest) != (ratio > longest)):
            self.clipped = ()
        if not usual:
            self.clipped = (*self.clipped, ratio)
        if len(self.clipped) == CLIPPED_IN_A_ROW:
            self.value, self.count = _median(self.clipped), CLIPPED_IN_A_ROW
            self.clipped = ()
            return False
        self.value += (min(max(ratio, shortest), longest) - self.value) / (self.count + 1)
        self.count = min(self.count + 1, MEMORY - 1)
        return usual


def _median(values: tuple[float, ...]) -> float:
    return sorted(values)[(len(values) - 1) // 2]  # the lower one


class StepTimes:
    """Expected seconds of a step per mode: a Surface times the Ratio of the batch size's region."""

    def __init__(self):
        self._surfaces: dict[Mode, Surface] = {}
        self._points: tuple = ()
        self._ratios: dict[Mode, dict[int, Ratio]] = {mode: {} for mode in Mode}

    def calibrate(self, points: Iterable[tuple[Mode, int, float, float]]) -> None:
        """Takes (mode, batch_size, context, seconds) of both modes and forgets all corrections."""
        seen: dict[tuple[str, int, float], float] = {}
        for point in points:
            require(
                isinstance(point, (tuple, list)) and len(point) == 4,
                "a calibration point",
                "be [mode, batch_size, context, seconds]",
                point,
            )
            mode, batch_size, context, seconds = point
            mode = mode.value if isinstance(mode, Mode) else mode
            require(mode in ("on", "off"), "mode of a calibration point", "be on or off", mode)
            require(is_count(batch_size), "batch_size of a point", "be an integer >= 1", batch_size)
            valid = is_number(context) and 0 <= context <= CONTEXT
            require(valid, "context of a point", f"be from 0 to {CONTEXT:g}", context)
            valid = is_number(seconds) and SECONDS[0] <= seconds <= SECONDS[1]
            require(valid, "seconds of a point", "be from {:g} to {:g}".format(*SECONDS), seconds)
            key = (mode, batch_size, float(context))
            require(key not in seen, "a calibration point", "be given once", key)
            seen[key] = float(seconds)
        for mode in Mode:
            valid = any(key[0] == mode.value for key in seen)
            require(valid, "calibration", f"have a point of mode {mode.value}", list(seen))
        self._points = tuple(sorted((*key, seconds) for key, seconds in seen.items()))
        self._surfaces = {
            mode: Surface([point[1:] for point in self._points if point[0] == mode.value])
            for mode in Mode
        }
        self._ratios = {mode: {} for mode in Mode}

    @property
    def calibrated(self) -> bool:
        return bool(self._surfaces)

    def known(self, mode: Mode, batch_size: int | None = None) -> bool:
        """Whether enough was measured of the mode (at sizes like this one, if given)."""
        at = None if batch_size is None else region(batch_size)
        return self.calibrated or any(
            ratio.count >= FIRST and at in (None, here)
            for here, ratio in self._ratios[mode].items()
        )

    def observe(self, mode: Mode, batch_size: int, context: float, seconds: float) -> bool:
        """Takes a measured step; False if it was far from what was expected."""
        ratios, at = self._ratios[mode], region(batch_size)
        if at not in ratios:
            start = self.correction(mode, batch_size)
            ratios[at] = Ratio(start, count=1) if self.calibrated else Ratio()
        return ratios[at].add(seconds / self._expected(mode, batch_size, context))

    def seconds(self, mode: Mode, batch_size: int, context: float) -> float:
        """Expected duration of a step."""
        return self._expected(mode, batch_size, context) * self.correction(mode, batch_size)

    def correction(self, mode: Mode, batch_size: int) -> float:
        """Measured over expected time at sizes like this one.

        Where none was measured, that of the nearest measured regions below and above, by distance;
        1 where there is none of those either.
        """
        ratios, here = self._ratios[mode], region(batch_size)
        own = ratios.get(here)
        if own is not None and (self.calibrated or own.count >= FIRST):
            return own.value
        below = max((other for other in ratios if other < here), default=None)
        above = min((other for other in ratios if other > here), default=None)
        if below is not None and above is not None:
            share = (here - below) / (above - below)
            return ratios[below].value * (1 - share) + ratios[above].value * share
        near = below if below is not None else above
        if near is not None:
            return ratios[near].value
        return 1.0 if own is None else own.value

    def _expected(self, mode: Mode, batch_size: int, context: float) -> float:
        if not self._surfaces:
            return FLAT_SECONDS
        return self._surfaces[mode].at(batch_size, context)

    def state(self) -> tuple:
        """Everything that decides, for a digest."""
        ratios = tuple(
            (mode.value, at, *astuple(ratio))
            for mode in Mode
            for at, ratio in sorted(self._ratios[mode].items())
        )
        return (self._points, ratios)
