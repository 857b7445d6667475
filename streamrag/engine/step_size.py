"""How many tokens of complete prompts a step should compute, learnt from past steps and from how often prompts arrive.

A long step wastes less time, because each step has an overhead. A short step delays fewer requests, for less time:
those that become complete while it computes, and those in it that wait for what is behind them. Both cost tokens.

`Pace` limits the tokens of partial prompts in a step, by the engine's speed and the next change of the prompt.
"""

import math
from dataclasses import dataclass

WEIGHT = 0.02
"""Weight of the newest step in the running means."""
FEWEST_STEPS = 16
"""Steps to observe before there is an estimate."""
LEAST_SPREAD = 0.1
"""Least spread of the tokens per step, as a share of their mean: from steps of one size, overhead cannot be told."""
LEAST_APART = 0.05
"""Least share of the variance of pairs that tokens do not explain: below it, the two costs cannot be told apart."""
LEAST_TOKENS = 256
"""Least step to aim for: shorter steps are hardly quicker anywhere, and overhead stays below half of the step."""
RATE_S = 10.0
"""Time constant of the rate at which prompts become complete, in seconds."""


@dataclass(frozen=True, slots=True)
class StepCosts:
    """The costs that decide how long a step should be. A length is a cost in tokens without context; see `length`."""

    overhead: float
    """Overhead of a step: the tokens without context that could be computed in that time."""
    arrivals_per_token: float
    """Prompts that become complete in the time of one token without context."""
    pair_cost: float = 0.0
    """Cost of one token's attention to another, in tokens."""

    def length(self, num_tokens: float, num_before: float) -> float:
        """Return the cost of `num_tokens` behind `num_before` others, including their attention."""
        return num_tokens * (1 + self.pair_cost * (num_before + num_tokens / 2))

    def num_fitting(self, length: float, num_before: int) -> float:
        """Return how many tokens behind `num_before` others cost `length`: the inverse of `length`."""
        if not self.pair_cost or length == math.inf:
            return length
        # The positive root of pair n^2 / 2 + b n = length, in a form without cancellation.
        b = 1 + self.pair_cost * num_before
        return 2 * length / (b + math.sqrt(b * b + 2 * self.pair_cost * length))

    def best_length(self, num_waiting: float) -> float:
        """Return the best length of a step while `num_waiting` complete prompts have tokens to compute.

        With steps of s tokens and overhead h, each waiting prompt loses h / s per token. Prompts that arrive, a per
        token, lose s / 2 each. The best s is sqrt(2 h num_waiting / a), but at least h and 256; infinity if a = 0.
        """
        if self.arrivals_per_token <= 0:
            return math.inf
        return max(math.sqrt(2 * self.overhead * num_waiting / self.arrivals_per_token), self.overhead, LEAST_TOKENS)

    def even_part(self, length: float, best_length: float) -> float:
        """Return the length of the equal parts that cost least: k parts for up to `best_length` sqrt(k (k + 1))."""
        ratio = length / best_length
        return length / max(math.ceil((math.sqrt(1 + 4 * ratio * ratio) - 1) / 2), 1)

    def is_worth_adding(self, length: float, num_before: int, num_waiting: float) -> bool:
        """Whether to add `length` to a step: it delays the prompts before it, and saves those waiting one overhead."""
        return num_before * length <= self.overhead * num_waiting

    def is_worth_putting_off(self, length: float, num_waiting: float) -> bool:
        """Whether to plan a step when the one in flight has ended, not now: prompts that are complete by then,
        `arrivals` times `length`, can join it, but those that wait now lose at most one overhead each."""
        return self.arrivals_per_token * length * length > self.overhead * num_waiting


class StepCostEstimator:
    """Estimates `StepCosts` from observed steps and prompts. Times are on the engine's clock."""

    def __init__(self) -> None:
        self._num_steps = 0
        # Running means of tokens x, pairs z, seconds y, and their products.
        self._x = self._z = self._y = self._xx = self._xz = self._zz = self._xy = self._zy = 0.0
        self._rate = 0.0  # prompts per second, as of `_rate_at_s`
        self._rate_at_s = 0.0

    def observe_step(self, num_tokens: int, num_pairs: float, duration_s: float) -> None:
        """Update the running means by a step of `num_tokens` and `num_pairs` pairs of a token and one attended to."""
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
        """Record that a prompt has become complete."""
        self._rate = self._rate_now(now_s) + 1 / RATE_S
        self._rate_at_s = now_s

    def at(self, now_s: float) -> StepCosts | None:
        """Return the costs at `now_s`; None while the steps are too few or too alike to tell overhead from tokens."""
        spread = self._xx - self._x * self._x
        if self._num_steps < FEWEST_STEPS or spread <= (LEAST_SPREAD * self._x) ** 2:
            return None
        token_s, pair_s = self._fit()
        if token_s <= 0:
            return None
        overhead_s = max(self._y - token_s * self._x - pair_s * self._z, 0.0)
        return StepCosts(overhead_s / token_s, self._rate_now(now_s) * token_s, pair_s / token_s)

    def _fit(self) -> tuple[float, float]:
        """Return the seconds of a token and of a pair by least squares; 0 for a pair if they cannot be told apart."""
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


FEWEST_TOKENS = 64
"""Smaller steps are not observed, because their duration is mostly overhead. Also the least overhead in tokens."""
FEWEST_REPLACED_TOKENS = 16
"""Least tokens per step of a prompt that is about to be replaced: with fewer, a step is hardly shorter."""
PACE_WEIGHT = 0.2
"""Weight of the newest step in the running mean of `Pace`."""


class Pace:
    """An estimate of the engine's speed, and the limits on partial prompts that follow from it.

    Requests and chunks that arrive during a step wait for its end. A fast engine needs no limit, a slow one does. Until
    a step has been observed, the engine counts as slow.

    max_tokens: the most tokens of partial prompts in a step; None for no limit.
    step_s: the seconds that a step of partial prompts should take at most.
    """

    def __init__(self, max_tokens: int | None, step_s: float) -> None:
        self._max_tokens = max_tokens
        self._step_s = step_s
        self._token_s: float | None = None

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """Update the mean time per token with a step's; ignore a step of fewer than `FEWEST_TOKENS` tokens."""
        if num_tokens < FEWEST_TOKENS:
            return
        token_s = duration_s / num_tokens
        self._token_s = token_s if self._token_s is None else (1 - PACE_WEIGHT) * self._token_s + PACE_WEIGHT * token_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens computed per second; None until a step has been observed."""
        return 1 / self._token_s if self._token_s else None

    @property
    def num_partial_tokens(self) -> int | None:
        """Most tokens of partial prompts in a step: those of `step_s`, but 128 to `max_tokens`; None for no limit."""
        if self._max_tokens is None:
            return None
        num_tokens = int(self._step_s / self._token_s) if self._token_s else 0
        return min(max(num_tokens, 2 * FEWEST_TOKENS), self._max_tokens)

    def num_step_tokens(self, replaced_every_s: float, overhead: float | None) -> int | None:
        """Return the most tokens per step of a prompt that is replaced once in `replaced_every_s` seconds.

        `overhead`, that of a step in tokens, counts as `FEWEST_TOKENS` if it is None or less. With s tokens per step
        and t seconds per token, a replacement wastes half a step on average, s t^2 / (2 `replaced_every_s`) per token;
        overhead h costs h t / s. The sum is least at s = sqrt(2 h `replaced_every_s` / t), bounded by
        `FEWEST_REPLACED_TOKENS` and `max_tokens`. For a prompt that only grows (infinite time), before a step was
        observed, and if `max_tokens` is None, return `max_tokens`.
        """
        if self._max_tokens is None or not self._token_s or replaced_every_s == math.inf:
            return self._max_tokens
        overhead = max(overhead or 0.0, FEWEST_TOKENS)  # a fit may return 0
        num_tokens = int(math.sqrt(2 * overhead * replaced_every_s / self._token_s))
        return min(max(num_tokens, FEWEST_REPLACED_TOKENS), self._max_tokens)
