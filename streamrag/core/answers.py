"""Sampling options, and the events that backends yield."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeAlias

from pydantic import BeforeValidator, Field

from streamrag.records import RequestRecord
from streamrag.support.validation import Flag, NumberOrZero, PositiveFraction, Whole, validated

MAX_STOP_TEXTS, MAX_STOP_CHARS = 16, 256
"""Limits on stop texts. Each text is searched for at every token in the event loop: 16 take 10 us, 100,000 took 15 ms.
The longest text's length is held back from the answer. OpenAI allows 4 texts; vLLM has no limit."""

MAX_INT = (1 << 31) - 1

StopText = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
StopTexts = Annotated[
    tuple[StopText, ...],
    Field(max_length=MAX_STOP_TEXTS),
    BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value),
]


@validated
@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Options for sampling an answer. By default, sampling is greedy.

    :raises ConfigurationError: a value that no engine accepts.
    """

    max_tokens: Annotated[Whole, Field(ge=1, le=MAX_INT)] = 256
    temperature: NumberOrZero = 0.0
    top_p: PositiveFraction = 1.0
    top_k: Annotated[Whole, Field(ge=0, le=MAX_INT)] = 0
    """0 considers all tokens."""
    seed: Annotated[Whole, Field(gt=-(1 << 63), lt=1 << 63)] | None = None
    stop: StopTexts = ()
    ignore_eos: Flag = False
    extra: Annotated[Mapping[str, Any], Field()] = field(default_factory=dict)
    """Parameters that streamrag does not name, passed to the engine unchanged."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """The backend has computed the KV of at least `num_tokens` leading tokens of the query's newest prompt."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class AnswerChunk:
    """New text of the answer, with the tokens it was decoded from.

    `text` may be empty while a character is incomplete. `finish_reason` is set on the last chunk only.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    record: RequestRecord | None = None
    """The engine's record of the request, on the last chunk only; None if the engine keeps no records."""
    logprobs: Any = None
    """Log-probabilities in the engine's own format, one entry per token, if `SamplingParams.extra` asks for them."""


BackendEvent: TypeAlias = Prefilled | AnswerChunk
