"""A question to a session, and the answers that there may be."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

from streamrag.core import SamplingParams
from streamrag.errors import ConfigurationError
from streamrag.support.messages import is_number, plain_text, short


@dataclass(frozen=True, slots=True)
class Asked:
    """A question, and how it is to be answered."""

    question: str
    answers: tuple[str, ...]
    """The only ones there may be; any, if there are none."""
    params: SamplingParams
    with_gap: bool
    decisive_gap: float
    """As of `choosing.chosen`."""
    key: tuple[str, frozenset[str], float, str]
    """Equal for those with the same answer. Its last part is empty where each time may have another."""

    def for_engine(self, allowed: Sequence[int] = (), *, with_logprobs: bool = False) -> SamplingParams:
        """What the engine is asked, if only these tokens may come."""
        extra: dict[str, Any] = {}
        if allowed:
            extra["allowed_token_ids"] = sorted(allowed)
            if with_logprobs:
                extra["logprob_token_ids"] = sorted(allowed)
        elif self.with_gap:
            extra["logprobs"] = 2
        return replace(self.params, extra={**self.params.extra, **extra})


def asked(
    question: str, answers: tuple[str, ...], params: SamplingParams, with_gap: bool, decisive_gap: float
) -> Asked:
    """The question as it was asked, checked.

    :raises ConfigurationError: it cannot work.
    """
    if not isinstance(question, str) or not question.strip():
        raise ConfigurationError("the question is empty: ask something")
    if not isinstance(answers, tuple | list) or not all(isinstance(each, str) and each for each in answers):
        raise ConfigurationError(f"answers={short(answers)} must be a tuple of texts, as in ('yes', 'no')")
    if not isinstance(params, SamplingParams):
        raise ConfigurationError(f"params={short(params)} must be a SamplingParams")
    if not is_number(decisive_gap) or not 0 <= decisive_gap < inf:
        raise ConfigurationError(f"decisive_gap={short(decisive_gap)} must be a number, 0 or more")
    question, answers = plain_text(question), tuple(map(plain_text, answers))
    if answers:
        params = replace(params, max_tokens=1, temperature=0.0)
    decisive_gap = float(decisive_gap)
    key = (question, frozenset(answers), decisive_gap if answers else 0.0, _exact(params))
    return Asked(question, answers, params, bool(with_gap), decisive_gap, key)


def _exact(params: SamplingParams) -> str:
    """Equal for parameters that make the same answer; nothing for those that may answer otherwise each time, or that
    hold what cannot be compared as text."""
    if params.temperature > 0:
        return ""
    values = {field.name: getattr(params, field.name) for field in fields(params)}
    try:
        return json.dumps({**values, "extra": dict(params.extra)}, sort_keys=True)
    except (TypeError, ValueError, RecursionError):
        return ""
