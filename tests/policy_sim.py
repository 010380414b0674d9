# SPDX-License-Identifier: Apache-2.0
"""A decode loop with hidden step times and accept lengths, for the policy's tests. No clock."""

import random
from dataclasses import dataclass, field

from specfused.policy import Mode

ON, OFF = Mode.ON, Mode.OFF
DEPTH = 3  # drafts per step: accept lengths 1 .. DEPTH + 1


@dataclass
class World:
    """The truth. Seconds of a step: base + per_row * bs + per_token * bs * context, per mode."""

    on: tuple[float, float, float] = (7.5e-3, 0.06e-3, 0.0)
    off: tuple[float, float, float] = (4.8e-3, 0.045e-3, 0.0)
    accept: float = 2.5  # mean accept length while drafting
    noise: float = 0.03  # relative deviation of a step's time
    delay: int = 2  # steps until an observation arrives
    lost: float = 0.0  # share of observations that never do
    outliers: float = 0.0  # share of steps that take 20 times longer
    catchup: float = 1.0  # plain steps that resuming to draft costs

    def seconds(self, mode, bs, context):
        base, per_row, per_token = self.on if mode is ON else self.off
        return base + per_row * bs + per_token * bs * context

    def goodput(self, mode, bs, context):
        tokens = self.accept if mode is ON else 1.0
        return bs * tokens / self.seconds(mode, bs, context)

    def best(self, bs, context):
        return max(Mode, key=lambda mode: self.goodput(mode, bs, context))

    def grid(self, error_on=1.0, error_off=1.0, sizes=(1, 8, 32, 128), contexts=(512, 8192)):
        """A calibration that measured this world, off by a factor per mode."""
        errors = {ON: error_on, OFF: error_off}
        return [
            (mode, bs, context, self.seconds(mode, bs, context) * errors[mode])
            for mode in Mode
            for bs in sizes
            for context in contexts
        ]


def keep_probability(accept):
    """p of a chain that keeps every draft with p: 1 + p + ... + p^DEPTH = accept."""
    low, high = 0.0, 1.0
    for _ in range(40):
        p = (low + high) / 2
        low, high = (p, high) if sum(p**i for i in range(DEPTH + 1)) < accept else (low, p)
    return low


@dataclass
class Trace:
    """What happened, and what was to be expected of it."""

    decisions: list = field(default_factory=list)
    loads: list = field(default_factory=list)  # (batch size, context) per step
    seconds: float = 0.0  # expected, catch-ups included
    tokens: float = 0.0  # expected
    needed: float = 0.0  # seconds for these tokens, had each step run in the better mode

    @property
    def modes(self):
        return [decision.mode for decision in self.decisions]

    @property
    def switches(self):
        """Steps whose mode differs from that of the step before."""
        modes = self.modes
        return [step for step in range(1, len(modes)) if modes[step] is not modes[step - 1]]

    def share(self, mode):
        return self.modes.count(mode) / len(self.decisions)

    def shortfall(self):
        """Share of the better mode's tokens per second that was missed."""
        return 1.0 - self.needed / self.seconds


class Engine:
    """Runs a policy in a world."""

    def __init__(self, policy, world, seed=0):
        self.policy, self.world = policy, world
        self.rng = random.Random(seed)
        self.mode, self.late = None, []
        self.accept = self.cumulative = None

    def run(self, steps, bs, context=1024):
        """`bs` and `context`: numbers, or functions of the step's number."""
        trace = Trace()
        for step in range(steps):
            self._step(
                trace,
                bs(step) if callable(bs) else bs,
                context(step) if callable(context) else context,
            )
        return trace

    def _step(self, trace, bs, context):
        world, rng = self.world, self.rng
        decision = self.policy.decide(bs, context)
        mode = decision.mode
        expected = world.seconds(mode, bs, context)
        if mode is ON and self.mode is OFF:
            expected += world.catchup * world.seconds(OFF, bs, context)
        tokens = bs * (world.accept if mode is ON else 1.0)
        trace.decisions.append(decision)
        trace.loads.append((bs, context))
        trace.seconds += expected
        trace.tokens += tokens
        trace.needed += tokens / max(world.goodput(mode, bs, context) for mode in Mode)
        self.mode = mode
        seconds = expected * max(rng.gauss(1.0, world.noise), 0.2)
        if rng.random() < world.outliers:
            seconds *= 20
        lens = self._accept_lens(bs) if mode is ON else [1] * bs
        self.late.append((mode, bs, context, seconds, lens))
        while len(self.late) > world.delay:
            mode, bs, context, seconds, lens = self.late.pop(0)
            if rng.random() >= world.lost:
                self.policy.observe_step(mode, bs, context, seconds)
            if rng.random() >= world.lost:
                self.policy.observe_accept(mode, lens)

    def _accept_lens(self, bs):
        if self.accept != self.world.accept:
            self.accept = self.world.accept
            p = keep_probability(self.accept)
            self.cumulative = [1.0 - p ** (i + 1) for i in range(DEPTH)] + [1.0]
        return self.rng.choices(range(1, DEPTH + 2), cum_weights=self.cumulative, k=bs)
