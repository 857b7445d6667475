"""Rules about drafts: answers to prompts that may still change, for which nobody waits."""

from collections.abc import Callable

from streamrag.engine.rules.rule import Rule, TokenRule
from streamrag.engine.rules.tokens import NO_LIMIT
from streamrag.engine.walk import Candidate, Wait


class DraftsLast(Rule):
    """Holds drafts back while anything else can compute, and lets others take their blocks."""

    asks_partial = False
    is_waived_if_idle = True

    def ask(self, candidate: Candidate) -> Wait | None:
        return Wait.YIELD if candidate.request.request_class == "draft" else None


class ShortDrafts(TokenRule):
    """Limits the tokens that a draft computes in a step, so that what arrives meanwhile does not wait long.

    num_tokens: returns the most tokens; None for no limit.
    """

    asks_partial = False

    def __init__(self, num_tokens: Callable[[], int | None]) -> None:
        self._num_tokens = num_tokens

    def most_tokens(self, candidate: Candidate) -> float:
        num_tokens = self._num_tokens()
        return NO_LIMIT if num_tokens is None or candidate.request.request_class != "draft" else num_tokens
