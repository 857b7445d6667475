"""The JSON schema and codec of retrieval events, for trace files and HTTP.

An event over HTTP contains its chunks (`AppendLine` and so on). A line of a trace file refers to chunks that earlier
lines define, and has the event's query and time (`streamrag.trace.file_schema`).
"""

from dataclasses import asdict
from math import isfinite
from typing import Annotated, Any, Generic, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, SourceEvent, Update

MAX_SECONDS = 1e9  # thirty years; above it, a float cannot represent microseconds
MAX_COUNT = 1 << 31
MAX_CHUNKS = 4096  # maximum number of chunks in one update over HTTP

Seconds: TypeAlias = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
TraceCount: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
FiniteScore: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]

L = TypeVar("L")


class Fields(BaseModel):
    """A base class of schemas. It rejects unknown fields, because ignoring one could change the answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ChunkFields(Fields):
    """A passage of retrieved text, with its origin."""

    text: str
    uri: str
    title: str | None = ""
    passage: TraceCount | None = 0
    score: FiniteScore | None = None

    def chunk(self) -> Chunk:
        return Chunk(self.text, self.uri, self.title or "", self.passage or 0, self.score)


class HintFields(Fields):
    """A retriever's estimate of the remaining chunks and time."""

    num_chunks: TraceCount | None = None
    end_s: Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS)] | None = None

    @classmethod
    def of(cls, hint: Hint | None) -> Self | None:
        """Return a hint's fields; None for None. Values outside the schema become None, as retrievers may be faulty."""
        if hint is None:
            return None
        num_chunks, end_s = hint.num_chunks, hint.end_s
        return cls(
            num_chunks=int(num_chunks) if num_chunks is not None and 0 <= num_chunks < MAX_COUNT else None,
            end_s=float(end_s) if end_s is not None and abs(end_s) <= MAX_SECONDS else None,
        )


def to_hint(fields: HintFields | None) -> Hint | None:
    return None if fields is None else Hint(fields.num_chunks, fields.end_s)


class SkippedFields(Fields):
    """A place that retrieval could not use."""

    uri: str
    reason: str


class AppendLine(Fields):
    """An append of one chunk to the context."""

    type: Literal["append"]
    chunk: ChunkFields
    hint: HintFields | None = None

    def event(self) -> SourceEvent:
        return Append(self.chunk.chunk(), to_hint(self.hint))


class UpdateLine(Fields):
    """An update that replaces the context by these chunks, in prompt order."""

    type: Literal["update"]
    chunks: list[ChunkFields] = Field(max_length=MAX_CHUNKS)
    hint: HintFields | None = None

    def event(self) -> SourceEvent:
        return Update(tuple(each.chunk() for each in self.chunks), to_hint(self.hint))


class SkippedLine(SkippedFields):
    """The event of a skipped place."""

    type: Literal["skipped"]

    def event(self) -> SourceEvent:
        return Skipped(self.uri, self.reason)


class CutShortLine(Fields):
    """The event that retrieval ends early."""

    type: Literal["cut_short"]
    reason: str

    def event(self) -> SourceEvent:
        return CutShort(self.reason)


EventLine: TypeAlias = AppendLine | UpdateLine | SkippedLine | CutShortLine

_TYPES: dict[type[SourceEvent], str] = {
    Append: "append",
    Update: "update",
    Skipped: "skipped",
    CutShort: "cut_short",
}


def encode_event(event: SourceEvent) -> tuple[str, dict[str, Any]]:
    """Return the type name of an event, such as "append", and its fields."""
    return _TYPES[type(event)], asdict(event)


def finite(score: float | None) -> float | None:
    """Return the score, or None if it is not finite, which JSON cannot represent."""
    return score if score is not None and isfinite(score) else None


MAX_ERRORS = 1000  # maximum number of errors to describe: pydantic describes either all of them or none


def first_error(error: ValidationError, num_skipped: int = 0) -> tuple[str, str]:
    """Return the location of the first error, without its first `num_skipped` parts, and the message."""
    if error.error_count() > MAX_ERRORS:
        return "", f"{error.error_count():,} values are invalid"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ".".join(map(str, first["loc"][num_skipped:])), first["msg"]


class LineError(ValueError):
    """A line that violates the schema. `where` is the path of the field, such as "chunk.text", or empty."""

    def __init__(self, error: ValidationError, *, is_tagged: bool) -> None:
        where, what = first_error(error, num_skipped=is_tagged)
        self.where = where[:200]
        super().__init__(f"{self.where}: {what:.200}" if where else what[:200])


class LineCodec(Generic[L]):
    """A decoder of lines: of one model, or of a union of models that the field `tag` discriminates.

    With `ignores_unknown`, unknown fields are ignored, as in files of a newer version.
    """

    def __init__(self, lines: Any, tag: str | None = None, *, ignores_unknown: bool = False) -> None:
        self._adapter: TypeAdapter[L] = TypeAdapter(Annotated[lines, Field(discriminator=tag)] if tag else lines)
        self._is_tagged = tag is not None
        self._extra: Literal["ignore"] | None = "ignore" if ignores_unknown else None

    def decode(self, line: bytes) -> L:
        """Return a line of JSON as its model. Raises LineError if the line is not JSON, or violates the schema."""
        try:
            return self._adapter.validate_json(line, extra=self._extra)
        except ValidationError as error:
            raise LineError(error, is_tagged=self._is_tagged) from None

    def decode_values(self, values: object) -> L:
        """Return a line that was parsed as JSON as its model. Raises LineError if it violates the schema."""
        try:
            return self._adapter.validate_python(values, extra=self._extra)
        except ValidationError as error:
            raise LineError(error, is_tagged=self._is_tagged) from None
