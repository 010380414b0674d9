# SPDX-License-Identifier: Apache-2.0
"""The accept length of drafting: tokens a request emits per step, bonus token included."""

SLOW = 512  # requests that the estimate averages over while nothing changes
FAST = 32  # requests that show a change
CHANGED = 12.0  # squared distance of the two, in variances of a mean over FAST requests
LEAST_VARIANCE = 0.05


class AcceptLength:
    """A slow mean of accept lengths that jumps to a fast one when the two disagree.

    One sample is one request of one step, so a batch of 64 teaches 64 times what a batch of 1 does.
    A slow mean alone follows a change of workload late; a fast one alone is noisy at batch size 1.

    Args:
        prior: Accept length before anything was seen; counts as 8 samples.
    """

    def __init__(self, prior: float):
        self.mean = float(prior)
        self.samples = 0  # all that were seen
        self._weight = 8.0  # of the mean, in samples
        self._fast = self.mean
        self._fast_weight = 8.0
        self._variance = 1.0

    def add(self, accept_lens: list[int]) -> None:
        """Takes the requests of one step."""
        n = len(accept_lens)
        mean = sum(accept_lens) / n
        square = sum((length - self.mean) ** 2 for length in accept_lens) / n
        self.samples += n
        self._weight = min(self._weight, SLOW) + n
        self.mean += (mean - self.mean) * n / self._weight
        self._variance += (square - self._variance) * n / self._weight
        self._fast_weight = min(self._fast_weight, FAST) + n
        self._fast += (mean - self._fast) * n / self._fast_weight
        distance = (self._fast - self.mean) * (self._fast - self.mean)
        noise = max(self._variance, LEAST_VARIANCE) / max(n, FAST)
        if self._weight > self._fast_weight and distance > CHANGED * noise:
            self.mean, self._weight = self._fast, self._fast_weight

    def age(self) -> None:
        """Drafting resumes after a while without: what was seen before counts for less."""
        self._weight = min(self._weight, 2.0 * FAST)
        self._fast_weight = min(self._fast_weight, 8.0)

    def state(self) -> tuple:
        """Everything that decides, for a digest."""
        fast = (self._fast, self._fast_weight, self._variance)
        return (self.mean, self.samples, self._weight, *fast)
