"""Prompts that are about to be replaced have short steps."""

from streamrag.engine.rules.lean_partials import NO_LIMIT
from streamrag.engine.rules.rule import TokenRule
from streamrag.engine.walk import Candidate


class ShortBeforeReplaced(TokenRule):
    """Limits a partial prompt to `num_step_tokens`, so that little is computed in vain when it is replaced.

    See `Pace.num_before_replaced`, which says how many.
    """

    __slots__ = ()

    def most_tokens(self, candidate: Candidate) -> float:
        request = candidate.request
        if request.is_complete or request.num_step_tokens is None:
            return NO_LIMIT
        return request.num_step_tokens
