"""One of a few answers, by as few tokens of the engine as tell them apart.

    prompt | no
           | very ─ high        One pass behind the prompt says how likely "no" and "very" are. If "no" leads, or "very"
                 └─ low         leads and had one answer, that is it; else another pass stands behind "very".

The ready-position exit of arXiv 2605.13784, section 3.9.4, with one difference: the paper looks at the end of the data,
before any question, and gives each question the same answer. Here it is the end of the prompt, behind the question.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite
from typing import Any, TypeAlias

from streamrag.core import Tokenizer
from streamrag.errors import BackendError, ConfigurationError

DECISIVE_GAP = 2.0
"""In log-probability: an answer that leads by so much needs no further pass, though it has tokens left. The paper's;
each question may have its own."""

TokenIds: TypeAlias = tuple[int, ...]
Pass: TypeAlias = Callable[[TokenIds, Sequence[int]], Awaitable[tuple[int | None, Any]]]
"""From tokens behind the prompt, and those that may come next, to the one that does, and the log-probabilities of all,
as the engine has them; None if it has none."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The answer that was chosen."""

    text: str
    token_ids: TokenIds
    """Its tokens, as far as they had to be computed."""
    gap: float | None
    """By how much it leads; None where the engine has no log-probabilities, or there is no other, or none that is
    possible at all."""


def spelled(tokenizer: Tokenizer, answers: Sequence[str]) -> dict[TokenIds, str]:
    """Answers by their tokens. Blocking.

    :raises ConfigurationError: one has no tokens, or is another's beginning.
    """
    by_tokens: dict[TokenIds, str] = {}
    for text in answers:
        token_ids = tuple(tokenizer.encode(text))
        if not token_ids:
            raise ConfigurationError(f"the answer {text!r} has no tokens: choose another")
        for other_ids, other in by_tokens.items():
            num_shared = min(len(token_ids), len(other_ids))
            if token_ids[:num_shared] == other_ids[:num_shared]:
                raise ConfigurationError(
                    f"the answers {other!r} and {text!r} begin with the same tokens, and one of them ends there: "
                    "choose others"
                )
        by_tokens[token_ids] = text
    return by_tokens


async def chosen(answers: Mapping[TokenIds, str], one_pass: Pass, decisive_gap: float = DECISIVE_GAP) -> Chosen:
    """The likeliest of `answers`, which are as `spelled` makes them.

    The likeliest beginning is gone on with, until it is an answer, or has one only and leads by `decisive_gap`. Where
    the engine has no log-probabilities, its own tokens are followed.

    :raises BackendError: the engine gave none of the answers.
    """
    likely: dict[TokenIds, float] = {(): 0.0}
    while True:
        best = max(likely, key=likely.__getitem__)
        left = [token_ids for token_ids in answers if token_ids[: len(best)] == best]
        others = [value for token_ids, value in likely.items() if token_ids != best]
        lead = likely[best] - max(others, default=-inf)
        if best in answers or (best and len(left) == 1 and lead >= decisive_gap):
            return Chosen(answers[left[0]], best, lead if isfinite(lead) else None)
        after = list(dict.fromkeys(token_ids[len(best)] for token_ids in left))
        if len(after) == 1 and not others:  # what all have in common decides nothing
            likely = {(*best, after[0]): 0.0}
            continue
        token_id, logprobs = await one_pass(best, after)
        if token_id not in after:
            raise BackendError("the engine gave none of the answers that there may be")
        known = {each: logprobs[each].logprob for each in after if each in logprobs} if logprobs else {}
        if len(known) < len(after):
            likely = {(*best, token_id): 0.0}
            continue
        value = likely.pop(best)
        for each in sorted(after, key=lambda each: each != token_id):  # of equals, the engine's own
            likely[*best, each] = value + known[each]
