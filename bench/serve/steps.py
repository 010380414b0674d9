# SPDX-License-Identifier: Apache-2.0
"""What one decode step consists of, engine by engine, from SGLang's profiler."""

import statistics

from bench.serve.suite import PILOT_TOKENS, Child, Suite


class Steps(Suite):
    """Groups of engines; each is timed at all concurrencies before it is profiled at any."""

    def run(self) -> int:
        names = [
            n for n in self.args.setups if any(not self.has(n, bs) for bs in self.args.concurrency)
        ]
        for i in range(0, len(names), self.args.parallel):
            if self.late():
                self.problem(f"time is up: {', '.join(names[i:])} not run")
                break
            for child in self.start(names[i : i + self.args.parallel]):
                self.take(child)
                child.close()
        return self.end()

    def take(self, child: Child):
        wanted = [bs for bs in self.args.concurrency if not self.has(child.setup.name, bs)]
        times = {}
        for bs in wanted:
            # The first one may still compile something.
            replies = [
                self.try_(child, lambda bs=bs: child.measure(bs, self.n_in(bs), 2 * PILOT_TOKENS))
                for _ in range(1 + self.args.repeats)
            ][1:]
            if all(replies):
                ms = [1e3 * r["seconds"] / r["longest"] for r in replies]
                times[bs] = round(statistics.median(ms), 3)
        for bs in wanted:
            if self.late():
                self.problem(f"time is up: {child.setup.name} c{bs} not profiled")
            elif child.alive:
                self.profile(child, bs, times[bs], self.args.id)
