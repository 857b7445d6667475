"""The schema of a trace file's lines, with encoding and decoding; see docs/traces.md."""

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from streamrag.errors import TraceError
from streamrag.support.bounded_reading import MAX_LINE_BYTES, parse_json
from streamrag.trace.events import (
    MAX_COUNT,
    Fields,
    FiniteScore,
    HintFields,
    LineCodec,
    LineError,
    Seconds,
    SkippedFields,
    TraceCount,
)
from streamrag.trace.values import RetrievalOutcome

VERSION = 1

READER_KEYS = ("tokenizer", "text", "num_sessions", "notes")
"""Keys of a trace's provenance that the reader sets; values in the file are ignored."""

TextMode: TypeAlias = Literal["full", "hash"]
"""Record the texts of chunks ("full"), or only hashes and lengths ("hash")."""


class TraceHeader(Fields):
    """The first line of a recording session. Appending to a file begins another session."""

    format: Literal["streamrag-trace"] = "streamrag-trace"
    version: int = VERSION
    text: TextMode = "full"
    tokenizer: str | None = None
    """Name of the tokenizer that counted the tokens."""
    provenance: dict[str, Any] = Field(default_factory=dict)


class QueryLine(Fields):
    kind: Literal["query"] = "query"
    id: str
    arrival_s: Seconds
    """Seconds since the start of the session."""
    text: str


class ChunkLine(Fields):
    """The definition of a chunk, which later lines of the session refer to by its key."""

    kind: Literal["chunk"] = "chunk"
    key: str
    num_tokens: TraceCount
    num_chars: TraceCount | None = None
    text: str | None = None
    uri: str = ""
    title: str = ""
    passage: Annotated[int, Field(gt=-MAX_COUNT, lt=MAX_COUNT)] = 0


class QueryEventLine(Fields):
    """A base class of a query's events; `at_s` is relative to the query's arrival."""

    kind: str
    query: str
    at_s: Seconds


class AppendKeyLine(QueryEventLine):
    """An append to a query's context."""

    kind: Literal["append"] = "append"
    key: str
    score: FiniteScore | None = None
    hint: HintFields | None = None


class UpdateKeysLine(QueryEventLine):
    """An update of a query's context, in prompt order."""

    kind: Literal["update"] = "update"
    keys: tuple[str, ...]
    scores: tuple[FiniteScore | None, ...] | None = None
    hint: HintFields | None = None


class QuerySkippedLine(SkippedFields, QueryEventLine):
    """A place that a query's retrieval could not use."""

    kind: Literal["skipped"] = "skipped"


class EndLine(Fields):
    """The end of a query's retrieval."""

    kind: Literal["end"] = "end"
    query: str
    end_s: Seconds
    outcome: RetrievalOutcome
    error: str | None = None
    cut_short: str | None = None
    """Reason why retrieval ended early without a failure."""
    num_output_tokens: TraceCount | None = None


KindLine: TypeAlias = QueryLine | ChunkLine | AppendKeyLine | UpdateKeysLine | QuerySkippedLine | EndLine
TraceLine: TypeAlias = TraceHeader | KindLine

_HEADER = LineCodec[TraceHeader](TraceHeader, ignores_unknown=True)
_OTHERS = LineCodec[KindLine](KindLine, "kind", ignores_unknown=True)


def encode(line: TraceLine) -> bytes:
    """Encode the line as JSON in UTF-8 with a newline, without fields that are None; raise TraceError if too long."""
    fields = line.model_dump(exclude_none=True)
    encoded = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    if len(encoded) > MAX_LINE_BYTES:
        raise TraceError(f"a line of a trace would have {len(encoded)} bytes; the limit is {MAX_LINE_BYTES}")
    return encoded


def decode(line: bytes) -> TraceLine:
    """Return a line as its model: a header if it has "format", else by its "kind". Unknown fields are ignored.

    :raises TraceError: it is not a line of a trace, or a header of another version.
    """
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise TraceError(f"it is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise TraceError("it is not a JSON object")
    version = fields.get("version", VERSION)
    if fields.get("format") == "streamrag-trace" and version not in (None, VERSION):
        raise TraceError(
            f"it has version {str(version)[:40]} of the format, and this streamrag reads version "
            f"{VERSION} only: read it with the streamrag that wrote it"
        )
    try:
        return (_HEADER if "format" in fields else _OTHERS).decode_values(fields)
    except LineError as error:
        raise TraceError(str(error)) from error
