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
MODEL_OPERATIONS = ("chat", "text_completion", "generate_content")  # in OpenTelemetry's conventions
HELP = 'give a trace, JSON lines with "query", "event" and "seconds", OpenTelemetry spans, or a CSV with three columns'

QueryId = Annotated[str, Field(min_length=1, max_length=1_000)]
ClockTime = Annotated[float, Field(ge=0, lt=1e11)]  # on any clock that the whole log shares
Sizes = Annotated[tuple[Annotated[int, Field(ge=1, lt=MAX_COUNT)], ...], Field(max_length=10_000)] | None
"""Length of each chunk; None for one chunk of usual length."""


class LogLine(BaseModel):
    """An event of a query: its question, chunks that were retrieved, or the end of its retrieval."""

    query: QueryId
    event: Literal["question", "chunks", "end"]
    seconds: ClockTime
    tokens: Sizes = None


class TraceSpan(BaseModel):
    """A span of OpenTelemetry, with the lengths of its documents. Its trace is the query."""

    query: QueryId
    id: str
    parent_id: str
    kind: str
    seconds: ClockTime
    end_s: ClockTime
    tokens: Sizes


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
    if first.strip() == b"{":  # one value on several lines
        texts = [b"".join(texts)]
    by_query: dict[str, list[LogLine | TraceSpan]] = {}
    for number, text in enumerate(texts, start=1):
        try:
            for line in _events(text.decode(errors="replace").strip(), is_first=number == 1):
                by_query.setdefault(line.query, []).append(line)
        except ValidationError as error:
            raise TraceError(f"{path}, line {number}: {LineError(error, is_tagged=False)}; {HELP}") from error
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, csv.Error) as error:
            raise TraceError(f"{path}, line {number}: it is no event of a log ({error!r:.200}); {HELP}") from error
    start_s = min((line.seconds for line in chain(*by_query.values())), default=0.0)
    queries = [query for each in by_query.items() if (query := _query(*each, start_s, usual_tokens))]
    if not queries:
        raise TraceError(f"{path} has no query with chunks; {HELP}")
    queries.sort(key=lambda query: query.arrival_s)
    return Trace(tuple(queries), {"made_from": "a log", "num_without_chunks": len(by_query) - len(queries)})


def _query(query_id: str, events: list[LogLine | TraceSpan], start_s: float, usual_tokens: int) -> TracedQuery | None:
    """Return a query from its question, or first line, to its end, or last line; None without chunks."""
    lines = [*(event for event in events if isinstance(event, LogLine)), *_lines_of(events)]
    lines.sort(key=lambda line: (line.seconds, line.event == "end"))
    first = next((place for place, line in enumerate(lines) if line.event == "chunks"), None)
    if first is None:
        return None
    begin_s = next((line.seconds for line in lines if line.event == "question"), lines[0].seconds)
    # A model may start before retrieval, such as to rewrite the question.
    last = next((place for place, line in enumerate(lines) if line.event == "end" and place > first), len(lines) - 1)
    chunks: list[TracedAppend] = []
    for line in lines[first : last + 1]:
        sizes = (usual_tokens,) if line.tokens is None else line.tokens
        for size in sizes if line.event == "chunks" else ():
            chunk = TracedChunk(f"{query_id} {len(chunks)}", size)
            chunks.append(TracedAppend(max(line.seconds - begin_s, 0.0), chunk))
    end_s = max(lines[last].seconds - begin_s, 0.0)
    return TracedQuery(query_id, begin_s - start_s, "", tuple(chunks), end_s) if chunks else None


def _lines_of(events: list[LogLine | TraceSpan]) -> Iterator[LogLine]:
    """Yield the events of a trace's spans; none without a retriever.

    The question is at the first span, and documents at the end of their retriever. The end is at the first start of
    the model after all documents, or at the last of these.
    """
    spans = [event for event in events if isinstance(event, TraceSpan)]
    retrievers = {span.id: span for span in spans if span.kind == "RETRIEVER"}
    # A retriever returns what the retrievers in it found.
    outer = [span for span in retrievers.values() if span.parent_id not in retrievers]
    if outer:
        query, end_s = outer[0].query, max(span.end_s for span in outer)
        yield LogLine(query=query, event="question", seconds=min(span.seconds for span in spans))
        for span in outer:
            yield LogLine(query=query, event="chunks", seconds=span.end_s, tokens=span.tokens)
        starts = (span.seconds for span in spans if span.kind == "LLM" and span.seconds >= end_s)
        yield LogLine(query=query, event="end", seconds=min(starts, default=end_s))


def _events(text: str, *, is_first: bool) -> Iterator[LogLine | TraceSpan]:
    """Yield the events in a line: a JSON object, spans, or a row of a CSV, whose first row may be a heading.

    Raises ValidationError, or what wrong values raise.
    """
    if text.startswith("{"):
        value = parse_json(text)
        yield from _spans(value) if "resourceSpans" in value else [LogLine.model_validate(value)]
    elif text and not (is_first and text.lower().endswith("seconds")):
        query, event, seconds = next(csv.reader([text], strict=True))
        name, colon, tokens = event.strip().partition(":")
        sizes = (tokens,) if colon else None
        name = "chunks" if name == "chunk" else name
        yield LogLine.model_validate({"query": query, "event": name, "seconds": seconds, "tokens": sizes})


def _spans(value: Mapping[str, Any]) -> Iterator[TraceSpan]:
    """Yield the spans in OTLP's JSON. Their kind is OpenInference's, or else follows from the name or the operation."""
    scopes = (scope for each in value["resourceSpans"] for scope in each.get("scopeSpans", ()))
    for span in (span for scope in scopes for span in scope.get("spans", ())):
        start_s, end_s = (int(span[f"{name}TimeUnixNano"]) / 1e9 for name in ("start", "end"))
        attributes = {each["key"]: each.get("value", {}) for each in span.get("attributes", ())}
        texts = {name: str(next(iter(each.values()), "")) for name, each in attributes.items()}
        usual = "LLM" if texts.get("gen_ai.operation.name") in MODEL_OPERATIONS else ""
        usual = "RETRIEVER" if "retriev" in span.get("name", "").lower() else usual
        kind = texts.get("openinference.span.kind") or usual
        documents = [text for name, text in texts.items() if name.endswith(".document.content")]
        tokens = [max(len(text) // CHARS_PER_TOKEN, 1) for text in documents] or None
        ids = {"query": span["traceId"], "id": span["spanId"], "parent_id": span.get("parentSpanId") or ""}
        yield TraceSpan.model_validate({**ids, "kind": kind, "seconds": start_s, "end_s": end_s, "tokens": tokens})
