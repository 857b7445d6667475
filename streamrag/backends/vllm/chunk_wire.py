"""Chunks on their way to the scheduler, through `SamplingParams.extra_args`, which vLLM passes on as it is.

old prompt:   k k k k k o o o          The request carries only the tail; the scheduler keeps the first
new prompt:   k k k k k n n            `num_kept` tokens that it has, and finds out how many more are equal.
              └─ num_kept ┘ tail

Whoever may send a request may send any `extra_args`, so that what comes out is checked, and not trusted.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any, TypeAlias, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from streamrag.core import Hint, RequestClass
from streamrag.support.validation import STRICT

KEY = "streamrag"
LONGEST_NAME = 1_000  # characters of a source's name, by which the scheduler remembers it
LATEST_S = 1e12  # seconds on any clock; also keeps out what is not a number, and what is too large for arithmetic

# A number of thousands of digits could not even be shown in an error.
Count: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]
Time: TypeAlias = Annotated[float, Field(ge=0, le=LATEST_S)]


class MalformedMessageError(ValueError):
    """The `extra_args` of a request are no message of ours. The text is for the client that has sent them."""


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """A chunk, as the scheduler must know it beside its tokens."""

    index: Count  # number of the chunk within its stream, from 0
    num_kept: Count
    """Leading tokens of the previous prompt that the new one keeps, at least; the tokens of the request follow them."""
    is_complete: bool  # whether the prompt is complete: sample the answer
    arrival_s: Time | None = None
    """Arrival of the chunk, on `time.monotonic` of this host; None if the client runs on another."""
    expected_complete_s: Time | None = None
    """Time at which the retriever expects the prompt to be complete, on the same clock."""
    source_name: Annotated[str, Field(max_length=LONGEST_NAME)] = ""
    """Kind of retriever that the chunk comes from: those of one kind are expected to behave alike."""
    request_class: RequestClass = "pool"  # class of the stream; that of its first chunk counts

    @classmethod
    def of(
        cls,
        index: int,
        num_tokens: int,
        num_shared: int,
        is_complete: bool,
        now_s: float,
        hint: Hint | None,
        source_name: str = "",
        request_class: RequestClass = "pool",
    ) -> "PromptMessage":
        """Return the message that makes the prompt `num_tokens` long, of which `num_shared` are as they were."""
        num_kept = min(num_shared, num_tokens - 1)  # vLLM takes no empty input
        expected_s = now_s + hint.end_s if hint is not None and hint.end_s is not None else None
        return cls(index, num_kept, is_complete, now_s, expected_s, source_name, request_class)

    def extra_args(self) -> dict[str, Any]:
        fields = asdict(self)
        if not 0 <= (self.expected_complete_s or 0.0) <= LATEST_S:
            fields["expected_complete_s"] = None  # retrievers say what they like, and nothing may depend on it
        return {KEY: fields}


REQUIRED = {"index", "num_kept", "is_complete"}
FIELDS = {
    name: TypeAdapter(kind, config=STRICT) for name, kind in get_type_hints(PromptMessage, include_extras=True).items()
}


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The message that vLLM's client sends by itself when the stream of inputs ends: there are no more chunks.

    A stream whose last chunk has not come by then fails: it was lost, or the client gave up.
    """

    def extra_args(self) -> dict[str, Any]:
        return {KEY: {"is_end": True}}


def decode(extra_args: Any) -> PromptMessage | EndOfInput | None:
    """Return the message in `extra_args`; None for a plain request.

    :raises MalformedMessageError: they say something of ours that cannot be.
    """
    fields = extra_args.get(KEY) if isinstance(extra_args, Mapping) else None
    if fields is None:
        return None
    # What was sent is not shown in errors: it may be as long, and as deep, as it likes.
    if not isinstance(fields, dict):
        raise MalformedMessageError(f"extra_args[{KEY!r}] has the fields of a chunk, it cannot be a {_kind(fields)}")
    if fields.keys() == {"is_end"} and fields["is_end"] is True:
        return EndOfInput()
    if not REQUIRED <= fields.keys() <= FIELDS.keys():
        raise MalformedMessageError(
            f"extra_args[{KEY!r}] must have {', '.join(sorted(REQUIRED))}, and may have "
            f"{', '.join(sorted(FIELDS.keys() - REQUIRED))}, but nothing else"
        )
    for name, value in fields.items():
        try:
            FIELDS[name].validate_python(value)
        except ValidationError as error:
            (wrong, *_) = error.errors(include_url=False, include_context=False, include_input=False)
            must_be = wrong["msg"].replace("Input should be", "must be")
            raise MalformedMessageError(f"extra_args[{KEY!r}][{name!r}] {must_be}; a {_kind(value)} came") from None
    return PromptMessage(**fields)


def _kind(value: Any) -> str:
    return type(value).__name__
