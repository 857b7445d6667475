"""Limit how many tokens of partial prompts a step computes, by the engine's speed and the next change of the prompt."""

import math

FEWEST_TOKENS = 64
"""Smaller steps are not observed, because their duration is mostly overhead. Also the least overhead in tokens."""
FEWEST_REPLACED_TOKENS = 16
"""Least tokens per step of a prompt that is about to be replaced: with fewer, a step is hardly shorter."""
WEIGHT = 0.2
"""Weight of the newest step in the running mean."""


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
        self._token_s = token_s if self._token_s is None else (1 - WEIGHT) * self._token_s + WEIGHT * token_s

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
