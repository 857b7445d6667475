"""How many tokens of partial prompts a step computes: as many as its speed and the next change of the prompt allow."""

import math

FEWEST_TOKENS = 64
"""Smaller steps say more about what a step costs than about what a token does. Also the least
overhead of a step, in tokens."""
FEWEST_REPLACED_TOKENS = 16
"""Least tokens per step of a prompt that is about to be replaced: with fewer, a step is hardly shorter."""
WEIGHT = 0.2
"""Weight of the newest step in the running mean."""


class Pace:
    """An estimate of the engine's speed, and the length of steps that follows from it.

    Whatever comes while a step computes waits for its end: another request, but also the next chunk of the very prompt
    that is being computed. A fast device has no reason for a limit, a slow one has. Until a step has been measured, it
    is as small as on a slow device.
    """

    def __init__(self, num_most_tokens: int | None, step_s: float) -> None:
        """Limit steps to `num_most_tokens`, and to about `step_s` seconds; None for no limit of either kind."""
        self._num_most_tokens = num_most_tokens
        self._step_s = step_s
        self._token_s: float | None = None

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """Learn from a step that computed `num_tokens` in `duration_s` seconds."""
        if num_tokens < FEWEST_TOKENS:
            return
        token_s = duration_s / num_tokens
        self._token_s = token_s if self._token_s is None else (1 - WEIGHT) * self._token_s + WEIGHT * token_s

    @property
    def tokens_per_s(self) -> float | None:
        """Tokens computed per second; None until a step has been measured."""
        return 1 / self._token_s if self._token_s else None

    @property
    def num_partial_tokens(self) -> int | None:
        """Most tokens of partial prompts in one step; None for no limit."""
        if self._num_most_tokens is None:
            return None
        num_tokens = int(self._step_s / self._token_s) if self._token_s else 0
        return min(max(num_tokens, 2 * FEWEST_TOKENS), self._num_most_tokens)

    def num_before_replaced(self, replaced_every_s: float, overhead: float | None) -> int | None:
        """Return the most tokens per step of a prompt whose content is replaced once in `replaced_every_s` seconds.

        A step of s tokens, t seconds each, computes half of them in vain if the prompt is replaced meanwhile, which
        costs s t^2 / (2 `replaced_every_s`) per token. An `overhead` of h tokens a step costs h t / s. Their sum is
        least at s = sqrt(2 h `replaced_every_s` / t). A prompt that only grows is replaced after infinite time.
        """
        if self._num_most_tokens is None or not self._token_s or replaced_every_s == math.inf:
            return self._num_most_tokens
        overhead = max(overhead or 0.0, FEWEST_TOKENS)  # what is fitted may come out as none
        num_tokens = int(math.sqrt(2 * overhead * replaced_every_s / self._token_s))
        return min(max(num_tokens, FEWEST_REPLACED_TOKENS), self._num_most_tokens)
