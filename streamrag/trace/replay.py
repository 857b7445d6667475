"""A source that replays recorded retrieval."""

import asyncio
import os
from collections import Counter
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Literal

from streamrag.core import Append, Chunk, CutShort, Skipped, SourceEvent, Update
from streamrag.errors import ConfigurationError, SourceError
from streamrag.support.clock import Clock, monotonic
from streamrag.support.validation import validated
from streamrag.trace.read import read_trace
from streamrag.trace.values import (
    Trace,
    TracedAppend,
    TracedChunk,
    TracedEvent,
    TracedQuery,
    TracedSkip,
    chunks_of,
    stretched,
)


class ReplaySource:
    """A source that yields a query's recorded events at their recorded times.

    trace: a trace or its path, recorded with texts.
    delay: factor of all times, including the first chunk's, the end's and those of hints.
    on_missing: for a query that is not in the trace, "error" raises, and "next" replays the recorded queries in turn.

    Several recordings of one query are replayed in turn. A failed retrieval fails again, a cancelled one ends at the
    same point, and one that was cut short ends with a `CutShort`.

    The source's `name` contains the trace's file name, so that schedulers can tell several traces apart.

    :raises ConfigurationError: a value is invalid, or the trace has no texts.
    """

    @validated
    def __init__(
        self,
        trace: Trace | str | os.PathLike[str],
        *,
        delay: float = 1.0,
        on_missing: Literal["error", "next"] = "error",
        clock: Clock = monotonic,
    ) -> None:
        self.name = type(self).__name__ if isinstance(trace, Trace) else f"{type(self).__name__}({Path(trace).name})"
        self._queries = stretched(trace if isinstance(trace, Trace) else read_trace(trace), delay).queries
        if not self._queries:
            raise ConfigurationError("ReplaySource: the trace has no queries")
        for query in self._queries:
            _check_texts(query)
        self._by_text: dict[str, list[TracedQuery]] = {}
        for query in self._queries:
            self._by_text.setdefault(query.text, []).append(query)
        self._num_replayed: Counter[str | None] = Counter()
        self._takes_next = on_missing == "next"
        self._clock = clock

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the events of `query`, skipped documents and any `CutShort` among them, at their recorded times.

        :raises SourceError: the query is not in the trace; or, at its end, because its recorded retrieval failed.
        """
        began_s = self._clock()
        recorded = self._find(query)
        for event in sorted((*recorded.events, *recorded.skipped), key=lambda event: event.at_s):
            await asyncio.sleep(began_s + event.at_s - self._clock())
            yield _source_event(event)
        await asyncio.sleep(began_s + recorded.end_s - self._clock())
        if recorded.cut_short is not None:
            yield CutShort(recorded.cut_short)
        if recorded.outcome == "failed":
            raise SourceError(f"the recorded retrieval failed: {recorded.error or 'the trace does not say why'}")

    def _find(self, query: str) -> TracedQuery:
        """Return the query's next recording, in turn. Without one, raise SourceError, or return the trace's next."""
        same = self._by_text.get(query)
        if same is None and not self._takes_next:
            raise SourceError(
                f"the trace has no query {query!r}: ask one of its {len(self._by_text)}, or use "
                'ReplaySource(..., on_missing="next")'
            )
        queries = same or self._queries
        name = query if same else None
        recorded = queries[self._num_replayed[name] % len(queries)]
        self._num_replayed[name] += 1
        return recorded


def _check_texts(query: TracedQuery) -> None:
    """Raise ConfigurationError if a chunk was recorded without its text."""
    for event in query.events:
        for chunk in chunks_of(event):
            if chunk.text is None:
                raise ConfigurationError(
                    f"ReplaySource: the trace has no text for chunk {chunk.key!r} of query {query.query_id!r}, only "
                    'its length: record with text="full", or use `streamrag bench`, which needs no texts'
                )


def _source_event(event: TracedEvent | TracedSkip) -> SourceEvent:
    """Return a recorded event, or a recorded skipped document, as a source's event."""
    match event:
        case TracedSkip():
            return Skipped(event.uri, event.reason)
        case TracedAppend():
            return Append(_chunk(event.chunk), event.hint)
    return Update(tuple(map(_chunk, event.chunks)), event.hint)


def _chunk(chunk: TracedChunk) -> Chunk:
    assert chunk.text is not None
    return Chunk(chunk.text, chunk.uri, chunk.title, chunk.passage, chunk.score)
