"""Prompts that are about to be replaced have short steps."""

from streamrag.engine.rules.lean_partials import NO_LIMIT
from streamrag.engine.rules.rule import TokenRule
from streamrag.engine.walk import Candidate


class ShortBeforeReplaced(TokenRule):
    """Limits a partial prompt to `num_step_tokens`, so that little is computed in vain when it is replaced.

    See `Pace.num_before_replaced`, which says how many.
    """

    __slots__ = ()

    asks_complete = False

    def most_tokens(self, candidate: Candidate) -> float:
        num_tokens = candidate.request.num_step_tokens
        return NO_LIMIT if num_tokens is None else num_tokens
