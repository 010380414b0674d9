# SPDX-License-Identifier: Apache-2.0
"""How long decode steps take, without waiting for any of them."""

import time
from collections import deque

import torch


class StepClock:
    """Measures from the end of one decode step to the end of the next.

    On a GPU the ends are events on the forward stream, asked but never waited for, so a time
    arrives a step or two late. A step after a prefill, or after the worker was idle, has no time.
    """

    def __init__(self, device):
        self._cuda = torch.device(device).type == "cuda"
        self._previous = None
        self._open = deque()  # (what was run, end before, end)

    def step(self, what: tuple) -> None:
        """A decode step was launched on the current stream; `what` comes back with its time."""
        end = self._now()
        if self._previous is not None:
            self._open.append((what, self._previous, end))
        self._previous = end

    def interrupt(self) -> None:
        """Something else has been launched since the last step."""
        self._previous = None

    def finished(self) -> list[tuple[tuple, float]]:
        """(what, seconds) of the steps that have ended since the last call."""
        done = []
        while self._open and self._ended(self._open[0][2]):
            what, start, end = self._open.popleft()
            done.append((what, self._seconds(start, end)))
        return done

    def _now(self):
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _ended(self, end) -> bool:
        return not self._cuda or end.query()

    def _seconds(self, start, end) -> float:
        return start.elapsed_time(end) * 1e-3 if self._cuda else end - start
