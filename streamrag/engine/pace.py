"""How long steps take, learnt from those that were, and what follows for the size of a lean one."""

FEWEST_TOKENS = 64
"""Smaller steps say more about what a step costs than about what a token does."""
WEIGHT = 0.2
"""Weight of the newest step in the running mean."""


class Pace:
    """Tokens of partial prompts that a lean step may compute, so that it takes about `step_s` seconds.

    Whoever comes to wait for an answer waits for the step under way first: a fast device has no reason for a limit, a
    slow one has. Until a step has been seen, and at any pace, it is `num_most_tokens` at most.
    """

    def __init__(self, num_most_tokens: int, step_s: float) -> None:
        self._num_most_tokens = num_most_tokens
        self._step_s = step_s
        self._token_s: float | None = None

    def observe(self, num_tokens: int, duration_s: float) -> None:
        """Told of each step that was computed."""
        if num_tokens < FEWEST_TOKENS:
            return
        token_s = duration_s / num_tokens
        self._token_s = token_s if self._token_s is None else (1 - WEIGHT) * self._token_s + WEIGHT * token_s

    @property
    def tokens_per_s(self) -> float | None:
        """None until a step has been seen."""
        return 1 / self._token_s if self._token_s else None

    @property
    def num_partial_tokens(self) -> int:
        if not self._token_s:
            return self._num_most_tokens
        num_tokens = max(int(self._step_s / self._token_s), 2 * FEWEST_TOKENS)
        return min(num_tokens, self._num_most_tokens)
