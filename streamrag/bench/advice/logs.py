"""Readers of logs of retrieval, as traces: a trace of ours, JSON lines, OpenTelemetry spans, or a CSV with 3 columns.

Of a text only the length is used: four characters count as a token.
"""

import csv
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, ValidationError

from streamrag.errors import TraceError
from streamrag.support.bounded_reading import parse_json
from streamrag.support.validation import Count, validated
from streamrag.trace.events import MAX_COUNT, LineError
from streamrag.trace.files import LineReader
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery

CHARS_PER_TOKEN = 4
HELP = 'give a trace, JSON lines with "query", "event" and "seconds", OpenTelemetry spans, or a CSV with three columns'


class LogLine(BaseModel):
    """An event of a query: its question, chunks that were retrieved, or the end of its retrieval."""

    query: Annotated[str, Field(min_length=1, max_length=1_000)]
    event: Literal["question", "chunks", "end"]
    seconds: Annotated[float, Field(ge=0, lt=1e11)]  # on any clock that all lines share
    tokens: Annotated[tuple[Annotated[int, Field(ge=1, lt=MAX_COUNT)], ...], Field(max_length=10_000)] = ()
    """Length of each chunk; empty for one chunk of usual length."""


@validated
def read_log(path: Path, usual_tokens: Count) -> Trace:
    """Read a log of any of the four kinds, which its content tells apart.

    usual_tokens: length of a chunk whose length the log does not have.

    :raises TraceError: the file cannot be read, is of no known kind, or is broken; the message names the line.
    """
    first = next((line for line in LineReader(path).lines() if line.strip()), b"")
    if b'"streamrag-trace"' in first:
        return read_trace(path)
    texts: Iterable[bytes] = LineReader(path).lines()
    if first.strip() in (b"{", b"["):  # one value on several lines
        texts = [b"".join(texts)]
    by_query: dict[str, list[LogLine]] = {}
    for number, text in enumerate(texts, start=1):
        try:
            for line in _events(text.decode(errors="replace").strip(), is_first=number == 1):
                by_query.setdefault(line.query, []).append(line)
        except ValidationError as error:
            raise TraceError(f"{path}, line {number}: {LineError(error, is_tagged=False)}; {HELP}") from error
        except (AttributeError, IndexError, KeyError, TypeError, ValueError, csv.Error) as error:
            raise TraceError(f"{path}, line {number}: it is no event of a log ({error!r:.200}); {HELP}") from error
    start_s = min((line.seconds for line in chain(*by_query.values())), default=0.0)
    queries = [query for events in by_query.values() if (query := _query(events, start_s, usual_tokens))]
    if not queries:
        raise TraceError(f"{path} has no query with chunks; {HELP}")
    queries.sort(key=lambda query: query.arrival_s)
    return Trace(tuple(queries), {"made_from": "a log", "num_without_chunks": len(by_query) - len(queries)})


def _query(events: list[LogLine], start_s: float, usual_tokens: int) -> TracedQuery | None:
    """Return a query from its question, or first line, to its last line; None without chunks."""
    events.sort(key=lambda line: line.seconds)
    query_id = events[0].query
    begin_s = next((line.seconds for line in events if line.event == "question"), events[0].seconds)
    chunks: list[TracedAppend] = []
    for line in events:
        for size in (line.tokens or (usual_tokens,)) if line.event == "chunks" else ():
            chunk = TracedChunk(f"{query_id} {len(chunks)}", size)
            chunks.append(TracedAppend(max(line.seconds - begin_s, 0.0), chunk))
    end_s = max(events[-1].seconds - begin_s, 0.0)
    return TracedQuery(query_id, begin_s - start_s, "", tuple(chunks), end_s) if chunks else None


def _events(text: str, *, is_first: bool) -> Iterator[LogLine]:
    """Yield the events in a line: a JSON object, spans, or a row of a CSV, whose first row may be a heading.

    Raises ValidationError, or what wrong values raise.
    """
    if text.startswith("{"):
        value = parse_json(text)
        yield from _span_events(value) if "resourceSpans" in value else [LogLine.model_validate(value)]
    elif text and not (is_first and text.lower().endswith("seconds")):
        query, event, seconds = next(csv.reader([text], strict=True))
        name, colon, tokens = event.strip().partition(":")
        sizes = (tokens,) if colon else ()
        name = "chunks" if name == "chunk" else name
        yield LogLine.model_validate({"query": query, "event": name, "seconds": seconds, "tokens": sizes})


def _span_events(value: Mapping[str, Any]) -> Iterator[LogLine]:
    """Yield the events of spans in OTLP's JSON: each trace is a query, which begins with its first span.

    A span of retrieval brings its documents at its end.
    """
    for span in (span for each in value["resourceSpans"] for scope in each["scopeSpans"] for span in scope["spans"]):
        start_s, end_s = (int(span[f"{name}TimeUnixNano"]) / 1e9 for name in ("start", "end"))
        yield LogLine(query=span["traceId"], event="question", seconds=start_s)
        texts = {each["key"]: str(next(iter(each["value"].values()))) for each in span.get("attributes", ())}
        if texts.get("openinference.span.kind") == "RETRIEVER" or "retriev" in span["name"].lower():
            documents = [text for name, text in texts.items() if name.endswith(".document.content")]
            tokens = tuple(max(len(text) // CHARS_PER_TOKEN, 1) for text in documents)
            yield LogLine(query=span["traceId"], event="chunks", seconds=end_s, tokens=tokens)
