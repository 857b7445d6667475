"""Forecast when a stream's next chunk arrives and whether it replaces the prompt, from the source's past chunks."""

import math
from typing import NamedTuple

from streamrag.engine.request import RequestView

WEIGHT = 0.05
"""Weight of the newest chunk in the running means."""
SURE_SHARE = 0.9
"""A source whose chunks keep at least this share of the prompt on average counts as appending."""
MOST_SOURCES = 1_000
"""Bound on the sources that are remembered, because clients choose their names."""


class _Habits(NamedTuple):
    """Running means over a source's chunks, without the first chunk of each stream."""

    gap_s: float
    """Seconds since the previous chunk."""
    kept_share: float
    """Share of the previous prompt that the chunk keeps as its prefix: 1 if it appends, near 0 if it replaces."""


class ChunkForecast:
    """A forecast of each stream's next chunk: after its source's mean gap, or at the time that its retriever expects.

    A late chunk is expected to take as long again as has passed since the last one, because gaps have long tails.
    """

    def __init__(self) -> None:
        self._habits: dict[str, _Habits] = {}

    def observe(self, source_name: str, gap_s: float, kept_share: float) -> None:
        """Update a source's means by a chunk, not the first of its stream; ignore new sources over `MOST_SOURCES`."""
        mean, new = self._habits.get(source_name), _Habits(gap_s, kept_share)
        if mean is not None:
            self._habits[source_name] = _Habits(*(m + WEIGHT * (n - m) for m, n in zip(mean, new, strict=True)))
        elif len(self._habits) < MOST_SOURCES:
            self._habits[source_name] = new

    def expected_s(self, request: RequestView, now_s: float) -> float:
        """Return when `request` is expected to need its KV.

        That is when its retriever expects to end, if this is still ahead; else its source's mean gap after the last
        chunk; if that has passed, as long from now as it has waited since the last chunk.
        """
        if request.expected_complete_s is not None and request.expected_complete_s > now_s:
            return request.expected_complete_s
        habits = self._habits.get(request.source_name)
        expected_s = request.last_chunk_s + (habits.gap_s if habits else 0.0)
        return expected_s if expected_s > now_s else 2 * now_s - request.last_chunk_s

    def replaced_every_s(self, source_name: str) -> float:
        """Return the mean seconds in which a source replaces one prompt's worth of tokens; infinity if the source is
        new, or if it appends: keeps `SURE_SHARE` of its prompts or more, on average."""
        habits = self._habits.get(source_name)
        if habits is None or habits.kept_share >= SURE_SHARE:
            return math.inf
        return habits.gap_s / (1 - habits.kept_share)
