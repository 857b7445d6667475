"""The lines of a trace file, which docs/traces.md describes: what each kind holds, how it is encoded and decoded."""

import json
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import Field

from streamrag.errors import TraceError
from streamrag.support.bounded_reading import MAX_LINE_BYTES, parse_json
from streamrag.trace.events import (
    MAX_COUNT,
    Count,
    Fields,
    HintFields,
    LineCodec,
    LineError,
    Score,
    Seconds,
    SkippedFields,
)
from streamrag.trace.values import Outcome

VERSION = 1

READER_KEYS = ("tokenizer", "text", "num_sessions", "notes")
"""Keys of a trace's provenance that reading a file sets, whatever the file says."""

MAX_NAMED = 5_000_000
"""Chunks in all updates of a trace; with its score, each takes some 200 bytes of memory."""

TextMode: TypeAlias = Literal["full", "hash"]
"""Whether the texts of chunks are recorded, or only their hashes and lengths."""


class Header(Fields):
    """The first line of a session of recording. Appending to a file begins a further session."""

    format: Literal["streamrag-trace"] = "streamrag-trace"
    version: int = VERSION
    text: TextMode = "full"
    tokenizer: str | None = None
    """Name of what counted the tokens."""
    provenance: dict[str, Any] = Field(default_factory=dict)


class QueryLine(Fields):
    """The arrival of a query."""

    kind: Literal["query"] = "query"
    id: str
    arrival_s: Seconds
    """Seconds since the session began."""
    text: str


class ChunkLine(Fields):
    """A chunk that the lines below name by its key, until the session ends."""

    kind: Literal["chunk"] = "chunk"
    key: str
    num_tokens: Count
    num_chars: Count | None = None
    text: str | None = None
    uri: str = ""
    title: str = ""
    passage: Annotated[int, Field(gt=-MAX_COUNT, lt=MAX_COUNT)] = 0


class QueryEventLine(Fields):
    """A base of what happens to a query; `at_s` counts from its arrival."""

    kind: str
    query: str
    at_s: Seconds


class AppendKeyLine(QueryEventLine):
    """The growth of a query's context by a chunk."""

    kind: Literal["append"] = "append"
    key: str
    score: Score | None = None
    hint: HintFields | None = None


class UpdateKeysLine(QueryEventLine):
    """The new context of a query, in prompt order."""

    kind: Literal["update"] = "update"
    keys: tuple[str, ...]
    scores: tuple[Score | None, ...] | None = None
    hint: HintFields | None = None


class QuerySkippedLine(SkippedFields, QueryEventLine):
    """A place that the retrieval of a query could not use."""

    kind: Literal["skipped"] = "skipped"


class EndLine(Fields):
    """The end of a query's retrieval."""

    kind: Literal["end"] = "end"
    query: str
    end_s: Seconds
    outcome: Outcome
    error: str | None = None
    cut_short: str | None = None
    """The reason for which retrieval ended early, without a failure."""
    num_output_tokens: Count | None = None


KindLine: TypeAlias = QueryLine | ChunkLine | AppendKeyLine | UpdateKeysLine | QuerySkippedLine | EndLine
Line: TypeAlias = Header | KindLine

_HEADER = LineCodec[Header](Header, ignores_unknown=True)
_OTHERS = LineCodec[KindLine](KindLine, "kind", ignores_unknown=True)


def encode(line: Line) -> bytes:
    """Return the line as UTF-8 JSON with its newline, without fields that are None.

    :raises TraceError: it is longer than a line that can be read.
    """
    fields = line.model_dump(exclude_none=True)
    encoded = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    if len(encoded) > MAX_LINE_BYTES:
        raise TraceError(f"a line of a trace has at most {MAX_LINE_BYTES} bytes, and this would have {len(encoded)}")
    return encoded


def decode(line: bytes) -> Line:
    """Return the line that these bytes are.

    :raises TraceError: they are not a line of a trace, or one of a newer version.
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
            f"it is of version {str(version)[:40]} of the format, and this streamrag reads version "
            f"{VERSION}: read it with the streamrag that wrote it, or a newer one"
        )
    try:
        return (_HEADER if "format" in fields else _OTHERS).decode_values(fields)
    except LineError as error:
        raise TraceError(str(error)) from error


class KeyQuota:
    """Bounds the number of keys in the updates of a trace, which take more memory than room in a file."""

    def __init__(self) -> None:
        self._num = 0

    def add(self, num_keys: int) -> None:
        """Count the keys of one more update.

        :raises TraceError: there are too many.
        """
        self._num += num_keys
        if self._num > MAX_NAMED:
            raise TraceError(f"its updates name more than {MAX_NAMED:,} chunks; make several traces of it")
