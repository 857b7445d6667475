"""How fast a replica computes prompts, by the time for which they really wait there."""

KEPT = 0.9
"""What a prompt before weighs beside the next one."""
LASTS_S = 30.0
"""Without another prompt; then the speed is unknown again, so that a replica that was slow is tried anew."""
QUERY_TOKENS = 384
"""What a query costs besides its tokens: the part of a step that is the same however many it computes. Measured
profiles have from 185 (two A40s) to 620 (two H100s). Without it, whoever finds most prompts in its cache looks slow."""


class Speed:
    """Of one replica: tokens computed, over the seconds in which any prompt waited there.

        prompts wait   ──────────        ───────────────
        computed                 a             b        c      b takes what is since the last one, c the rest

    Times are of one clock. What a prompt found in the cache is often told later than that it is computed: therefore
    `computed` gives its seconds, and `add` takes them with its tokens.
    """

    def __init__(self, query_tokens: float = QUERY_TOKENS) -> None:
        self._query_tokens = query_tokens
        self._since_s: float | None = None
        self._open_s = 0.0
        """Of waiting, since a prompt was computed."""
        self._tokens = self._seconds = 0.0
        self._added_s = 0.0

    def waiting(self, is_waiting: bool, now_s: float) -> None:
        """Whether prompts wait from now on."""
        if self._since_s is not None:
            self._open_s += now_s - self._since_s
        self._since_s = now_s if is_waiting else None

    def computed(self, now_s: float) -> float:
        """A prompt is; returns the seconds of waiting that are its own."""
        self.waiting(self._since_s is not None, now_s)
        taken_s, self._open_s = self._open_s, 0.0
        return taken_s

    def add(self, num_tokens: float, seconds: float, now_s: float) -> None:
        """So many tokens were computed for a prompt, in the seconds that `computed` said."""
        self._tokens = KEPT * (self._tokens + num_tokens + self._query_tokens)
        self._seconds = KEPT * (self._seconds + seconds)
        self._added_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        """0 if unknown."""
        is_known = self._seconds > 0 and now_s - self._added_s < LASTS_S
        return self._tokens / self._seconds if is_known else 0.0
