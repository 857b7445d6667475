"""Options for sampling an answer, with their limits."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from streamrag.support.validation import Flag, NumberOrZero, PositiveFraction, Whole, validated

MAX_STOP_TEXTS, MAX_STOP_CHARS = 16, 256
"""Limits on stop texts. Each text is searched for at every token in the event loop: 16 take 10 us, 100,000 took 15 ms.
The longest text's length is held back from the answer. OpenAI allows 4 texts; vLLM has no limit."""

MAX_INT = (1 << 31) - 1
MAX_ANSWERS = 128  # as at OpenAI

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
    """Most tokens of the answer, which then ends with `finish_reason` "length"."""
    temperature: NumberOrZero = 0.0
    """0 always takes the most probable token; higher values sample more evenly."""
    top_p: PositiveFraction = 1.0
    """Share of probability, above 0 and at most 1, of the most probable tokens that are considered."""
    top_k: Annotated[Whole, Field(ge=0, le=MAX_INT)] = 0
    """Number of the most probable tokens that are considered; 0 for all."""
    seed: Annotated[Whole, Field(gt=-(1 << 63), lt=1 << 63)] | None = None
    """Seed of the sampling, for repeatable answers; None leaves it to the engine."""
    stop: StopTexts = ()
    """Texts at which the answer ends, without them: at most 16, of at most 256 characters."""
    ignore_eos: Flag = False
    """Whether to continue after the model's end-of-sequence token, up to `max_tokens`."""
    json_schema: Annotated[Mapping[str, Any], Field(min_length=1)] | None = None
    """JSON schema that the answer follows, if the engine can constrain answers, as vLLM can; None for free text."""
    n: Annotated[Whole, Field(ge=1, le=MAX_ANSWERS)] = 1
    """Number of answers to sample for the same prompt: the first streams, the others are `Answer.alternatives`."""
    extra: Annotated[Mapping[str, Any], Field()] = field(default_factory=dict)
    """Parameters that streamrag does not name, passed to the engine unchanged."""
