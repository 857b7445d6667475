"""Data of one session have no more than their share of a step."""

from streamrag.engine.rules.lean_partials import NO_LIMIT
from streamrag.engine.rules.rule import TokenRule
from streamrag.engine.walk import Candidate, Walk

LEAST_DATA_TOKENS = 128
"""Least tokens of a session's data in a step, however many other prompts there are: shorter steps are hardly quicker.
Source: arXiv 2605.13784, section 3.7."""


class DataShare(TokenRule):
    """Limits one session's data to an equal share of a step among all that have prompts to compute.

    num_tokens: the most that a share may be; `LEAST_DATA_TOKENS` is the least.
    """

    __slots__ = ("_num_share", "_num_tokens")

    asks_complete = False

    def __init__(self, num_tokens: int) -> None:
        self._num_tokens = num_tokens

    def start(self, walk: Walk) -> None:
        num_prompts = sum(r.num_remaining_tokens > 0 and not r.has_output for r in walk.order)
        share = (walk.num_tokens + walk.num_ahead) // max(num_prompts, 1)
        self._num_share = min(max(share, LEAST_DATA_TOKENS), self._num_tokens)

    def most_tokens(self, candidate: Candidate) -> float:
        return self._num_share if candidate.request.request_class == "stream" else NO_LIMIT
