# SPDX-License-Identifier: Apache-2.0
"""Feeds the policy and asks it: SPECFUSED_MODE in, one choice per decode step out."""

import os

from specfused.policy import Mode, from_config

VARIABLE = "SPECFUSED_MODE"
STOCK = "stock"


def wanted() -> bool:
    """Whether this server shall have a worker that switches."""
    return os.environ.get(VARIABLE, STOCK) != STOCK


class Switch:
    """One policy and the numbers that it lives on."""

    def __init__(self, policy, text: str):
        self.policy = policy
        self.text = text
        self.steps = {Mode.ON: 0, Mode.OFF: 0}
        self.changes = 0
        self._last = None
        self._in_flight = []

    @classmethod
    def from_environment(cls):
        text = os.environ.get(VARIABLE, STOCK)
        return cls(from_config(text), text)

    def describe(self) -> str:
        """For the log line at start."""
        return f"{VARIABLE}={self.text}"

    def choose(self, batch) -> bool:
        """Whether the next step of `batch` drafts. Every call is a step."""
        lens = [req.seqlen for req in batch.reqs]
        mode = self.policy.decide(len(lens), sum(lens) / max(len(lens), 1)).mode
        self.steps[mode] += 1
        self.changes += self._last not in (None, mode)
        self._last = mode
        return mode is Mode.ON

    def launched(self, drafting: bool, batch) -> None:
        """The step has been launched."""
        self._in_flight.append(Mode.ON if drafting else Mode.OFF)

    def finished(self, accept_lens: list[int]) -> None:
        """The oldest launched step's accept lengths have arrived."""
        self.policy.observe_accept(self._in_flight.pop(0), accept_lens)
