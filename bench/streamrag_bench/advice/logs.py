"""Readers of logs of retrieval, as traces: a trace of ours, JSON lines, OpenTelemetry spans, or a CSV with 3 columns.

Of a text only the length is used: four characters count as a token.
"""

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from streamrag.errors import TraceError
from streamrag.support.bounded_reading import parse_json
from streamrag.support.validation import Count, validated
from streamrag.trace.events import LineError
from streamrag.trace.files import LineReader
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery
from streamrag_bench.advice.events import LogLine
from streamrag_bench.advice.spans import BrokenSpan, TraceSpan, has_spans, lines_of, protobuf_values, spans_in
from streamrag_bench.advice.table import EventTable

HELP = 'give a trace, JSON lines with "query", "event" and "seconds", OpenTelemetry spans, or a CSV with three columns'

_SPACE = re.compile(r"[\s\ufeff]*")
_VALUE = re.compile(r'^[\[{]\s*(?:["{\[]|$)', re.MULTILINE)
"""The beginning of a line at which an object or a list of JSON begins, and none of a CSV."""
MAX_LINES_BEFORE = 100  # lines in front of the first JSON or span, such as the rest of one that was cut off

Event = LogLine | TraceSpan | BrokenSpan


@validated
def read_log(path: Path, usual_tokens: Count) -> Trace:
    """Read a log of any of the four kinds, which its content tells apart.

    The trace's provenance has the numbers of queries without chunks and of broken spans, and a table's separator.

    usual_tokens: length of a chunk whose length the log does not have.

    :raises TraceError: the file cannot be read, is of no known kind, or is broken; the message names the line.
    """
    log = _Log(path)
    if '"streamrag-trace"' in log.first_line:
        return read_trace(path)
    by_query: dict[str, list[LogLine | TraceSpan]] = {}
    for event in log.events():
        by_query.setdefault(event.query, []).append(event)
    start_s = min((line.seconds for line in chain(*by_query.values())), default=0.0)
    queries = [query for each in by_query.items() if (query := _query(*each, start_s, usual_tokens))]
    if not queries:
        broken = log.notes.get("first_broken_span")
        raise TraceError(
            f"{path} has no query with chunks; " + (f"spans are broken, the first in {broken}; " * bool(broken)) + HELP
        )
    queries.sort(key=lambda query: query.arrival_s)
    provenance = {"made_from": "a log", "num_without_chunks": len(by_query) - len(queries)}
    return Trace(tuple(queries), provenance | log.notes)


class _Log:
    """A file of events, read in the form that its first line tells."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head = next(LineReader(path).lines(), b"")
        lines = [text.strip("\ufeff \t\r\n") for text in islice(self._texts("replace"), MAX_LINES_BEFORE)]
        self.first_line = next(chain(filter(_VALUE.match, lines), filter(None, lines)), "")
        self.notes: dict[str, Any] = {}
        """Facts about how the file was read, for the provenance."""
        self._num_spans = 0

    def events(self) -> Iterator[LogLine | TraceSpan]:
        """Yield the events. Raises TraceError, which names the first broken line, unless there are spans in others."""
        wrong: TraceError | None = None
        for number, make in self._makers():
            try:
                for event in make:
                    self._num_spans += not isinstance(event, LogLine)
                    if isinstance(event, BrokenSpan):
                        self._leave_out(f"line {number}: it is no event of a log ({event.reason})")
                    else:
                        yield event
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError, csv.Error) as error:
                what = _problem(error)
                self._leave_out(f"line {number}: {what}")
                wrong = wrong or TraceError(f"{self._path}, line {number}: {what}{self._separator()}; {HELP}")
                if not self._num_spans and self.notes["num_broken_spans"] > MAX_LINES_BEFORE:
                    break
        if wrong and not self._num_spans:
            raise wrong

    def _makers(self) -> Iterator[tuple[int, Iterable[Event]]]:
        """Yield the number of each line, or of the first line of each value, and an iterable of its events."""
        if self._head[:1] in (b"\n", b"\0") and (values := protobuf_values(b"".join(LineReader(self._path).lines()))):
            yield from ((1, spans_in(value)) for value in values)
            return
        is_json = self.first_line[:1] in ("{", "[")
        lines = enumerate(self._texts("replace" if is_json else "backslashreplace"), start=1)
        filled = ((number, line) for number, text in lines if (line := text.strip("\ufeff \r\n")).strip())
        if is_json and not _is_value(self.first_line):
            yield from _values("\n".join(self._texts("replace")))
        elif is_json:
            yield from ((number, _json_events(text)) for number, text in filled)
        else:
            yield from self._rows(filled)

    def _rows(self, lines: Iterator[tuple[int, str]]) -> Iterator[tuple[int, Iterable[Event]]]:
        table: EventTable | None = None
        for number, row in lines:
            if table is None:
                table = EventTable(row)
                self.notes["separator"] = table.separator
            while table.continues(row) and (following := next(lines, None)):
                row = f"{row}\n{following[1]}"
            yield number, table.events(row)

    def _texts(self, errors: str) -> Iterator[str]:
        """Yield the lines as text, in the encoding of the byte order mark, or UTF-8. They end with LF, CR or CRLF."""
        is_wide = self._head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
        decoder = codecs.getincrementaldecoder("utf-16" if is_wide else "utf-8-sig")(errors)
        lines = io.IncrementalNewlineDecoder(decoder, translate=True)
        rest = ""
        for block in LineReader(self._path).lines():
            *complete, rest = (rest + lines.decode(block)).split("\n")
            yield from complete
        yield rest + lines.decode(b"", final=True)

    def _leave_out(self, reason: str) -> None:
        self.notes["num_broken_spans"] = self.notes.get("num_broken_spans", 0) + 1
        self.notes.setdefault("first_broken_span", reason)

    def _separator(self) -> str:
        """Return a note on the separator, if it is not a comma."""
        separator = self.notes.get("separator", ",")
        return "" if separator == "," else f" (columns are separated by {separator!r})"


def _problem(error: Exception) -> str:
    """Return what is wrong with a line, in words."""
    if isinstance(error, ValidationError):
        return str(LineError(error, is_tagged=False))
    return f"it is no event of a log ({error!r:.200})"


def _is_value(line: str) -> bool:
    try:
        parse_json(line, is_strict=False)
    except ValueError:
        return False
    return True


def _values(text: str) -> Iterator[tuple[int, Iterable[Event]]]:
    """Yield the JSON values in a text, each on several lines, as the number of its first line and its events. A value
    that is broken, or other text, ends where a line begins as another value does."""
    decoder, end, number = json.JSONDecoder(), 0, 1
    while (begin := _SPACE.match(text, end).end()) < len(text):  # type: ignore[union-attr]
        number += text.count("\n", end, begin)
        try:
            _, end = decoder.raw_decode(text, begin)
        except (RecursionError, ValueError) as error:  # then parsing it says why
            following = _VALUE.search(text, max(begin + 1, getattr(error, "pos", len(text))))
            end = following.start() if following else len(text)
        yield number, _json_events(text[begin:end])
        number += text.count("\n", begin, end)


def _json_events(text: str) -> Iterator[Event]:
    """Yield the events of a JSON value: spans, an event, or a list of events. Raises what wrong values raise."""
    value = parse_json(text, is_strict=False)
    for each in value if isinstance(value, list) else [value]:
        yield from spans_in(each) if has_spans(each) else [LogLine.model_validate(each)]


def _query(query_id: str, events: list[LogLine | TraceSpan], start_s: float, usual_tokens: int) -> TracedQuery | None:
    """Return a query from its question, or first line, to its end, or last line; None without chunks."""
    spans = dict.fromkeys(event for event in events if isinstance(event, TraceSpan))  # some are exported twice
    lines = [*(event for event in events if isinstance(event, LogLine)), *lines_of(list(spans))]
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
            chunk = TracedChunk(f"{query_id} {len(chunks)}", size or usual_tokens)
            chunks.append(TracedAppend(max(line.seconds - begin_s, 0.0), chunk))
    end_s = max(lines[last].seconds - begin_s, 0.0)
    return TracedQuery(query_id, begin_s - start_s, "", tuple(chunks), end_s) if chunks else None
