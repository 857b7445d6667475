"""When the next chunk of an idle stream is expected, learnt from the gaps between chunks that each source has made."""

from streamrag.engine.request import RequestView

__all__ = ["ChunkForecast"]

WEIGHT = 0.05
"""Of the newest gap in the running mean."""
MOST_SOURCES = 1_000
"""That are remembered; names come from outside."""


class ChunkForecast:
    """A stream is expected to go on after its source's mean gap. One that is late is expected to stay away for as long
    again as it has been away: gaps have long tails. What the retriever itself expects counts more."""

    def __init__(self) -> None:
        self._gap_s: dict[str, float] = {}

    def observe(self, source: str, gap_s: float) -> None:
        """Told of each chunk but the first of a stream, and the time since the one before."""
        known_s = self._gap_s.get(source)
        if known_s is not None:
            self._gap_s[source] = (1 - WEIGHT) * known_s + WEIGHT * gap_s
        elif len(self._gap_s) < MOST_SOURCES:
            self._gap_s[source] = gap_s

    def expected_s(self, request: RequestView, now_s: float) -> float:
        """When it is expected to need its KV again: at its next chunk, or when its prompt is complete."""
        if request.expected_complete_s is not None and request.expected_complete_s > now_s:
            return request.expected_complete_s
        expected_s = request.last_chunk_s + self._gap_s.get(request.source, 0.0)
        return expected_s if expected_s > now_s else 2 * now_s - request.last_chunk_s
