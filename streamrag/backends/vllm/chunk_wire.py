"""How a chunk travels to the scheduler: through `SamplingParams.extra_args`, which vLLM passes on as it is.

old prompt:   k k k k k o o o          The request carries only the tail; the scheduler keeps the first
new prompt:   k k k k k n n            `num_kept` tokens that it has, and finds out how many more are equal.
              └─ num_kept ┘ tail

Whoever may send a request may send any `extra_args`, so that what comes out is checked, and not trusted.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, get_args

from streamrag.core import Hint, RequestClass

KEY = "streamrag"
LONGEST_NAME = 1_000
"""Characters of a source's name, by which the scheduler remembers it."""
LARGEST_COUNT = 1 << 63
"""A number of thousands of digits could not even be shown in an error."""
LATEST_S = 1e12
"""Seconds on any clock; also keeps out what is not a number, and what is too large for arithmetic."""


class MalformedMessageError(ValueError):
    """`extra_args` do not say what they must; the message says so to whoever has sent them."""


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """What the scheduler must know of a chunk beside its tokens."""

    index: int
    """Number of the chunk within its stream, from 0."""
    num_kept: int
    """Leading tokens of the previous prompt that the new one keeps, at least; the tokens of the request follow them."""
    is_complete: bool
    """Whether the prompt is complete: sample the answer."""
    arrival_s: float | None = None
    """When the chunk arrived, on `time.monotonic` of this host; None if the client runs on another."""
    expected_complete_s: float | None = None
    """When the retriever expects the prompt to be complete, on the same clock."""
    source_name: str = ""
    """What kind of retriever the chunk comes from: those of one kind are expected to behave alike."""
    request_class: RequestClass = "pool"
    """Who waits for the stream; that of its first chunk counts."""

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
        """Makes the prompt `num_tokens` long, of which `num_shared` are those of the last one."""
        num_kept = min(num_shared, num_tokens - 1)  # vLLM takes no empty input
        expected_s = now_s + hint.end_s if hint is not None and hint.end_s is not None else None
        return cls(index, num_kept, is_complete, now_s, expected_s, source_name, request_class)

    def extra_args(self) -> dict[str, Any]:
        fields = asdict(self)
        if not _is_time(self.expected_complete_s):
            fields["expected_complete_s"] = None  # retrievers say what they like, and nothing may depend on it
        return {KEY: fields}


@dataclass(frozen=True, slots=True)
class EndOfInput:
    """What vLLM's client sends by itself when the stream of inputs ends: there are no more chunks.

    A stream whose last chunk has not come by then fails: it was lost, or the client gave up.
    """

    def extra_args(self) -> dict[str, Any]:
        return {KEY: dict(END)}


END = {"is_end": True}


def decode(extra_args: Any) -> PromptMessage | EndOfInput | None:
    """What `extra_args` say; None for a plain request.

    :raises MalformedMessageError: they say something of ours that cannot be.
    """
    fields = extra_args.get(KEY) if isinstance(extra_args, Mapping) else None
    if fields is None:
        return None
    # What was sent is not shown in errors: it may be as long, and as deep, as it likes.
    if not isinstance(fields, dict):
        raise MalformedMessageError(f"extra_args[{KEY!r}] has the fields of a chunk, it cannot be a {_kind(fields)}")
    if fields.keys() == END.keys() and fields["is_end"] is True:
        return EndOfInput()
    if not REQUIRED <= fields.keys() <= CHECKS.keys():
        raise MalformedMessageError(
            f"extra_args[{KEY!r}] must have {', '.join(sorted(REQUIRED))}, and may have "
            f"{', '.join(sorted(CHECKS.keys() - REQUIRED))}, but nothing else"
        )
    for name, value in fields.items():
        is_right, what = CHECKS[name]
        if not is_right(value):
            raise MalformedMessageError(f"extra_args[{KEY!r}][{name!r}] must be {what}; a {_kind(value)} came")
    return PromptMessage(**fields)


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < LARGEST_COUNT


def _is_time(value: Any) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= LATEST_S)


CHECKS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "index": (_is_count, "a whole number from 0"),
    "num_kept": (_is_count, "a whole number from 0"),
    "is_complete": (lambda value: isinstance(value, bool), "true or false"),
    "arrival_s": (_is_time, "seconds on a clock, or nothing"),
    "expected_complete_s": (_is_time, "seconds on a clock, or nothing"),
    "source_name": (
        lambda value: isinstance(value, str) and len(value) <= LONGEST_NAME,
        f"a text of {LONGEST_NAME} characters at most",
    ),
    "request_class": (
        lambda value: isinstance(value, str) and value in get_args(RequestClass),
        f"one of {', '.join(get_args(RequestClass))}",
    ),
}
REQUIRED = {"index", "num_kept", "is_complete"}


def _kind(value: Any) -> str:
    return type(value).__name__
