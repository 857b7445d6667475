"""How many watched questions are answered at a time."""

from math import inf

MOST = 32
"""Whatever the times say: each takes a place in the engine's batch, before those who ask."""

DECAY = 0.9
"""What a measurement counts for after the next."""

NEW = 0.2
"""What the newest interval counts for."""


class AtOnce:
    """Watches for how long answers take, one by one and beside others, and how soon the data change.

    Requests share the engine's steps, so n take a + b n seconds, of which a is most. As many go at once as end before
    the next version stands, the paper's k_max = (T_data - a) / b (arXiv 2605.13784, section 3.9); or, where that is
    none, as end in twice the time of one: with less, all would take longer. Twice as many at most as were measured.
    """

    def __init__(self) -> None:
        self._interval_s: float | None = None
        self._stood_s: float | None = None
        self._num_last = 0
        self._weight = self._num = self._num_squared = self._took_s = self._num_took_s = 0.0

    def stands(self, at_s: float) -> None:
        """Another version does, at this time of the clock."""
        if self._stood_s is not None:
            since_s = at_s - self._stood_s
            self._interval_s = since_s if self._interval_s is None else (1 - NEW) * self._interval_s + NEW * since_s
        self._stood_s = at_s

    def took(self, num: int, seconds: float) -> None:
        """One of so many at once did."""
        self._num_last = num
        self._weight = DECAY * self._weight + 1.0
        self._num = DECAY * self._num + num
        self._num_squared = DECAY * self._num_squared + num * num
        self._took_s = DECAY * self._took_s + seconds
        self._num_took_s = DECAY * self._num_took_s + num * seconds

    @property
    def most(self) -> int:
        """So many may go at once."""
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
        return int(max(min((budget_s - fixed_s) / each_s, 2 * self._num_last, MOST), 1))
