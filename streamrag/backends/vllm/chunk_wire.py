"""Chunks on their way to the scheduler, in `SamplingParams.extra_args`, which vLLM passes on unchanged.

old prompt:   k k k k k o o o          The request carries only the tail. The scheduler keeps the first
new prompt:   k k k k k n n            `num_kept` tokens, and compares the rest to find the whole LCP.
              └─ num_kept ┘ tail

Any client that may send a request may send any `extra_args`, so they are validated.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, TypeAlias, get_type_hints

from pydantic import Field, TypeAdapter, ValidationError

from streamrag.core import Prompt, RequestClass
from streamrag.support.validation import STRICT

KEY = "streamrag"
LONGEST_NAME = 1_000  # characters of a source's name
LONGEST_DRAFT = 1 << 16  # tokens
LATEST_S = 1e12  # seconds on any clock; excludes NaN, infinity, and values too large for arithmetic

# Bounded, because an integer of thousands of digits could not even be converted to text for an error.
WireCount: TypeAlias = Annotated[int, Field(ge=0, lt=1 << 63)]
Time: TypeAlias = Annotated[float, Field(ge=0, le=LATEST_S)]


class MalformedMessageError(ValueError):
    """The `extra_args` of a request are not a valid message. The text is sent to the client."""


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """The scheduler's metadata of a chunk, in addition to its tokens."""

    index: WireCount  # number of the chunk in its stream, from 0
    num_kept: WireCount  # leading tokens kept from the previous prompt; the request's own tokens follow them
    is_complete: bool  # whether the prompt is complete, and the answer is to be sampled
    arrival_s: Time | None = None
    """Arrival of the chunk, by `time.monotonic` of this host; None if the client runs on another host."""
    expected_complete_s: Time | None = None
    """Time at which the retriever expects the prompt to be complete, on the same clock."""
    source_name: Annotated[str, Field(max_length=LONGEST_NAME)] = ""
    """Name of the retriever that the chunk comes from. Chunks of one source are expected to behave alike."""
    request_class: RequestClass = "pool"  # class of the stream, taken from its first chunk
    draft: Annotated[list[WireCount], Field(max_length=LONGEST_DRAFT)] = field(default_factory=list)
    """Tokens that the answer to a complete prompt may consist of."""

    @classmethod
    def of(cls, prompt: Prompt, index: int, now_s: float) -> "PromptMessage":
        """Return the message of a stream's prompt number `index`, which keeps the shared tokens, but never all.

        The hint's end becomes a time, counted from `now_s`; the draft is cut after `LONGEST_DRAFT` tokens.
        """
        hint, draft = prompt.hint, list(prompt.draft[:LONGEST_DRAFT])
        num_kept = min(prompt.num_shared, len(prompt.token_ids) - 1)  # vLLM accepts no empty input
        expected_s = now_s + hint.end_s if hint is not None and hint.end_s is not None else None
        origin = prompt.source_name, prompt.request_class
        return cls(index, num_kept, prompt.is_complete, now_s, expected_s, *origin, draft)

    def extra_args(self) -> dict[str, Any]:
        """Return vLLM's `extra_args` with the message, without an expected time that is out of range."""
        fields = asdict(self)
        if not 0 <= (self.expected_complete_s or 0.0) <= LATEST_S:
            fields["expected_complete_s"] = None  # a retriever's estimate may be invalid
        return {KEY: fields}


REQUIRED = {"index", "num_kept", "is_complete"}
FIELDS = {
    name: TypeAdapter(kind, config=STRICT) for name, kind in get_type_hints(PromptMessage, include_extras=True).items()
}


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """The message that vLLM's client sends at the end of its inputs. A stream without its last chunk fails then."""

    def extra_args(self) -> dict[str, Any]:
        return {KEY: {"is_end": True}}


def decode(extra_args: Any) -> PromptMessage | EndOfInput | None:
    """Return the message in `extra_args`, None for a plain request; raise MalformedMessageError for an invalid one."""
    fields = extra_args.get(KEY) if isinstance(extra_args, Mapping) else None
    if fields is None:
        return None
    # Errors do not show the message, which may be arbitrarily long and deeply nested.
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
