"""A replica's speed in computing prompts, measured over the time for which prompts wait there."""

KEPT = 0.9
"""Weight of an earlier prompt beside the next one."""
LASTS_S = 30.0
"""Seconds without another prompt after which the speed is unknown, so that a replica that was slow is tried anew."""
QUERY_TOKENS = 384
"""Cost of a query besides its tokens: the part of a step that is the same however many it computes. Measured profiles
have from 185 (two A40s) to 620 (two H100s). Without it, a replica that finds most prompts in its cache looks slow."""


class Speed:
    """Tokens that one replica computed, over the seconds in which any prompt waited there.

        prompts wait   ──────────        ───────────────
        computed                 a             b        c      b takes what is since the last one, c the rest

    Times are of one clock. An engine often tells what a prompt found in the cache later than that it is computed:
    therefore `computed` returns its seconds, and `add` takes them with its tokens.
    """

    def __init__(self, query_tokens: float = QUERY_TOKENS) -> None:
        self._query_tokens = query_tokens
        self._since_s: float | None = None
        self._open_s = 0.0
        """Seconds of waiting since a prompt was computed."""
        self._tokens = self._seconds = 0.0
        self._added_s = 0.0

    def waiting(self, is_waiting: bool, now_s: float) -> None:
        """Note whether prompts wait from now on."""
        if self._since_s is not None:
            self._open_s += now_s - self._since_s
        self._since_s = now_s if is_waiting else None

    def computed(self, now_s: float) -> float:
        """Note that a prompt is computed. Return the seconds of waiting that are its own."""
        self.waiting(self._since_s is not None, now_s)
        taken_s, self._open_s = self._open_s, 0.0
        return taken_s

    def add(self, num_tokens: float, seconds: float, now_s: float) -> None:
        """Add the tokens that were computed for a prompt, in the seconds that `computed` returned."""
        self._tokens = KEPT * (self._tokens + num_tokens + self._query_tokens)
        self._seconds = KEPT * (self._seconds + seconds)
        self._added_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        """Return the speed, 0 if unknown."""
        is_known = self._seconds > 0 and now_s - self._added_s < LASTS_S
        return self._tokens / self._seconds if is_known else 0.0
