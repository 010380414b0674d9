# SPDX-License-Identifier: Apache-2.0
"""Feeds the policy and asks it: SPECFUSED_MODE in, one choice per decode step out.

All ranks of a tensor-parallel group must choose alike. Batch sizes, lengths and accepted tokens are
the same on all of them; measured times are not, so rank 0's are handed to all, every few steps.
"""

import json
import logging
import os
import time
from collections import deque

import torch

from specfused.policy import Mode, from_config
from specfused.sglang import compat, ring
from specfused.sglang.clock import StepClock

logger = logging.getLogger(__name__)

VARIABLE = "SPECFUSED_MODE"
STOCK = "stock"  # SGLang's own worker
DEFAULT = "auto"
CHECK_VARIABLE = "SPECFUSED_CHECK_RANKS"
SHARE_INTERVAL = 16  # steps between two hand-outs of rank 0's times
SHARED_ROWS = 32  # of one hand-out


def configured() -> str | None:
    """SPECFUSED_MODE, or None where nobody has set it."""
    return os.environ.get(VARIABLE, "").strip() or None


def policy_of(text: str):
    """The policy that SPECFUSED_MODE asks for.

    Raises:
        ValueError: it asks for none.
    """
    try:
        policy = from_config(text)
        if policy.uses_times:
            # How far drafting can lag behind is one of the prices that "auto" compares.
            own = json.loads(text) if text.startswith("{") else {"policy": text}
            policy = from_config({"ring_tokens": ring.configured_size(), **own})
        return policy
    except ValueError as error:
        raise ValueError(f"specfused: {VARIABLE} must be {STOCK} or a policy: {error}") from None


class Switch:
    """One policy and the numbers that it lives on.

    Args:
        text: a policy in words, see `specfused.policy.from_config`.
        device: of the model.
        ranks: SGLang's tensor-parallel group, or None for one rank.
    """

    def __init__(self, text: str, device, ranks=None):
        self.text = text
        self.policy = policy_of(text)
        self._calibrated = '"calibration"' in text
        self.clock = StepClock(device) if self.policy.uses_times else None
        self.ranks = ranks
        self._check = ranks is not None and os.environ.get(CHECK_VARIABLE) == "1"
        self._in_flight = deque()  # modes of launched steps without result
        self._times = []  # of rank 0, not yet handed out
        self._step = 0
        self._now = None  # mode, batch size and mean context of the step

    @classmethod
    def from_environment(cls, device):
        ranks = compat.tp_group() if compat.tp_size() > 1 else None
        return cls(configured() or DEFAULT, device, ranks)

    @property
    def never_drafts(self) -> bool:
        """SPECFUSED_MODE=off: nobody will ever read the draft's KV."""
        return self.policy.name == Mode.OFF.value

    def describe(self) -> str:
        """For the log line at start."""
        return f"{VARIABLE}={self.text}"

    def calibrate(self, worker) -> None:
        """Measures the worker's steps, if the policy wants to know their times.

        A server has to start without it, too: the policy then learns from the steps it serves.
        """
        if not self.policy.uses_times or self._calibrated:
            return
        start = time.perf_counter()
        from specfused.sglang import calibrate

        try:
            points = calibrate.points(worker)
        except Exception:
            logger.exception("specfused worker: no step times at start, they are learnt in service")
            points = []
        if self.ranks is not None:
            times = [(tuple(what), seconds) for *what, seconds in points]
            points = [(*what, seconds) for what, seconds in _from_first(self.ranks, times)]
        if not points:
            return
        self.policy.calibrate(points)
        shown = ", ".join(f"{m.value} {b} x {c:.0f}: {s * 1e3:.2f}" for m, b, c, s in points)
        logger.info(
            "specfused worker: step times in ms by requests x context, measured in %.1f s: %s",
            time.perf_counter() - start,
            shown,
        )

    # -- a step

    def choose(self, reqs) -> Mode:
        """The mode of the decode step about to be launched over `reqs`."""
        self._step += 1
        if self.clock is not None:
            self._observe_times()
        context = sum(req.seqlen for req in reqs) / max(len(reqs), 1)
        mode = self.policy.decide(len(reqs), context).mode
        if self._check:
            self._compare_ranks(mode)
        self._now = (mode, len(reqs), context)
        self._in_flight.append(mode)
        return mode

    def launched(self) -> None:
        """The step has been launched, all of it."""
        if self.clock is not None:
            self.clock.step(self._now)

    def prefill(self) -> None:
        """A prefill is about to be launched."""
        if self.clock is not None:
            self.clock.interrupt()

    def finished(self, accept_lens: list[int]) -> Mode:
        """The accept lengths of the oldest launched step have arrived; the step's mode."""
        mode = self._in_flight.popleft()
        self.policy.observe_accept(mode, accept_lens)
        return mode

    # -- ranks

    def _observe_times(self) -> None:
        self._times += self.clock.finished()
        if self.ranks is not None:
            if self._step % SHARE_INTERVAL:
                return
            self._times = _from_first(self.ranks, self._times)
        for (mode, batch_size, context), seconds in self._times:
            self.policy.observe_step(mode, batch_size, context, seconds)
        self._times = []

    def _compare_ranks(self, mode: Mode) -> None:
        """Before anything of the step is launched: ranks in two modes would wait for each other."""
        mine = f"{mode.value:3} {self.policy.state_digest()}"
        row = torch.tensor(list(mine.encode()), dtype=torch.uint8)
        rows = [torch.empty_like(row) for _ in self.ranks.ranks]
        torch.distributed.all_gather(rows, row, group=self.ranks.cpu_group)
        states = [bytes(row.tolist()).decode() for row in rows]
        if len(set(states)) > 1:
            raise RuntimeError(
                f"specfused: the policy must be in one state on all ranks, got {states} at step "
                f"{self._step}"
            )


def _from_first(ranks, times: list) -> list:
    """Rank 0's times on every rank; one small collective of the host."""
    rows = torch.zeros(SHARED_ROWS, 4, dtype=torch.float64)
    for row, ((mode, batch_size, context), seconds) in zip(rows, times, strict=False):
        values = [mode is Mode.ON, batch_size, context, seconds]
        row.copy_(torch.tensor(values, dtype=rows.dtype))
    torch.distributed.broadcast(rows, src=ranks.ranks[0], group=ranks.cpu_group)
    return [
        ((Mode.ON if on else Mode.OFF, int(batch_size), context), seconds)
        for on, batch_size, context, seconds in rows.tolist()
        if batch_size
    ]
