"""A recorded retrieval as a source."""

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
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedEvent, TracedQuery, TracedSkip, stretched


class ReplaySource:
    """Yields for each query what a trace recorded for it, at the same times, and ends when that ended.

    trace: a trace, or the path of one. It must have been recorded with texts.
    delay: multiplies every time: the first chunk's, the gaps, the end's, and those of hints.
    on_missing: for a query that the trace does not have. "error" raises; "next" takes the recorded queries in turn.

    A query that was recorded several times is replayed in turn. A retrieval that failed fails again. One that was
    cancelled ends where it was. One that was cut short says so at its end.

    Its `name` has the trace's file, so that schedulers tell the retrievers of several traces apart.

    :raises ConfigurationError: values that cannot work, or a trace without texts.
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
        """Yield the recorded events of `query`.

        :raises SourceError: the trace does not have this query, or its retrieval failed.
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
    for event in query.events:
        for chunk in (event.chunk,) if isinstance(event, TracedAppend) else event.chunks:
            if chunk.text is None:
                raise ConfigurationError(
                    f"ReplaySource: the trace has no text for chunk {chunk.key!r} of query {query.query_id!r}, only "
                    'its length: record with text="full", or replay it with `streamrag bench`, which needs no texts'
                )


def _source_event(event: TracedEvent | TracedSkip) -> SourceEvent:
    match event:
        case TracedSkip():
            return Skipped(event.uri, event.reason)
        case TracedAppend():
            return Append(_chunk(event.chunk), event.hint)
    return Update(tuple(map(_chunk, event.chunks)), event.hint)


def _chunk(chunk: TracedChunk) -> Chunk:
    assert chunk.text is not None
    return Chunk(chunk.text, chunk.uri, chunk.title, chunk.passage, chunk.score)
