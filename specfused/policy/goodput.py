# SPDX-License-Identifier: Apache-2.0
"""The "auto" policy: run the mode that emits more tokens per second.

    goodput(mode) = batch size * accept length(mode) / step seconds(mode)

Accept length of OFF is 1. Step seconds come from `times`, the accept length of ON from `accept`.

When it switches. A switch is a step whose mode differs from that of the step before.

1. The other mode must be better by `margin`, and what staying has lost since then must have grown
   to the price of a switch (one catch-up of the draft's KV): small losses take many steps, large
   ones few. A loss that lasts costs a dwell or one more price than having known of it.
2. At most one switch per dwell. A switch starts a dwell of `dwell` steps without another one, with
   two exceptions: after a switch for a probe the dwell is the probe's length; and it ends after
   `min_dwell` steps if the batch size has doubled or halved since the switch and either the switch
   was for a probe or staying loses a share of `urgent_loss` or more (reason "urgent").

What it does not see it probes. The other mode's step time, and while OFF the accept length, get
known only by running it: for `probe_steps` steps, or as many more, up to `probe_most_steps`, as
are predicted to lose no more than the catch-up does (or as the first estimate of the accept length
needs); then whatever is better. A probe is due when `probe_budget` of the predicted time since the
last one has paid for what it is predicted to lose, catch-up included, and `probe_interval` steps
have passed. Probes that change little become rarer, up to `probe_backoff` times; batch sizes or
contexts at half or twice those of the last probe make them as frequent as before. What was never
seen at all (without calibration: at a batch size like this one) is probed after one dwell, outside
of the budget, at most MAX_VISITS times.

Reasons: warmup (too little measured to compare), goodput (the better one), margin (the other is
better, by too little), cost (better, but has not paid for the switch), dwell (has to wait), urgent,
probe, probe-end.
"""

from dataclasses import dataclass, fields
from typing import NamedTuple

from specfused.policy.accept import AcceptLength
from specfused.policy.base import Decision, Mode, Policy, is_count, is_number, require
from specfused.policy.times import StepTimes, region

MAX_VISITS = 3
FIRST_REQUESTS = 64  # accept lengths, one per request and step, that the first probes have to see
LITTLE = 0.05  # change of the predicted loss


@dataclass(frozen=True)
class Settings:
    """Parameters of Goodput. Steps are decode steps, seconds those of observe_step.

    Attributes:
        margin: Share by which the other mode must be better.
        dwell: Least number of steps between two switches, see above for the exceptions.
        min_dwell: The same, without exceptions.
        urgent_loss: Share of goodput whose loss ends a dwell after a jump of the batch size.
        probe_steps: Least length of a probe. Two steps are seen late, one has the catch-up in it.
        probe_most_steps: Greatest length, where the modes are nearly equal.
        probe_interval: Least number of steps from one probe to the next.
        probe_budget: Share of time that probes may be predicted to lose.
        probe_backoff: How many times rarer probes get that change little.
        accept_prior: Accept length of ON before any was seen.
        catchup_seconds: Time to extend the draft's KV when drafting resumes; None: one plain step.
        catchup_seconds_per_token: In addition, for every pending token of the batch.
        ring_tokens: Most tokens that a request can have pending.
    """

    margin: float = 0.01
    dwell: int = 16
    min_dwell: int = 4
    urgent_loss: float = 0.10
    probe_steps: int = 6
    probe_most_steps: int = 32
    probe_interval: int = 128
    probe_budget: float = 0.01
    probe_backoff: int = 4
    accept_prior: float = 2.0
    catchup_seconds: float | None = None
    catchup_seconds_per_token: float = 0.0
    ring_tokens: int = 64

    def __post_init__(self):
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "catchup_seconds" and value is None:
                continue
            if field.type is int:
                require(is_count(value), field.name, "be an integer >= 1", value)
            else:
                valid = is_number(value) and value >= 0
                require(valid, field.name, "be a number >= 0", value)
        prior = self.accept_prior
        require(1 <= prior <= 64, "accept_prior", "be from 1 to 64", prior)
        for name in ("dwell", "probe_steps"):
            value = getattr(self, name)
            require(value >= self.min_dwell, name, f"be >= min_dwell {self.min_dwell}", value)
        least = f"be >= probe_steps {self.probe_steps}"
        value = self.probe_most_steps
        require(value >= self.probe_steps, "probe_most_steps", least, value)


class Comparison(NamedTuple):
    """Both modes at one batch size and context."""

    batch_size: int
    context: float
    accept_len: float  # of ON
    seconds: dict[Mode, float]
    goodput: dict[Mode, float]  # tokens per second of the batch

    def loss(self, mode: Mode) -> float:
        """Share of the other mode's goodput that `mode` loses; negative: it is better."""
        return 1.0 - self.goodput[mode] / self.goodput[mode.other]

    def __str__(self) -> str:
        on, off = self.seconds[Mode.ON], self.seconds[Mode.OFF]
        return (
            f"bs {self.batch_size} context {self.context:.0f}: "
            f"on {self.accept_len:.2f} tokens / {on * 1e3:.3g} ms = {self.goodput[Mode.ON]:.0f}/s, "
            f"off 1 / {off * 1e3:.3g} ms = {self.goodput[Mode.OFF]:.0f}/s"
        )


class Goodput(Policy):
    """See the module. Without calibration it starts in ON and learns from probes."""

    name = "auto"
    uses_times = True

    def __init__(self, settings: Settings | None = None, calibration=None):
        super().__init__()
        self.settings = settings or Settings()
        self._times = StepTimes()
        self._accept = AcceptLength(self.settings.accept_prior)
        self._skip = dict.fromkeys(Mode, False)  # whether its next step time has a switch in it
        self._probe_length = 0  # of the running probe; 0: none runs
        self._switch_size = 0  # batch size at the last switch
        self._off_steps = 0  # since drafting ran, or since the start
        self._regret = 0.0  # seconds lost by staying
        self._credit = 0.0  # seconds that probes may lose
        self._planned = 0.0  # what the running probe's steps were predicted to lose
        self._planned_loss = 0.0  # its share of goodput
        self._backoff = 1
        self._probed_at = (0, 0.0)  # batch size and context of the last probe
        self._visits: dict[tuple[str, int], int] = {}
        self._counts |= {"probes": 0, "probes_adopted": 0, "outliers": 0}
        if calibration is not None:
            self.calibrate(calibration)

    def calibrate(self, points) -> None:
        """Takes a grid of step times, e.g. of captured graphs; what was learned of times is lost.

        Args:
            points: (mode, batch_size, context, seconds) each; mode a Mode, "on" or "off"; both
                modes at least once. The grid may be ragged.

        Raises:
            ValueError: A point that cannot be right, or that is given twice.
        """
        self._times.calibrate(points)

    # -- observations ---------------------------------------------------------------------------

    def _saw_step(self, mode: Mode, batch_size: int, context: float, seconds: float) -> None:
        if self._skip[mode]:
            self._skip[mode] = False
        elif not self._times.observe(mode, batch_size, context, seconds):
            self._count("outliers")

    def _saw_accept(self, mode: Mode, accept_lens: list[int]) -> None:
        if mode is Mode.ON:
            self._accept.add(accept_lens)

    # -- decision -------------------------------------------------------------------------------

    def compare(self, batch_size: int, context: float) -> Comparison:
        """What is expected of both modes."""
        on = self._times.seconds(Mode.ON, batch_size, context)
        off = self._times.seconds(Mode.OFF, batch_size, context)
        goodput = {Mode.ON: batch_size * self._accept.mean / on, Mode.OFF: batch_size / off}
        seconds = {Mode.ON: on, Mode.OFF: off}
        return Comparison(batch_size, context, self._accept.mean, seconds, goodput)

    def _choose(self, batch_size: int, context: float) -> Decision:
        now = self.compare(batch_size, context)
        decision = self._start(now) if self._mode is None else self._next(now)
        if decision.mode is not self._mode:
            self._switch_size = batch_size
            self._regret = 0.0
            self._skip[decision.mode] = True
            if decision.mode is Mode.ON:
                self._accept.age()
        self._off_steps = 0 if decision.mode is Mode.ON else self._off_steps + 1
        self._credit += self.settings.probe_budget * now.seconds[decision.mode]
        return decision

    def _start(self, now: Comparison) -> Decision:
        if not self._times.calibrated:
            return Decision(Mode.ON, "warmup", f"bs {now.batch_size}: nothing measured yet")
        mode = Mode.ON if now.loss(Mode.ON) <= 0 else Mode.OFF
        return Decision(mode, "goodput", f"{now} (calibration and prior)")

    def _next(self, now: Comparison) -> Decision:
        settings, mode = self.settings, self._mode
        jumped = _apart(now.batch_size, self._switch_size)
        if self._probe_length:
            over = self._held >= self._probe_length
            if not over and not (jumped and self._held >= settings.min_dwell):
                at = f"step {self._held + 1}/{self._probe_length}"
                return Decision(mode, "probe", f"{at} of a probe of {mode.value}; {now}")
            return self._end_probe(now)
        if self._probe_due(now):
            return self._begin_probe(now)
        if not (self._times.known(mode) and self._times.known(mode.other)):
            return Decision(mode, "warmup", f"bs {now.batch_size}: too few steps measured")
        loss = now.loss(mode)
        if now.goodput[mode.other] <= now.goodput[mode] * (1.0 + settings.margin):
            self._regret = 0.0
            return Decision(mode, "goodput" if loss <= 0 else "margin", str(now))
        self._regret += now.seconds[mode] * loss
        price = self._switch_seconds(now)
        detail = (
            f"{now}; staying lost {self._regret * 1e3:.3g} of {price * 1e3:.3g} ms, "
            f"held {self._held}/{settings.dwell}"
        )
        urgent = jumped and loss >= settings.urgent_loss and self._held >= settings.min_dwell
        if self._held < settings.dwell and not urgent:
            return Decision(mode, "dwell", detail)
        if self._regret < price:
            return Decision(mode, "cost", detail)
        self._backoff = 1
        return Decision(mode.other, "goodput" if self._held >= settings.dwell else "urgent", detail)

    def _switch_seconds(self, now: Comparison) -> float:
        """The catch-up that a switch causes: at once when drafting resumes, else later."""
        steps = self._off_steps if self._mode is Mode.OFF else self.settings.dwell
        return self._catchup_seconds(now, steps)

    def _catchup_seconds(self, now: Comparison, off_steps: int) -> float:
        """Time to extend the draft's KV over the tokens of `off_steps` plain steps."""
        settings = self.settings
        base = settings.catchup_seconds
        pending = now.batch_size * min(off_steps, settings.ring_tokens)
        base = now.seconds[Mode.OFF] if base is None else base
        return base + settings.catchup_seconds_per_token * pending

    # -- probes ---------------------------------------------------------------------------------

    def _probe_due(self, now: Comparison) -> bool:
        settings, mode = self.settings, self._mode
        if self._held < settings.dwell or not self._times.known(mode, now.batch_size):
            return False
        if self._unseen(mode.other, now.batch_size):
            return True
        then, context = self._probed_at
        if _apart(now.batch_size, then) or _apart(now.context, context):
            self._backoff = 1
        _, lost, catchup = self._plan_probe(now, mode.other)
        paid = self._credit >= (lost + catchup) * self._backoff
        return paid and self._held >= settings.probe_interval

    def _unseen(self, mode: Mode, batch_size: int) -> bool:
        known = self._times.known(mode, batch_size)
        if mode is Mode.ON:
            known = known and self._accept.samples > 0
        return not known and self._visits.get((mode.value, region(batch_size)), 0) < MAX_VISITS

    def _plan_probe(self, now: Comparison, mode: Mode) -> tuple[int, float, float]:
        """Steps of a probe of `mode`, and seconds that they and the catch-up would lose."""
        least, most = self.settings.probe_steps, self.settings.probe_most_steps
        if mode is Mode.ON:  # a first estimate of few requests would be far off, and stay
            lacking = FIRST_REQUESTS - self._accept.samples
            least = min(max(-(-lacking // now.batch_size), least), most)
        catchup = self._catchup_seconds(now, self._off_steps if mode is Mode.ON else least)
        loss = now.seconds[mode] * max(now.loss(mode), 0.0)  # of a step
        steps = most if loss * most <= catchup else max(int(catchup / loss), least)
        return steps, steps * loss, catchup

    def _begin_probe(self, now: Comparison) -> Decision:
        mode = self._mode.other
        first = self._unseen(mode, now.batch_size)
        visit = (mode.value, region(now.batch_size))
        self._visits[visit] = self._visits.get(visit, 0) + 1
        self._probe_length, self._planned, catchup = self._plan_probe(now, mode)
        self._planned_loss = now.loss(mode)
        price = self._planned + catchup
        if not first:
            self._credit = min(self._credit, price) - price  # what is saved beyond it is lost
        self._probed_at = (now.batch_size, now.context)
        self._count("probes")
        detail = f"step 1/{self._probe_length}, predicted to lose {price * 1e3:.3g} ms; {now}"
        return Decision(mode, "probe", detail)

    def _end_probe(self, now: Comparison) -> Decision:
        """Stays if the probed mode turned out better, else goes back."""
        mode, settings = self._mode, self.settings
        self._probe_length = 0
        lost = self._held * now.seconds[mode] * max(now.loss(mode), 0.0)
        self._credit -= max(lost - self._planned, 0.0)
        both = self._times.known(mode) and self._times.known(mode.other)
        if both and now.goodput[mode] > now.goodput[mode.other] * (1.0 + settings.margin):
            self._backoff = 1
            self._count("probes_adopted")
            return Decision(mode, "probe-end", f"better than before; {now}")
        change = now.loss(mode) - self._planned_loss
        little = -LITTLE < change < LITTLE
        self._backoff = min(2 * self._backoff, settings.probe_backoff) if little else 1
        return Decision(mode.other, "probe-end", f"no better than before; {now}")

    # -- what is seen of it ---------------------------------------------------------------------

    def counters(self) -> dict[str, float | int]:
        now = {"accept_len_on": self._accept.mean, "probe_credit_seconds": self._credit}
        return dict(sorted((self._counts | now).items()))

    def explain(self) -> str:
        """The last decision, and what is known and owed."""
        if self._last is None:
            return super().explain()
        counts, size = self._counts, max(self._switch_size, 1)
        ratios = " ".join(
            f"{mode.value} x{self._times.correction(mode, size):.3f}" for mode in Mode
        )
        return (
            f"{super().explain()}\n"
            f"accept length {self._accept.mean:.2f} over {self._accept.samples} requests; "
            f"step times {'calibrated' if self._times.calibrated else 'not calibrated'}, "
            f"corrected at bs {size} by {ratios}; {counts['switches']} switches, "
            f"{counts['probes']} probes, {counts['probes_adopted']} adopted, "
            f"next one {self._backoff} x apart, credit {self._credit * 1e3:.3g} ms"
        )

    def _state(self) -> tuple:
        return (
            tuple(getattr(self.settings, field.name) for field in fields(self.settings)),
            self._times.state(),
            self._accept.state(),
            tuple(self._skip[mode] for mode in Mode),
            (self._probe_length, self._switch_size, self._off_steps, self._regret),
            (self._credit, self._planned, self._planned_loss, self._backoff, self._probed_at),
            tuple(sorted((*visit, times) for visit, times in self._visits.items())),
        )


def _apart(a: float, b: float) -> bool:
    """Whether one is at least twice the other."""
    return max(a, b) >= 2 * min(a, b) and a != b
