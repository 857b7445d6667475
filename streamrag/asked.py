"""Queries and their options, and the checks for what cannot work."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from difflib import get_close_matches
from typing import TypedDict

from streamrag.core import SamplingParams, Turn
from streamrag.errors import ConfigurationError
from streamrag.modes import PromptTemplate
from streamrag.support.messages import is_number, is_whole, plain_text, short

LATE_SHARE = 0.25
"""A third or a half found the answer no more often in experiments/context_choice.py, and leave more to compute last."""

MAX_QUERY_CHARACTERS = 100_000
"""A query is embedded and searched for, besides being tokenised: it should not be a whole document."""


@dataclass(frozen=True, slots=True)
class Query:
    """A question with its options, checked; see `QueryOptions`.

    Raises ConfigurationError for values that cannot work.
    """

    text: str
    template: PromptTemplate = field(default_factory=PromptTemplate)
    history: tuple[Turn, ...] = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    max_context_tokens: int | None = None
    deadline_s: float | None = None
    overlap: bool = True
    late_share: float = LATE_SHARE

    def __post_init__(self) -> None:
        checks = {
            "text": (isinstance(self.text, str), "a str"),
            "template": (isinstance(self.template, PromptTemplate), "a PromptTemplate"),
            "history": (
                all(
                    isinstance(turn, Turn)
                    and turn.role in ("system", "user", "assistant")
                    and isinstance(turn.text, str)
                    for turn in self.history
                ),
                'a sequence of Turn, each with a role of "system", "user" or "assistant" and a text',
            ),
            "params": (isinstance(self.params, SamplingParams), "a SamplingParams"),
            "max_context_tokens": (
                self.max_context_tokens is None or (is_whole(self.max_context_tokens) and self.max_context_tokens >= 0),
                "a whole number, at least 0, or None",
            ),
            "deadline_s": (
                self.deadline_s is None or (is_number(self.deadline_s) and self.deadline_s > 0),
                "a positive number of seconds, or None to wait for ever",
            ),
            "overlap": (isinstance(self.overlap, bool), "True or False"),
            "late_share": (is_number(self.late_share) and 0 <= self.late_share < 1, "a share of the context, below 1"),
        }
        for name, (is_valid, remedy) in checks.items():
            if not is_valid:
                raise ConfigurationError(f"{name}={short(getattr(self, name))} must be {remedy}")
        for name, plain in (
            ("text", plain_text),
            ("max_context_tokens", int),
            ("deadline_s", float),
            ("late_share", float),
        ):
            if (value := getattr(self, name)) is not None:
                object.__setattr__(self, name, plain(value))  # NumPy's numbers are not what they compare as
        history = tuple(Turn(turn.role, plain_text(turn.text)) for turn in self.history)
        object.__setattr__(self, "history", history)
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
    """How to sample the answer; the default is greedy, with at most 256 tokens."""
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
