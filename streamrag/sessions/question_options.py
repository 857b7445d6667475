"""Questions to a session, and watched questions, with their options."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from streamrag.core import SamplingParams
from streamrag.errors import ConfigurationError
from streamrag.support.messages import plain_text, short_repr
from streamrag.support.validation import NonEmptyText, Number, SecondsOrZero, Whole, validated

DECISIVE_MARGIN = 2.0
"""Default lead in log-probability with which an answer is chosen before all its tokens are computed. Source: arXiv
2605.13784, section 3.9.4."""

Answers: TypeAlias = Annotated[tuple[NonEmptyText, ...], Field(strict=False)]
"""The answers to choose from, as a tuple or list; empty for a free answer."""


@validated
@dataclass(frozen=True, slots=True)
class Question:
    """A validated question with its options, and a key by which equal ones share an answer.

    :raises ConfigurationError: it is empty, or an option cannot work.
    """

    text: Annotated[str, Field()]
    answers: Answers = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    with_margin: bool = False
    decisive_margin: Annotated[Number, Field(ge=0)] = DECISIVE_MARGIN
    draft: tuple[int, ...] = ()
    """Tokens that a free answer may consist of, see `Prompt.draft`."""
    key: tuple[str, frozenset[str], float, str] = field(init=False)
    """Equal for questions that have the same answer. Its last part is empty if the answer can differ each time."""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ConfigurationError("the question is empty: ask something")
        if not isinstance(self.params, SamplingParams):
            raise ConfigurationError(f"params={short_repr(self.params)} must be a SamplingParams")
        if self.params.n > 1 or "prompt_logprobs" in self.params.extra:
            raise ConfigurationError(
                f"params={short_repr(self.params)} has n or prompt_logprobs, which a session's question cannot have: "
                "leave them out, or ask a pipeline"
            )
        text, answers = plain_text(self.text), tuple(map(plain_text, self.answers))
        params = replace(self.params, max_tokens=1, temperature=0.0) if answers else self.params
        key = (text, frozenset(answers), self.decisive_margin if answers else 0.0, _exact(params))
        plain = {"text": text, "answers": answers, "params": params, "with_margin": bool(self.with_margin), "key": key}
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    @property
    def is_repeatable(self) -> bool:
        """Whether the same data always give the same answer."""
        return bool(self.key[-1])

    def params_for(self, allowed: Sequence[int] = (), *, with_logprobs: bool = False) -> SamplingParams:
        """Return the parameters of an engine request whose next token is one of `allowed`, with the log-probabilities
        of these if `with_logprobs`. If `allowed` is empty, any token: with those of the best two if `with_margin`."""
        extra: dict[str, Any] = {}
        if allowed:
            extra["allowed_token_ids"] = sorted(allowed)
            if with_logprobs:
                extra["logprob_token_ids"] = sorted(allowed)
        elif self.with_margin:
            extra["logprobs"] = 2
        return replace(self.params, extra={**self.params.extra, **extra})


@validated
@dataclass(frozen=True, slots=True)
class WatchOptions:
    """The arguments of `Session.watch`.

    :raises ConfigurationError: an option cannot work.
    """

    question: str
    answers: tuple[str, ...] = ()
    min_interval_s: SecondsOrZero = 0.0
    priority: Whole = 0
    with_margin: bool = False
    decisive_margin: float = DECISIVE_MARGIN
    params: SamplingParams = field(default_factory=SamplingParams)
    name: NonEmptyText | None = None

    def parse(self) -> Question:
        """Return the validated question; raises ConfigurationError as `Question` does."""
        return Question(self.question, self.answers, self.params, self.with_margin, self.decisive_margin)


def _exact(params: SamplingParams) -> str:
    """Return the parameters as JSON with sorted keys; an empty text if `temperature` > 0 or a value is not JSON."""
    if params.temperature > 0:
        return ""
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    try:
        return json.dumps({**values, "extra": dict(params.extra)}, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return ""
