"""The lines of a trace file: what each kind holds, and how it is written and read. See docs/traces.md."""

import json
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt, ValidationError

from streamrag.core import Hint
from streamrag.errors import TraceError
from streamrag.trace.values import Outcome

__all__ = [
    "VERSION",
    "AppendLine",
    "ChunkLine",
    "EndLine",
    "Header",
    "HintFields",
    "Line",
    "QueryLine",
    "SkippedLine",
    "TextMode",
    "UpdateLine",
    "decode",
    "encode",
    "hint_fields",
]

VERSION = 1

TextMode: TypeAlias = Literal["full", "hash"]
"""Whether the texts of chunks are recorded, or only their hashes and lengths."""


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
    arrival_s: NonNegativeFloat
    """Since the session began."""
    text: str


class ChunkLine(_Base):
    """A chunk that the lines below name by its key; it holds for the session."""

    kind: Literal["chunk"] = "chunk"
    key: str
    num_tokens: NonNegativeInt
    num_chars: NonNegativeInt | None = None
    text: str | None = None
    source: str = ""
    title: str = ""
    passage: int = 0


class HintFields(_Base):
    """What the retriever expected still to come."""

    num_chunks: int | None = None
    end_s: float | None = None


class AppendLine(_Base):
    """The context of a query grew by a chunk."""

    kind: Literal["append"] = "append"
    query: str
    at_s: NonNegativeFloat
    key: str
    score: float | None = None
    hint: HintFields | None = None


class UpdateLine(_Base):
    """The context of a query became these chunks, in prompt order."""

    kind: Literal["update"] = "update"
    query: str
    at_s: NonNegativeFloat
    keys: tuple[str, ...]
    scores: tuple[float | None, ...] | None = None
    hint: HintFields | None = None


class SkippedLine(_Base):
    """Something that retrieval could not use."""

    kind: Literal["skipped"] = "skipped"
    query: str
    at_s: NonNegativeFloat
    source: str
    reason: str


class EndLine(_Base):
    """The retrieval of a query ended."""

    kind: Literal["end"] = "end"
    query: str
    end_s: NonNegativeFloat
    outcome: Outcome
    error: str | None = None
    cut_short: str | None = None
    """Why retrieval ended before it was done, though it did not fail."""
    num_output_tokens: NonNegativeInt | None = None


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
    """The line as UTF-8 JSON, with its newline; what is None is left out."""
    return json.dumps(line.model_dump(exclude_none=True), ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Line:
    """The line that these bytes are.

    :raises TraceError: they are no line of a trace, or one of a newer version.
    """
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(f"it is not JSON ({error})") from error
    if not isinstance(fields, dict):
        raise TraceError("it is not a JSON object")
    model = Header if "format" in fields else _KINDS.get(str(fields.get("kind")))
    if model is None:
        raise TraceError(f'its "kind" is {fields.get("kind")!r}; it must be one of {", ".join(_KINDS)}')
    if model is Header and fields["format"] == "streamrag-trace" and fields.get("version") not in (None, VERSION):
        raise TraceError(
            f"it is of version {fields['version']!r} of the format, and this streamrag reads version {VERSION}: "
            "read it with the streamrag that wrote it, or a newer one"
        )
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise TraceError(f"{'.'.join(map(str, first['loc']))}: {first['msg'].lower()}") from error


def hint_fields(hint: Hint | None) -> HintFields | None:
    """A hint, to be written."""
    return None if hint is None else HintFields(num_chunks=hint.num_chunks, end_s=hint.end_s)
