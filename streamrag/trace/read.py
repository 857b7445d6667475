"""Trace files become traces."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from streamrag.core import Hint
from streamrag.errors import TraceError
from streamrag.trace.files import LineReader
from streamrag.trace.lines import (
    MAX_SECONDS,
    OF_THE_READER,
    AppendLine,
    ChunkLine,
    EndLine,
    Header,
    HintFields,
    Line,
    NamedChunks,
    QueryLine,
    SkippedLine,
    UpdateLine,
    decode,
)
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
    """The queries of a trace file, in order of arrival.

    Sessions follow each other without a pause. What a program that was killed left behind is passed over: a line that
    is not whole at the end of the file, and queries whose end is not there; `provenance["notes"]` says so then. Keys of
    chunks are those of the file. `provenance` has the first session's, with "tokenizer", "text" and "num_sessions".

    :raises TraceError: the file is no trace, one of a newer version, or broken; the message names the line.
    :raises MissingDependencyError: it is a .zst file, and zstandard is not installed.
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


def numbered_lines(path: Path, reader: LineReader) -> Iterator[tuple[int, Line]]:
    """The decoded lines, from number 1. The first is a header, or it raises.

    :raises TraceError: as `read_trace`.
    """
    is_first = True
    for number, data in enumerate(reader, start=1):
        try:
            line = decode(data)
        except TraceError as error:
            if is_first:
                raise TraceError(f"{path} is not a trace of streamrag: in line 1, {error}") from error
            raise TraceError(f"{path}, line {number}: {error}") from error
        if is_first and not isinstance(line, Header):
            raise TraceError(f'{path} is not a trace of streamrag: line 1 has no "format"')
        is_first = False
        yield number, line
    if is_first:
        raise TraceError(f"{path} holds no trace: there is no whole line in it")


@dataclass(slots=True)
class _Unfinished:
    arrival_s: float
    text: str
    events: list[TracedEvent] = field(default_factory=list)
    skipped: list[TracedSkip] = field(default_factory=list)
    last_s: float = 0.0


class _Assembly:
    """Puts lines together."""

    def __init__(self) -> None:
        self._headers: list[Header] = []
        self._chunks: dict[str, TracedChunk] = {}
        self._unfinished: dict[str, _Unfinished] = {}
        self._num_lost = 0
        self._named = NamedChunks()
        self._queries: dict[str, TracedQuery] = {}
        self._session_s = 0.0  # where the session begins, in the time of the trace

    def add(self, line: Line) -> None:
        match line:
            case Header():
                self._begin_session(line)
            case ChunkLine():
                self._chunks[line.key] = TracedChunk(**line.model_dump(exclude={"kind"}))
            case QueryLine():
                if line.id in self._queries or line.id in self._unfinished:
                    raise TraceError(f"query {line.id!r} was there before")
                self._unfinished[line.id] = _Unfinished(self._session_s + line.arrival_s, line.text)
            case AppendLine():
                chunk = self._chunk(line.key, line.score)
                self._under_way(line.query, line.at_s).events.append(TracedAppend(line.at_s, chunk, _hint(line.hint)))
            case UpdateLine():
                self._update(line)
            case SkippedLine():
                skip = TracedSkip(line.at_s, line.source, line.reason)
                self._under_way(line.query, line.at_s).skipped.append(skip)
            case EndLine():
                self._end(line)

    def finish(self, is_torn: bool) -> Trace:
        notes = []
        if is_torn:
            notes.append("the file was torn: what came after its last whole line is left out")
        num_lost = self._num_lost + len(self._unfinished)
        if num_lost:
            notes.append(f"{num_lost} queries without an end are left out")
        first = self._headers[0]
        provenance: Mapping[str, Any] = {
            **{name: value for name, value in first.provenance.items() if name not in OF_THE_READER},
            "tokenizer": first.tokenizer,
            "text": first.text,
            "num_sessions": len(self._headers),
            **({"notes": notes} if notes else {}),
        }
        return Trace(tuple(sorted(self._queries.values(), key=lambda query: query.arrival_s)), provenance)

    def _begin_session(self, header: Header) -> None:
        self._headers.append(header)
        self._chunks.clear()
        self._num_lost += len(self._unfinished)
        self._unfinished.clear()
        self._session_s = max((query.arrival_s + query.end_s for query in self._queries.values()), default=0.0)
        if self._session_s > MAX_SECONDS:
            raise TraceError(f"its sessions last {self._session_s:.3g} s together, which is more than {MAX_SECONDS:g}")

    def _update(self, line: UpdateLine) -> None:
        scores = line.scores or (None,) * len(line.keys)
        self._named.add(len(line.keys))
        if len(scores) != len(line.keys):
            raise TraceError(f"{len(line.keys)} keys and {len(scores)} scores")
        chunks = tuple(self._chunk(key, score) for key, score in zip(line.keys, scores, strict=True))
        self._under_way(line.query, line.at_s).events.append(TracedUpdate(line.at_s, chunks, _hint(line.hint)))

    def _end(self, line: EndLine) -> None:
        query = self._under_way(line.query, line.end_s)
        del self._unfinished[line.query]
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

    def _under_way(self, query_id: str, at_s: float) -> _Unfinished:
        query = self._unfinished.get(query_id)
        if query is None:
            state = "has ended" if query_id in self._queries else "has not begun"
            raise TraceError(f"query {query_id!r} {state}")
        if at_s < query.last_s:
            raise TraceError(f"{at_s} s is before the query's last event, at {query.last_s} s")
        query.last_s = at_s
        return query

    def _chunk(self, key: str, score: float | None) -> TracedChunk:
        chunk = self._chunks.get(key)
        if chunk is None:
            raise TraceError(f"chunk {key!r} has not been defined before it in this session")
        return chunk if score is None else replace(chunk, score=score)


def _hint(fields: HintFields | None) -> Hint | None:
    return None if fields is None else Hint(fields.num_chunks, fields.end_s)
