# SPDX-License-Identifier: Apache-2.0
"""The accept length of drafting: tokens a request emits per step, bonus token included."""

SLOW = 512  # requests that the estimate averages over while nothing changes, ...
SLOW_STEPS = 32  # ... and steps
FAST = 32  # requests that show a change, ...
FAST_STEPS = 4  # ... and steps
CHANGED = 12.0  # squared distance of the two, in variances of the fast one
LEAST_VARIANCE = 0.05


class AcceptLength:
    """A slow mean of accept lengths that jumps to a fast one when the two disagree.

    One sample is one request of one step, so a batch of 64 teaches 64 times what a batch of 1 does.
    A slow mean alone follows a change of workload late; a fast one alone is noisy at batch size 1.
    Requests of a step may be alike, as with one prompt many times or simulated acceptance, and then
    say no more than one: so both means last some steps at least, and a change has to stand out from
    the differences between steps, too.

    Args:
        prior: Accept length before anything was seen; counts as 8 samples.
    """

    def __init__(self, prior: float):
        self.mean = float(prior)
        self.samples = 0  # all that were seen
        self._weight = 8.0  # of the mean, in samples
        self._fast = self.mean
        self._fast_weight = 8.0
        self._variance = 1.0  # of a request
        self._step_variance = 0.0  # of a step's mean, from one step to the next
        self._last = self.mean, 1  # mean and requests of the last step

    def add(self, accept_lens: list[int]) -> None:
        """Takes the requests of one step."""
        n = len(accept_lens)
        mean = sum(accept_lens) / n
        square = sum((length - self.mean) ** 2 for length in accept_lens) / n
        self.samples += n
        self._weight = min(self._weight, max(SLOW, SLOW_STEPS * n)) + n
        share = n / self._weight
        self._step_variance += ((mean - self._last[0]) ** 2 / 2 - self._step_variance) * share
        self._last = mean, n
        self.mean += (mean - self.mean) * share
        self._variance += (square - self._variance) * share
        self._fast_weight = min(self._fast_weight, max(FAST, FAST_STEPS * n)) + n
        fast_share = n / self._fast_weight
        self._fast += (mean - self._fast) * fast_share
        distance = (self._fast - self.mean) * (self._fast - self.mean)
        noise = max(self._variance, LEAST_VARIANCE) / max(n, FAST)
        noise = max(noise, self._step_variance * fast_share)
        if self._weight > self._fast_weight and distance > CHANGED * noise:
            # The fast one has old steps in it, too, so what comes now counts for more.
            self.mean, self._weight = self._fast, max(1.0 * n, FAST / 4)

    def age(self) -> None:
        """Drafting resumes after a while without: what was seen before counts for less."""
        self._weight = min(self._weight, max(2.0 * FAST, 1.0 * FAST_STEPS * self._last[1]))
        self._fast_weight = min(self._fast_weight, 8.0)

    def state(self) -> tuple:
        """Everything that decides, for a digest."""
        fast = (self._fast, self._fast_weight, self._variance, self._step_variance)
        return (self.mean, self.samples, self._weight, *self._last, *fast)
