"""The reader of trace files."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streamrag.errors import TraceError
from streamrag.trace.events import MAX_SECONDS, to_hint
from streamrag.trace.file_schema import (
    READER_KEYS,
    AppendKeyLine,
    ChunkLine,
    EndLine,
    QueryLine,
    QuerySkippedLine,
    TraceHeader,
    TraceLine,
    UpdateKeysLine,
    decode,
)
from streamrag.trace.files import LineReader
from streamrag.trace.values import (
    Trace,
    TracedAppend,
    TracedChunk,
    TracedEvent,
    TracedQuery,
    TracedSkip,
    TracedUpdate,
)


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """Read the queries of a trace file, in order of arrival.

    Sessions follow each other without a pause. An incomplete last line and queries without an end, as after a killed
    program, are left out with a note in `provenance["notes"]`. `provenance` is that of the first session, with
    "tokenizer", "text" and "num_sessions".

    :raises TraceError: the file is not a trace, is damaged, or has another version; the message names the line.
    :raises MissingDependencyError: it is a .zst file, but zstandard is not installed.
    """
    path = Path(path)
    reader = LineReader(path)
    assembly = _Assembly()
    for number, line in numbered_lines(path, reader):
        try:
            assembly.add(line)
        except TraceError as error:
            raise TraceError(f"{path}, line {number}: {error}") from error
    return assembly.finish(reader.is_torn)


def numbered_lines(path: Path, reader: LineReader) -> Iterator[tuple[int, TraceLine]]:
    """Yield decoded lines with numbers from 1, a header first; raise TraceError for invalid lines, or without any."""
    is_first = True
    for number, data in enumerate(reader, start=1):
        try:
            line = decode(data)
        except TraceError as error:
            if is_first:
                raise TraceError(f"{path} is not a trace of streamrag: in line 1, {error}") from error
            raise TraceError(f"{path}, line {number}: {error}") from error
        if is_first and not isinstance(line, TraceHeader):
            raise TraceError(f'{path} is not a trace of streamrag: line 1 has no "format"')
        is_first = False
        yield number, line
    if is_first:
        raise TraceError(f"{path} is not a trace: it has no complete line")


@dataclass(slots=True)
class _OpenQuery:
    arrival_s: float
    text: str
    events: list[TracedEvent] = field(default_factory=list)
    skipped: list[TracedSkip] = field(default_factory=list)
    last_s: float = 0.0


class _Assembly:
    """A trace that is assembled line by line, session after session."""

    def __init__(self) -> None:
        self._headers: list[TraceHeader] = []
        self._chunks: dict[str, TracedChunk] = {}
        self._open: dict[str, _OpenQuery] = {}
        self._num_lost = 0
        self._queries: dict[str, TracedQuery] = {}
        self._session_s = 0.0  # start of the session on the trace's clock

    def add(self, line: TraceLine) -> None:
        """Begin a session, define a chunk, or begin, extend or end a query; raise TraceError if a line does not fit."""
        match line:
            case TraceHeader():
                self._begin_session(line)
            case ChunkLine():
                self._chunks[line.key] = TracedChunk(**line.model_dump(exclude={"kind"}))
            case QueryLine():
                if line.id in self._queries or line.id in self._open:
                    raise TraceError(f"query id {line.id!r} occurs twice")
                self._open[line.id] = _OpenQuery(self._session_s + line.arrival_s, line.text)
            case AppendKeyLine():
                chunk = self._chunk(line.key, line.score)
                self._open_query(line.query, line.at_s).events.append(
                    TracedAppend(line.at_s, chunk, to_hint(line.hint))
                )
            case UpdateKeysLine():
                self._update(line)
            case QuerySkippedLine():
                skip = TracedSkip(line.at_s, line.uri, line.reason)
                self._open_query(line.query, line.at_s).skipped.append(skip)
            case EndLine():
                self._end(line)

    def finish(self, is_torn: bool) -> Trace:
        """Return the trace by arrival, with the first session's provenance.

        Torn lines and queries without an end, also of earlier sessions, are left out, with notes in the provenance.
        """
        notes = []
        if is_torn:
            notes.append("the file was torn: an incomplete line at its end is left out")
        num_lost = self._num_lost + len(self._open)
        if num_lost:
            notes.append(f"{num_lost} queries without an end are left out")
        first = self._headers[0]
        provenance: Mapping[str, Any] = {
            **{name: value for name, value in first.provenance.items() if name not in READER_KEYS},
            "tokenizer": first.tokenizer,
            "text": first.text,
            "num_sessions": len(self._headers),
            **({"notes": notes} if notes else {}),
        }
        return Trace(tuple(sorted(self._queries.values(), key=lambda query: query.arrival_s)), provenance)

    def _begin_session(self, header: TraceHeader) -> None:
        """Begin a session at the last retrieval's end; drop old chunks and open queries. Raises past `MAX_SECONDS`."""
        self._headers.append(header)
        self._chunks.clear()
        self._num_lost += len(self._open)
        self._open.clear()
        self._session_s = max((query.arrival_s + query.end_s for query in self._queries.values()), default=0.0)
        if self._session_s > MAX_SECONDS:
            raise TraceError(f"its sessions last {self._session_s:.3g} s in total; the limit is {MAX_SECONDS:g} s")

    def _update(self, line: UpdateKeysLine) -> None:
        """Add an update to its query; raise TraceError for unequal numbers of keys and scores."""
        scores = line.scores or (None,) * len(line.keys)
        if len(scores) != len(line.keys):
            raise TraceError(f"{len(line.keys)} keys and {len(scores)} scores")
        chunks = tuple(self._chunk(key, score) for key, score in zip(line.keys, scores, strict=True))
        self._open_query(line.query, line.at_s).events.append(TracedUpdate(line.at_s, chunks, to_hint(line.hint)))

    def _end(self, line: EndLine) -> None:
        """Turn an open query into one of the trace, with the line's end and outcome. Raises as `_open_query`."""
        query = self._open_query(line.query, line.end_s)
        del self._open[line.query]
        self._queries[line.query] = TracedQuery(
            query_id=line.query,
            arrival_s=query.arrival_s,
            text=query.text,
            events=tuple(query.events),
            end_s=line.end_s,
            num_output_tokens=line.num_output_tokens,
            skipped=tuple(query.skipped),
            outcome=line.outcome,
            error=line.error or "",
            cut_short=line.cut_short,
        )

    def _open_query(self, query_id: str, at_s: float) -> _OpenQuery:
        """Return an open query and set its last time; raise TraceError if it is not open, or `at_s` is before that."""
        query = self._open.get(query_id)
        if query is None:
            state = "has ended" if query_id in self._queries else "has not begun"
            raise TraceError(f"query {query_id!r} {state}")
        if at_s < query.last_s:
            raise TraceError(f"{at_s} s is before the query's last event, at {query.last_s} s")
        query.last_s = at_s
        return query

    def _chunk(self, key: str, score: float | None) -> TracedChunk:
        """Return the chunk that this session defined as `key`, with `score`, or its own score if that is None. Raises
        TraceError if the session has not defined it."""
        chunk = self._chunks.get(key)
        if chunk is None:
            raise TraceError(f"chunk {key!r} is used before its definition in this session")
        return chunk if score is None else replace(chunk, score=score)
