"""What retrieval finds, as JSON: one schema and one codec for trace files and for HTTP.

An event over HTTP has its chunks (`AppendLine` and so on below); a line of a trace file names chunks that lines before
it define, and has the query and the time of the event (`streamrag.trace.lines`).
"""

from dataclasses import asdict
from math import isfinite
from typing import Annotated, Any, Generic, Literal, Self, TypeAlias, TypeVar

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, SourceEvent, Update

MAX_SECONDS = 1e9
"""Thirty years; above that, a float cannot hold microseconds."""
MAX_COUNT = 1 << 31
MAX_CHUNKS = 4096
"""Chunks of one update over HTTP."""

Seconds: TypeAlias = Annotated[float, Field(ge=0, le=MAX_SECONDS)]
Count: TypeAlias = Annotated[int, Field(ge=0, lt=MAX_COUNT)]
Score: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]

L = TypeVar("L")


class Fields(BaseModel):
    """A base of everything that stands in a line. It refuses unknown fields: to ignore one could change the answer."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class ChunkFields(Fields):
    """A passage of retrieved text, and where it came from."""

    text: str
    uri: str
    title: str = ""
    passage: Count = 0
    score: Score | None = None

    def chunk(self) -> Chunk:
        """Return the chunk that sources yield."""
        return Chunk(self.text, self.uri, self.title, self.passage, self.score)


class HintFields(Fields):
    """A retriever's expectation of what is still to come."""

    num_chunks: Count | None = None
    end_s: Annotated[float, Field(ge=-MAX_SECONDS, le=MAX_SECONDS)] | None = None

    @classmethod
    def of(cls, hint: Hint | None) -> Self | None:
        """Return the fields of a hint, without values that make no sense: any retriever may have made it."""
        if hint is None:
            return None
        num_chunks, end_s = hint.num_chunks, hint.end_s
        return cls(
            num_chunks=int(num_chunks) if num_chunks is not None and 0 <= num_chunks < MAX_COUNT else None,
            end_s=float(end_s) if end_s is not None and abs(end_s) <= MAX_SECONDS else None,
        )


def to_hint(fields: HintFields | None) -> Hint | None:
    """Return the hint that sources yield."""
    return None if fields is None else Hint(fields.num_chunks, fields.end_s)


class SkippedFields(Fields):
    """A place that retrieval could not use."""

    uri: str
    reason: str


class AppendLine(Fields):
    """The context grows by one chunk."""

    type: Literal["append"]
    chunk: ChunkFields
    hint: HintFields | None = None

    def event(self) -> SourceEvent:
        """Return the event that sources yield."""
        return Append(self.chunk.chunk(), to_hint(self.hint))


class UpdateLine(Fields):
    """The context is replaced by these chunks, in prompt order."""

    type: Literal["update"]
    chunks: list[ChunkFields] = Field(max_length=MAX_CHUNKS)
    hint: HintFields | None = None

    def event(self) -> SourceEvent:
        """Return the event that sources yield."""
        return Update(tuple(each.chunk() for each in self.chunks), to_hint(self.hint))


class SkippedLine(SkippedFields):
    """A place that retrieval could not use."""

    type: Literal["skipped"]

    def event(self) -> SourceEvent:
        """Return the event that sources yield."""
        return Skipped(self.uri, self.reason)


class CutShortLine(Fields):
    """Retrieval ends before it is done."""

    type: Literal["cut_short"]
    reason: str

    def event(self) -> SourceEvent:
        """Return the event that sources yield."""
        return CutShort(self.reason)


EventLine: TypeAlias = AppendLine | UpdateLine | SkippedLine | CutShortLine

_TYPES: dict[type[SourceEvent], str] = {
    Append: "append",
    Update: "update",
    Skipped: "skipped",
    CutShort: "cut_short",
}


def encode_event(event: SourceEvent) -> tuple[str, dict[str, Any]]:
    """Return the type of an event, as in "append", and its fields."""
    return _TYPES[type(event)], asdict(event)


def finite(score: float | None) -> float | None:
    """Return a score that JSON can hold, or None."""
    return score if score is not None and isfinite(score) else None


MAX_ERRORS = 1000
"""Errors in a line or a body up to which they are described: pydantic describes all of them, or none."""


def first_error(error: ValidationError, num_skipped: int = 0) -> tuple[str, str]:
    """Return where the first error is, without the first `num_skipped` parts of the way there, and what it is."""
    if error.error_count() > MAX_ERRORS:
        return "", f"{error.error_count():,} values are not what they must be"
    first = error.errors(include_url=False, include_context=False, include_input=False)[0]
    return ".".join(map(str, first["loc"][num_skipped:])), first["msg"]


class LineError(ValueError):
    """A line that is not of the schema. `where` names the field, as in "chunk.text", or is empty."""

    def __init__(self, error: ValidationError, *, is_tagged: bool) -> None:
        where, what = first_error(error, num_skipped=is_tagged)
        self.where = where[:200]
        super().__init__(f"{self.where}: {what:.200}" if where else what[:200])


class LineCodec(Generic[L]):
    """Decodes lines that are models, or one of a union of models that `tag`, the name of a field, tells apart.

    With `ignores_unknown`, fields that the schema lacks are passed over, as in a file that a newer version wrote.
    """

    def __init__(self, lines: Any, tag: str | None = None, *, ignores_unknown: bool = False) -> None:
        self._adapter: TypeAdapter[L] = TypeAdapter(Annotated[lines, Field(discriminator=tag)] if tag else lines)
        self._is_tagged = tag is not None
        self._extra: Literal["ignore"] | None = "ignore" if ignores_unknown else None

    def decode(self, line: bytes) -> L:
        """Return the line that this JSON is.

        :raises LineError: it is not JSON, or not of the schema.
        """
        try:
            return self._adapter.validate_json(line, extra=self._extra)
        except ValidationError as error:
            raise LineError(error, is_tagged=self._is_tagged) from None

    def decode_values(self, values: object) -> L:
        """Return the line that these values are.

        :raises LineError: they are not of the schema.
        """
        try:
            return self._adapter.validate_python(values, extra=self._extra)
        except ValidationError as error:
            raise LineError(error, is_tagged=self._is_tagged) from None
