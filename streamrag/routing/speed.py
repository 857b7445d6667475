"""A replica's prefill speed, measured over the time in which prompts wait at it."""

KEPT = 0.9  # weight of earlier prompts relative to the next one
LASTS_S = 30.0
"""Seconds without a prompt after which the speed is unknown, so that a replica that was slow is tried again."""
QUERY_TOKENS = 384
"""Cost of a query besides its tokens: the constant part of a step. In measured profiles it is between 185 (two A40s)
and 620 (two H100s). Without it, a replica that finds most prompts in its cache looks slow."""


class Speed:
    """Measures the tokens that one replica computes per second in which any prompt waits there.

        prompts wait   ──────────        ───────────────
        computed                 a             b        c      b counts the time since a, c the time since b

    All times are of one clock. Engines often report the prefix hits of a prompt after its computation. Therefore
    `computed` returns the seconds, and `add` takes them together with the tokens.
    """

    def __init__(self, query_tokens: float = QUERY_TOKENS) -> None:
        self._query_tokens = query_tokens
        self._since_s: float | None = None
        self._open_s = 0.0  # seconds of waiting since the last computed prompt
        self._tokens = self._seconds = 0.0
        self._added_s = 0.0

    def waiting(self, is_waiting: bool, now_s: float) -> None:
        """Record whether prompts wait from now on."""
        if self._since_s is not None:
            self._open_s += now_s - self._since_s
        self._since_s = now_s if is_waiting else None

    def computed(self, now_s: float) -> float:
        """Record that a prompt has been computed. Return the seconds of waiting that count for it."""
        self.waiting(self._since_s is not None, now_s)
        seconds, self._open_s = self._open_s, 0.0
        return seconds

    def add(self, num_tokens: float, seconds: float, now_s: float) -> None:
        """Add the tokens computed for a prompt, and the seconds that `computed` returned for it."""
        self._tokens = KEPT * (self._tokens + num_tokens + self._query_tokens)
        self._seconds = KEPT * (self._seconds + seconds)
        self._added_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        """Return the speed, 0 if unknown."""
        is_known = self._seconds > 0 and now_s - self._added_s < LASTS_S
        return self._tokens / self._seconds if is_known else 0.0
