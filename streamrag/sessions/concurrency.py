"""Estimate how many watched questions to answer concurrently."""

from math import inf

MAX_CONCURRENT = 32
"""Most watched questions at a time: each takes a place in the engine's batch, ahead of other questions."""

DECAY = 0.9
"""Weight of a measurement after the next one."""

NEWEST_INTERVAL_SHARE = 0.2
"""Weight of the newest interval in its moving average."""


class ConcurrencyEstimator:
    """Estimates how many watched questions to answer concurrently, from their duration and the interval of new data.

    Concurrent requests share the engine's steps, so n of them take a + b n seconds, mostly a. The limit is the number
    that ends before the next version, k_max = (T_data - a) / b (arXiv 2605.13784, section 3.9), but at least as many as
    take twice the time of one, and at most twice the last number.
    """

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._version_s: float | None = None
        self._num_last = 0
        # Decayed sums of weights, n, n^2, seconds, and n times seconds.
        self._weight = self._num = self._num_squared = self._took_s = self._num_took_s = 0.0

    def observe_version(self, at_s: float) -> None:
        """Record a new version of the data at `at_s`, and update the moving average of the time between versions."""
        if self._version_s is not None:
            since_s, share = at_s - self._version_s, NEWEST_INTERVAL_SHARE
            self._interval_s = since_s if self._interval_s is None else (1 - share) * self._interval_s + share * since_s
        self._version_s = at_s

    def observe_answer(self, num_concurrent: int, seconds: float) -> None:
        """Add to the decayed sums, from which `limit` is estimated, that one of `num_concurrent` took `seconds`."""
        num = self._num_last = num_concurrent
        self._weight = DECAY * self._weight + 1.0
        self._num = DECAY * self._num + num
        self._num_squared = DECAY * self._num_squared + num * num
        self._took_s = DECAY * self._took_s + seconds
        self._num_took_s = DECAY * self._num_took_s + num * seconds

    @property
    def limit(self) -> int:
        """Most questions to answer at a time, from 1 to `MAX_CONCURRENT`: 1 before the first answer, and at most twice
        the last number as long as no two versions are known."""
        if not self._weight:
            return 1
        num, took_s = self._num / self._weight, self._took_s / self._weight
        variance = self._num_squared / self._weight - num * num
        linear_s = max(took_s / num, 1e-9)
        each_s = (self._num_took_s / self._weight - num * took_s) / variance if variance > 1e-6 else linear_s
        each_s = min(max(each_s, linear_s / 100), linear_s)  # a noisy fit may give any value
        fixed_s = took_s - each_s * num
        interval_s = inf if self._interval_s is None else self._interval_s
        budget_s = max(interval_s, 2 * (fixed_s + each_s))
        return int(max(min((budget_s - fixed_s) / each_s, 2 * self._num_last, MAX_CONCURRENT), 1))
