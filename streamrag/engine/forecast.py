"""What the next chunk of a stream will do, and when, learnt from those that each source has made."""

import math
from typing import NamedTuple

from streamrag.engine.request import RequestView

WEIGHT = 0.05
"""Weight of the newest chunk in the running means."""
SURE_SHARE = 0.9
"""A source that on average keeps this share of a prompt from chunk to chunk appends rather than replaces."""
MOST_SOURCES = 1_000
"""Sources that are remembered; their names come from outside."""


class _Habits(NamedTuple):
    """Means over a source's chunks but the first of each stream."""

    gap_s: float
    """Seconds since the chunk before."""
    kept_share: float
    """Share of the previous prompt that the chunk keeps at its front: all if it appends, little if it replaces."""


class ChunkForecast:
    """A stream is expected to go on after its source's mean gap. One that is late is expected to stay away for as long
    again as it has been away: gaps have long tails. What the retriever itself expects counts more."""

    def __init__(self) -> None:
        self._habits: dict[str, _Habits] = {}

    def observe(self, source_name: str, gap_s: float, kept_share: float) -> None:
        """Told of each chunk but the first of a stream."""
        known, new = self._habits.get(source_name), _Habits(gap_s, kept_share)
        if known is not None:
            self._habits[source_name] = _Habits(*(k + WEIGHT * (n - k) for k, n in zip(known, new, strict=True)))
        elif len(self._habits) < MOST_SOURCES:
            self._habits[source_name] = new

    def expected_s(self, request: RequestView, now_s: float) -> float:
        """Return the time at which `request` should need its KV again: its next chunk, or the end of its prompt."""
        if request.expected_complete_s is not None and request.expected_complete_s > now_s:
            return request.expected_complete_s
        habits = self._habits.get(request.source_name)
        expected_s = request.last_chunk_s + (habits.gap_s if habits else 0.0)
        return expected_s if expected_s > now_s else 2 * now_s - request.last_chunk_s

    def replaced_every_s(self, source_name: str) -> float:
        """Return the mean seconds in which `source_name` replaces a whole prompt: infinity if it appends, or is new."""
        habits = self._habits.get(source_name)
        is_sure = habits is None or habits.kept_share >= SURE_SHARE
        return math.inf if habits is None or is_sure else habits.gap_s / (1 - habits.kept_share)
