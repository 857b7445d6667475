"""How many watched questions are answered at a time."""

from math import inf

MAX_CONCURRENT = 32
"""Most watched questions at a time: each takes a place in the engine's batch, before those who ask."""

DECAY = 0.9
"""Weight of a measurement after the next one."""

NEWEST_INTERVAL_SHARE = 0.2
"""Share of the newest interval in their moving average."""


class ConcurrencyEstimator:
    """Estimates how many watched questions to answer at a time, from how long answers take and how soon data change.

    Requests share the engine's steps, so n take a + b n seconds, of which a is most. As many go at once as end before
    the next version stands, the paper's k_max = (T_data - a) / b (arXiv 2605.13784, section 3.9); or, where that is
    none, as end in twice the time of one: with less, all would take longer. At most twice as many as were measured.
    """

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._version_s: float | None = None
        self._num_last = 0
        self._weight = self._num = self._num_squared = self._took_s = self._num_took_s = 0.0

    def observe_version(self, at_s: float) -> None:
        """Record that another version stands, at this time of the clock."""
        if self._version_s is not None:
            since_s, share = at_s - self._version_s, NEWEST_INTERVAL_SHARE
            self._interval_s = since_s if self._interval_s is None else (1 - share) * self._interval_s + share * since_s
        self._version_s = at_s

    def observe_answer(self, num_concurrent: int, seconds: float) -> None:
        """Record that one of `num_concurrent` answers took `seconds`."""
        num = self._num_last = num_concurrent
        self._weight = DECAY * self._weight + 1.0
        self._num = DECAY * self._num + num
        self._num_squared = DECAY * self._num_squared + num * num
        self._took_s = DECAY * self._took_s + seconds
        self._num_took_s = DECAY * self._num_took_s + num * seconds

    @property
    def limit(self) -> int:
        """Most questions to answer at a time."""
        if not self._weight:
            return 1
        num, took_s = self._num / self._weight, self._took_s / self._weight
        variance = self._num_squared / self._weight - num * num
        linear_s = max(took_s / num, 1e-9)
        each_s = (self._num_took_s / self._weight - num * took_s) / variance if variance > 1e-6 else linear_s
        each_s = min(max(each_s, linear_s / 100), linear_s)  # noise may make it anything
        fixed_s = took_s - each_s * num
        interval_s = inf if self._interval_s is None else self._interval_s
        budget_s = max(interval_s, 2 * (fixed_s + each_s))
        return int(max(min((budget_s - fixed_s) / each_s, 2 * self._num_last, MAX_CONCURRENT), 1))
