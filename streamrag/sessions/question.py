"""A question to a session, and how it is to be answered."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any, TypeAlias

from pydantic import Field

from streamrag.core import SamplingParams
from streamrag.errors import ConfigurationError
from streamrag.support.messages import plain_text, short
from streamrag.support.validation import NonEmptyText, Number, SecondsOrZero, Whole, validated

DECISIVE_GAP = 2.0
"""Lead in log-probability with which an answer needs no further pass, though it has tokens left. The default is the
paper's; each question may have its own."""

Answers: TypeAlias = Annotated[tuple[NonEmptyText, ...], Field(strict=False)]
"""The only answers that there may be; any answer, if there are none. A list will do."""


@validated
@dataclass(frozen=True, slots=True)
class Question:
    """A question that was checked.

    :raises ConfigurationError: it is empty, or an option cannot work.
    """

    text: Annotated[str, Field()]
    answers: Answers = ()
    params: SamplingParams = field(default_factory=SamplingParams)
    with_gap: bool = False
    decisive_gap: Annotated[Number, Field(ge=0)] = DECISIVE_GAP
    key: tuple[str, frozenset[str], float, str] = field(init=False)
    """Equal for questions with the same answer. Its last part is empty where each time may have another."""

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise ConfigurationError("the question is empty: ask something")
        if not isinstance(self.params, SamplingParams):
            raise ConfigurationError(f"params={short(self.params)} must be a SamplingParams")
        text, answers = plain_text(self.text), tuple(map(plain_text, self.answers))
        params = replace(self.params, max_tokens=1, temperature=0.0) if answers else self.params
        key = (text, frozenset(answers), self.decisive_gap if answers else 0.0, _exact(params))
        plain = {"text": text, "answers": answers, "params": params, "with_gap": bool(self.with_gap), "key": key}
        for name, value in plain.items():
            object.__setattr__(self, name, value)

    @property
    def is_repeatable(self) -> bool:
        """Whether the same data always get the same answer."""
        return bool(self.key[-1])

    def params_for(self, allowed: Sequence[int] = (), *, with_logprobs: bool = False) -> SamplingParams:
        """Return what the engine is asked for, if only the `allowed` tokens may come."""
        extra: dict[str, Any] = {}
        if allowed:
            extra["allowed_token_ids"] = sorted(allowed)
            if with_logprobs:
                extra["logprob_token_ids"] = sorted(allowed)
        elif self.with_gap:
            extra["logprobs"] = 2
        return replace(self.params, extra={**self.params.extra, **extra})


@validated
@dataclass(frozen=True, slots=True)
class WatchOptions:
    """A watched question as it is registered: the arguments of `Session.watch`.

    :raises ConfigurationError: an option cannot work.
    """

    question: str
    answers: tuple[str, ...] = ()
    every_s: SecondsOrZero = 0.0
    priority: Whole = 0
    with_gap: bool = False
    decisive_gap: float = DECISIVE_GAP
    params: SamplingParams = field(default_factory=SamplingParams)
    name: NonEmptyText | None = None

    def parse(self) -> Question:
        """Return the question, checked.

        :raises ConfigurationError: it cannot work.
        """
        return Question(self.question, self.answers, self.params, self.with_gap, self.decisive_gap)


def _exact(params: SamplingParams) -> str:
    """Return equal texts for parameters that make the same answer.

    The text is empty for parameters that may answer otherwise each time, and for values that cannot be compared.
    """
    if params.temperature > 0:
        return ""
    values = {each.name: getattr(params, each.name) for each in fields(params)}
    try:
        return json.dumps({**values, "extra": dict(params.extra)}, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return ""
