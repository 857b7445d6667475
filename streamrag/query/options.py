"""Queries and their options, and the checks for what cannot work."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import Annotated, TypedDict

from pydantic import Field, InstanceOf, PlainValidator

from streamrag.core import SamplingParams, Turn
from streamrag.errors import ConfigurationError
from streamrag.modes import PromptTemplate
from streamrag.support.messages import plain_text
from streamrag.support.validation import CountOrZero, Flag, Number, Seconds, Text, validated

LATE_SHARE = 0.25
"""A third or a half found the answer no more often in experiments/context_choice.py, and leave more to compute last."""

MAX_QUERY_CHARACTERS = 100_000
"""A query is embedded and searched for, besides being tokenised: it should not be a whole document."""


ROLES = ("system", "user", "assistant")


def _turns(value: Iterable[Turn]) -> tuple[Turn, ...]:
    turns = tuple(value) if isinstance(value, Iterable) else (value,)
    if not all(isinstance(turn, Turn) and turn.role in ROLES and isinstance(turn.text, str) for turn in turns):
        raise ValueError('must be a sequence of Turn, each with a role of "system", "user" or "assistant" and a text')
    return tuple(Turn(turn.role, plain_text(turn.text)) for turn in turns)


@validated
@dataclass(frozen=True, slots=True)
class Query:
    """A question with its options; see `QueryOptions`.

    :raises ConfigurationError: a value that cannot work.
    """

    text: Text
    template: InstanceOf[PromptTemplate] = field(default_factory=PromptTemplate)
    history: Annotated[tuple[Turn, ...], PlainValidator(_turns)] = ()
    params: InstanceOf[SamplingParams] = field(default_factory=SamplingParams)
    max_context_tokens: CountOrZero | None = None
    deadline_s: Seconds | None = None
    overlap: Flag = True
    late_share: Annotated[Number, Field(ge=0, lt=1)] = LATE_SHARE

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ConfigurationError("the query is empty: ask something")
        if len(self.text) > MAX_QUERY_CHARACTERS:
            raise ConfigurationError(
                f"the query has {len(self.text):,} characters, and {MAX_QUERY_CHARACTERS:,} is the most: "
                "a long text to ask about belongs into the history or the source"
            )


class QueryOptions(TypedDict, total=False):
    """The options of one query."""

    system: str
    """Replaces the template's system text."""
    template: PromptTemplate
    """Replaces the pipeline's: the words around the context."""
    history: Sequence[Turn]
    """Earlier turns of the conversation, oldest first."""
    params: SamplingParams
    """Options for sampling the answer; the default is greedy, with at most 256 tokens."""
    max_context_tokens: int
    """The most tokens of context; by default, all that the model's length leaves. What does not fit is reported."""
    deadline_s: float
    """The most seconds from submission to the last token; by default, there is no limit. Waiting for the
    engine to start, or for a place, counts."""
    overlap: bool
    """Whether to prefill while retrieval runs; the default is the pipeline's."""
    late_share: float
    """Share of the token budget that is kept for the best of the chunks that no longer fit, in a context that grows
    chunk by chunk; the default is a quarter. With 0, chunks are taken by arrival alone, and whole."""


def check_options(options: Mapping[str, object]) -> None:
    """Raises ConfigurationError for an option that `QueryOptions` does not have; a type checker would have seen it."""
    known = sorted(QueryOptions.__annotations__)
    of_params = {field.name: f"params=SamplingParams({field.name}=...)" for field in fields(SamplingParams)}
    for name in sorted(options.keys() - set(known)):
        nearest = get_close_matches(name, [*of_params, *known], n=1)
        hint = f"; did you mean {of_params.get(nearest[0], nearest[0])}?" if nearest else "."
        raise ConfigurationError(f"a query has no option {name!r}{hint} Its options are {', '.join(known)}")
