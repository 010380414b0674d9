# SPDX-License-Identifier: Apache-2.0
"""What the worker did, as a line in the log and as Prometheus counters.

The line comes as often as SGLang's own decode line (--decode-log-interval), the counters with it,
where --enable-metrics is on. Both are deltas of the policy's counters and cost nothing in between.
"""

import logging

from specfused.policy import Mode

logger = logging.getLogger(__name__)


class Report:
    """Reports of one rank.

    Args:
        policy: whose counters are shown.
        interval: decode steps between two reports; 0 or less: none.
        metrics: whether to count in Prometheus.
    """

    def __init__(self, policy, interval: int, metrics: bool):
        self.policy = policy
        self.interval = interval
        self._before = self._snapshot(0)
        self._metrics = _Metrics() if metrics and interval > 0 else None
        self._steps = 0

    def step(self, mode: Mode, caught_up: int) -> None:
        """A decode step was launched.

        Args:
            caught_up: tokens whose draft KV was written late, since the start.
        """
        self._steps += 1
        if self.interval <= 0 or self._steps % self.interval:
            return
        now = self._snapshot(caught_up)
        delta = {name: value - self._before[name] for name, value in now.items()}
        self._before = now
        logger.info("specfused: %s; %s", self._line(mode, delta), self.policy.explain())
        if self._metrics is not None:
            self._metrics.add(delta)

    def _line(self, mode: Mode, delta: dict) -> str:
        parts = [f"drafting {mode.value}"]
        for each in ("on", "off"):
            if delta[f"steps_{each}"]:
                length = delta[f"tokens_{each}"] / max(delta[f"requests_{each}"], 1)
                parts.append(f"{delta[f'steps_{each}']} steps {each}, accept len {length:.2f}")
        parts.append(f"{delta['switches']} switches, {delta['caught_up']} tokens caught up")
        return ", ".join(parts)

    def _snapshot(self, caught_up: int) -> dict:
        counters = self.policy.counters()
        names = [
            f"{what}_{mode.value}" for what in ("steps", "requests", "tokens") for mode in Mode
        ]
        return {name: counters[name] for name in (*names, "switches")} | {"caught_up": caught_up}


class _Metrics:
    def __init__(self):
        from prometheus_client import Counter  # after SGLang has set its multiprocess folder

        self._by_mode = {
            what: Counter(f"specfused_{what}", f"Decode {what} by drafting mode.", ["mode"])
            for what in ("steps", "requests", "tokens")
        }
        self._switches = Counter("specfused_switches", "Changes of the drafting mode.")
        self._caught_up = Counter("specfused_caught_up", "Tokens whose draft KV was written late.")

    def add(self, delta: dict) -> None:
        for what, counter in self._by_mode.items():
            for mode in Mode:
                counter.labels(mode=mode.value).inc(delta[f"{what}_{mode.value}"])
        self._switches.inc(delta["switches"])
        self._caught_up.inc(delta["caught_up"])
