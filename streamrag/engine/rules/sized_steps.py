"""Rules about the length of steps and when they are planned; see `streamrag.engine.step_size` for the costs."""

import math
from collections.abc import Callable, Sequence

from streamrag.engine.request import RequestView
from streamrag.engine.rules.rule import Rule, TokenRule
from streamrag.engine.step_size import StepSize
from streamrag.engine.walk import Candidate, Grant, Walk


class SizedSteps(TokenRule):
    """Ends a step where more tokens would delay other requests by more than they save.

    size: returns the estimated costs of steps; None while they are unknown.
    """

    def __init__(self, size: Callable[[], StepSize | None]) -> None:
        self._size = size

    def start(self, walk: Walk) -> None:
        size = self._estimate = self._size()
        self.num_waiting = 0.0 if size is None else count_waiting(walk.order, size)
        self._size_now = size if self.num_waiting else None
        self._num_ready, self._num_waiting = 0, self.num_waiting
        self._length_left = math.inf if self._size_now is None else self._size_now.longest(self.num_waiting)

    def most_tokens(self, candidate: Candidate) -> float:
        size = self._size_now
        if size is None:
            return math.inf
        num_present = candidate.num_present
        num_tokens = max(size.num_fitting(self._length_left, num_present), 1)
        request = candidate.request
        if request.is_complete and not request.has_output:
            length = size.length(int(min(candidate.num_tokens, num_tokens)), num_present)
            if not size.is_worth(length, self._num_ready, self._num_waiting):
                candidate.walk.closed_by = type(self).__name__
                return 0
        return num_tokens

    def on_grant(self, candidate: Candidate) -> None:
        if self._size_now is None:
            return
        request, num_present, num_tokens = candidate.request, candidate.num_present, candidate.num_allowed
        self._length_left -= self._size_now.length(num_tokens, num_present)
        if self._length_left < 1:
            candidate.walk.closed_by = type(self).__name__
        if request.is_complete and not request.has_output:
            self._num_waiting -= 1
            self._num_ready += num_present + num_tokens == request.num_tokens

    def is_long(self, grants: Sequence[Grant]) -> bool:
        """Whether a step of `grants` is so long that it should be planned late."""
        size = self._estimate
        if size is None:
            return False
        length = sum(size.length(g.num_tokens, g.request.num_tokens - g.request.num_likely_tokens) for g in grants)
        return size.is_better_late(length, self.num_waiting)


def count_waiting(order: Sequence[RequestView], size: StepSize) -> float:
    """Return how many complete prompts have tokens to compute, plus those that will arrive while these are computed."""
    num, length, pair = 0, 0.0, size.pair
    for request in order:
        if not request.is_complete or request.has_output:
            continue
        # `num_likely_tokens` and `StepSize.length`, inlined: hundreds of requests wait on a busy engine.
        num_before, num_kept = request.num_computed_tokens, request.num_kept_tokens
        if num_kept > num_before:
            num_before = num_kept
        num_likely = request.num_tokens - num_before
        if num_likely:
            num += 1
            length += num_likely * (1 + pair * (num_before + num_likely / 2))
    return num + size.arrivals * length


class LateBinding(Rule):
    """Puts off a step of partial prompts, or a long step, while another step computes.

    A prompt that becomes complete meanwhile can then join the step instead of waiting for its end.

    is_early: returns whether a step computes prompts now: then the next one need not be planned yet.
    sized: decides which steps of complete prompts are long; None if none is.
    """

    asks_complete = asks_partial = False

    def __init__(self, is_early: Callable[[], bool], sized: SizedSteps | None = None) -> None:
        self._is_early = is_early
        self._sized = sized

    def is_better_late(self, walk: Walk) -> bool:
        if walk.num_ahead or not self._is_early():
            return False
        if not any(grant.request.is_complete for grant in walk.grants):
            return True
        return self._sized is not None and self._sized.is_long(walk.grants)
