"""The lines of a trace file: what each kind holds, and how it is written and read. See docs/traces.md."""

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from streamrag.core import Hint
from streamrag.errors import TraceError
from streamrag.support.bounded_reading import MAX_LINE_BYTES, parse_json
from streamrag.trace.values import Outcome

VERSION = 1

OF_THE_READER = ("tokenizer", "text", "num_sessions", "notes")
"""Keys of a trace's provenance that reading a file sets, whatever the file says."""

TextMode: TypeAlias = Literal["full", "hash"]
"""Whether the texts of chunks are recorded, or only their hashes and lengths."""


MAX_SECONDS = 1e9
"""Thirty years; above that, microseconds get lost in a float."""
Seconds: TypeAlias = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
MAX_COUNT = 1 << 31
Count: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
MAX_NAMED = 5_000_000
"""Chunks in all updates of a trace; with its score, each takes some 200 bytes of memory."""
_Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]


class _Base(BaseModel):
    model_config = ConfigDict(frozen=True)


class Header(_Base):
    """Begins a session of recording: the first line, and one more for each time the file was appended to."""

    format: Literal["streamrag-trace"] = "streamrag-trace"
    version: int = VERSION
    text: TextMode = "full"
    tokenizer: str | None = None
    """What counted the tokens."""
    provenance: dict[str, Any] = {}


class QueryLine(_Base):
    """A query arrived."""

    kind: Literal["query"] = "query"
    id: str
    arrival_s: Seconds
    """Since the session began."""
    text: str


class ChunkLine(_Base):
    """A chunk that the lines below name by its key; it holds for the session."""

    kind: Literal["chunk"] = "chunk"
    key: str
    num_tokens: Count
    num_chars: Count | None = None
    text: str | None = None
    uri: str = ""
    title: str = ""
    passage: Annotated[int, Field(gt=-MAX_COUNT, lt=MAX_COUNT)] = 0


class HintFields(_Base):
    """What the retriever expected still to come."""

    num_chunks: Count | None = None
    end_s: Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS)] | None = None


class AppendLine(_Base):
    """The context of a query grew by a chunk."""

    kind: Literal["append"] = "append"
    query: str
    at_s: Seconds
    key: str
    score: _Finite | None = None
    hint: HintFields | None = None


class UpdateLine(_Base):
    """The context of a query became these chunks, in prompt order."""

    kind: Literal["update"] = "update"
    query: str
    at_s: Seconds
    keys: tuple[str, ...]
    scores: tuple[_Finite | None, ...] | None = None
    hint: HintFields | None = None


class SkippedLine(_Base):
    """Something that retrieval could not use."""

    kind: Literal["skipped"] = "skipped"
    query: str
    at_s: Seconds
    uri: str
    reason: str


class EndLine(_Base):
    """The retrieval of a query ended."""

    kind: Literal["end"] = "end"
    query: str
    end_s: Seconds
    outcome: Outcome
    error: str | None = None
    cut_short: str | None = None
    """Why retrieval ended before it was done, though it did not fail."""
    num_output_tokens: Count | None = None


Line: TypeAlias = Header | QueryLine | ChunkLine | AppendLine | UpdateLine | SkippedLine | EndLine

_KINDS: Mapping[str, type[Line]] = {
    "query": QueryLine,
    "chunk": ChunkLine,
    "append": AppendLine,
    "update": UpdateLine,
    "skipped": SkippedLine,
    "end": EndLine,
}


def encode(line: Line) -> bytes:
    """The line as UTF-8 JSON, with its newline; what is None is left out.

    :raises TraceError: it is longer than what is read again.
    """
    fields = line.model_dump(exclude_none=True)
    encoded = json.dumps(fields, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"
    if len(encoded) > MAX_LINE_BYTES:
        raise TraceError(f"a line of a trace has at most {MAX_LINE_BYTES} bytes, and this would have {len(encoded)}")
    return encoded


def decode(line: bytes) -> Line:
    """The line that these bytes are.

    :raises TraceError: they are no line of a trace, or one of a newer version.
    """
    try:
        fields = parse_json(line)
    except ValueError as error:
        raise TraceError(f"it is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise TraceError("it is not a JSON object")
    model = Header if "format" in fields else _KINDS.get(str(fields.get("kind")))
    if model is None:
        raise TraceError(f'its "kind" is {str(fields.get("kind"))[:40]!r}; it must be one of {", ".join(_KINDS)}')
    if model is Header and fields["format"] == "streamrag-trace" and fields.get("version") not in (None, VERSION):
        raise TraceError(
            f"it is of version {str(fields['version'])[:40]} of the format, and this streamrag reads version "
            f"{VERSION}: read it with the streamrag that wrote it, or a newer one"
        )
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise TraceError(first_problem(error)) from error


class NamedChunks:
    """Counts what the updates of a trace name, which takes more memory than room in a file."""

    def __init__(self) -> None:
        self._num = 0

    def add(self, num_chunks: int) -> None:
        """Count these too.

        :raises TraceError: there are too many.
        """
        self._num += num_chunks
        if self._num > MAX_NAMED:
            raise TraceError(f"its updates name more than {MAX_NAMED:,} chunks; make several traces of it")


def first_problem(error: ValidationError) -> str:
    """What is wrong, and where, in a few words."""
    first = error.errors(include_url=False)[0]
    return f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}"


def hint_fields(hint: Hint | None) -> HintFields | None:
    """A hint, to be written, without what cannot be meant: it comes from anybody's retriever."""
    if hint is None:
        return None
    num_chunks, end_s = hint.num_chunks, hint.end_s
    return HintFields(
        num_chunks=int(num_chunks) if num_chunks is not None and 0 <= num_chunks < MAX_COUNT else None,
        end_s=float(end_s) if end_s is not None and abs(end_s) <= MAX_SECONDS else None,
    )
