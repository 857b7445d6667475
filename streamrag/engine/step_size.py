"""How many tokens of complete prompts a step computes, from what steps have taken and how often prompts come.

A long step wastes less: each has an overhead. A short one holds up fewer, and for less time: whoever becomes complete
while it computes, and whoever is ready with it but has to wait for its end. Both are weighed in tokens.
"""

import math
from dataclasses import dataclass

WEIGHT = 0.02
"""Weight of the newest step in what is known of steps."""
FEWEST_STEPS = 16
"""Before they are believed."""
LEAST_SPREAD = 0.1
"""Least spread of the tokens of steps, as a share of their mean: steps of one size do not tell overhead from tokens."""
LEAST_APART = 0.05
"""Share of the squares of pairs that tokens do not explain: with less, it is not told what takes the time."""
LEAST_TOKENS = 256
"""Shorter steps are hardly quicker anywhere, and overhead is never let come to more than half of a step either."""
RATE_S = 10.0
"""Time constant of the rate at which prompts become complete, in seconds."""


@dataclass(frozen=True, slots=True)
class StepSize:
    """The costs that decide when a step is too long. Its length is in tokens without any before them; see `length`."""

    overhead: float
    """Overhead of a step, in tokens that would be computed in its time."""
    arrivals: float
    """Prompts that become complete in the time of one token."""
    pair: float = 0.0
    """Cost of a token's attention to another one, in tokens."""

    def length(self, num_tokens: float, num_before: float) -> float:
        """Return the length of tokens with `num_before` before them: attending to more makes them take longer."""
        return num_tokens * (1 + self.pair * (num_before + num_tokens / 2))

    def num_fitting(self, length: float, num_before: int) -> float:
        """Return the most tokens behind `num_before` others whose length is at most `length`."""
        if not self.pair or length == math.inf:
            return length
        # The positive root of pair n^2 / 2 + b n = length, in a form that subtracts nothing.
        b = 1 + self.pair * num_before
        return 2 * length / (b + math.sqrt(b * b + 2 * self.pair * length))

    def longest(self, num_waiting: float) -> float:
        """With `num_waiting` complete prompts to compute. Of a step of s tokens and an overhead of h, those that wait
        lose h / s each in every token's time, and those that come, a of them in that time, lose s / 2 each: the sum
        is least at s = sqrt(2 h num_waiting / a)."""
        least = max(self.overhead, LEAST_TOKENS)
        if self.arrivals <= 0:
            return math.inf
        return max(math.sqrt(2 * self.overhead * num_waiting / self.arrivals), least)

    def is_worth(self, length: float, num_ready: int, num_waiting: float) -> bool:
        """Whether so much of the next of `num_waiting` prompts belongs into a step with which `num_ready` are ready:
        these all wait for it, and those are spared the overhead of one step."""
        return num_ready * length <= self.overhead * num_waiting

    def is_better_late(self, length: float, num_waiting: float) -> bool:
        """Whether a step should be planned when the one under way has ended, and not while it computes. Who becomes
        complete meanwhile can be in it then, and else waits for its end as well: as many as come in such a step's time,
        for as long as one. It costs those that wait the time in which the device has nothing to do, of which is known
        only that it is less than the overhead of a step."""
        return self.arrivals * length * length >= self.overhead * num_waiting


class StepSizes:
    """Learns from steps and prompts as they come. Times are on the engine's clock."""

    def __init__(self) -> None:
        self._num_steps = 0
        # Means of tokens x, pairs z, seconds y, and their products.
        self._x = self._z = self._y = self._xx = self._xz = self._zz = self._xy = self._zy = 0.0
        self._rate = 0.0  # prompts a second, as of `_rate_at_s`
        self._rate_at_s = 0.0

    def observe_step(self, num_tokens: int, num_pairs: float, duration_s: float) -> None:
        """Told of each step that computed, with how many pairs of a token and one that it attends to."""
        self._num_steps += 1
        x, z, y = num_tokens, num_pairs, duration_s
        weight = max(WEIGHT, 1 / self._num_steps)
        self._x += weight * (x - self._x)
        self._z += weight * (z - self._z)
        self._y += weight * (y - self._y)
        self._xx += weight * (x * x - self._xx)
        self._xz += weight * (x * z - self._xz)
        self._zz += weight * (z * z - self._zz)
        self._xy += weight * (x * y - self._xy)
        self._zy += weight * (z * y - self._zy)

    def observe_complete(self, now_s: float) -> None:
        """Told of each prompt that becomes complete."""
        self._rate = self._rate_now(now_s) + 1 / RATE_S
        self._rate_at_s = now_s

    def at(self, now_s: float) -> StepSize | None:
        """None as long as too little is known."""
        spread = self._xx - self._x * self._x
        if self._num_steps < FEWEST_STEPS or spread <= (LEAST_SPREAD * self._x) ** 2:
            return None
        token_s, pair_s = self._fit()
        if token_s <= 0:
            return None
        overhead_s = max(self._y - token_s * self._x - pair_s * self._z, 0.0)
        return StepSize(overhead_s / token_s, self._rate_now(now_s) * token_s, pair_s / token_s)

    def _fit(self) -> tuple[float, float]:
        """Seconds of a token and of a pair: by least squares, or of a token alone where both tell the same."""
        xx, xz, zz = self._xx - self._x**2, self._xz - self._x * self._z, self._zz - self._z**2
        xy, zy = self._xy - self._x * self._y, self._zy - self._z * self._y
        determinant = xx * zz - xz * xz
        if determinant > LEAST_APART * xx * zz:
            token_s, pair_s = (zz * xy - xz * zy) / determinant, (xx * zy - xz * xy) / determinant
            if token_s > 0 and pair_s > 0:
                return token_s, pair_s
        return xy / xx, 0.0

    def _rate_now(self, now_s: float) -> float:
        return self._rate * math.exp(-max(now_s - self._rate_at_s, 0.0) / RATE_S)
