"""Steps are lean: nobody who waits for an answer waits for a long step of partial prompts."""

from collections.abc import Callable

from streamrag.engine.rules.rule import TokenRule
from streamrag.engine.walk import Candidate, Walk

NO_LIMIT = 1 << 62

BACKLOG_SHARE = 1 / 32
"""Share of what waits to be computed up to which partial prompts fill any step: who has that much before it is hardly
delayed by so much more, and long steps have less overhead. Source: our simulations of arXiv 2604.16395's crawls."""


class LeanPartials(TokenRule):
    """Limits the tokens of partial prompts in a step, with none beside a complete one, but for a share of the backlog.

    num_tokens: returns the most of them in a step; None for no limit.
    num_blocks_short: with so few free blocks memory is short, and who waits for it is no backlog.
    """

    __slots__ = ("_num_blocks_short", "_num_filling", "_num_left", "_num_tokens")

    asks_complete = False

    def __init__(self, num_tokens: Callable[[], int | None], num_blocks_short: int = 0) -> None:
        self._num_tokens = num_tokens
        self._num_blocks_short = num_blocks_short

    def start(self, walk: Walk) -> None:
        num_tokens = self._num_tokens()
        self._num_left = NO_LIMIT if num_tokens is None else num_tokens
        self._num_filling = NO_LIMIT if num_tokens is None else -1  # worked out for the first partial prompt

    def most_tokens(self, candidate: Candidate) -> float:
        walk = candidate.walk
        if self._num_filling < 0:
            self._num_filling = num_filling_tokens(walk, self._num_blocks_short)
        most = max(self._num_left, self._num_filling - (walk.num_tokens - walk.num_tokens_left))
        if most <= 0:
            walk.closed_to_partial_by = type(self).__name__
        return most

    def on_grant(self, candidate: Candidate) -> None:
        if not candidate.request.is_complete:
            self._num_left -= candidate.num_allowed
        elif not candidate.request.has_output:
            self._num_left = 0


def num_filling_tokens(walk: Walk, num_blocks_short: int) -> int:
    """Return the size of a step up to which partial prompts may compute in any case.

    A backlog is what must be computed sooner or later. That is not known of speculative prompts, nor of those that must
    wait for memory: others may be complete first.
    """
    is_memory_short = walk.memory.num_free_blocks <= num_blocks_short
    num_tokens = 0
    for request in walk.order:
        if request.is_complete or not (request.is_speculative or (is_memory_short and not request.num_blocks)):
            num_before, num_kept = request.num_computed_tokens, request.num_kept_tokens
            num_tokens += request.num_tokens - (num_before if num_before > num_kept else num_kept)
    return int(num_tokens * BACKLOG_SHARE)
