"""Partial prompts mostly take memory from nobody."""

from collections.abc import Callable

from streamrag.engine.rules.rule import EvictionRule
from streamrag.engine.walk import Candidate, Walk


class PartialEviction(EvictionRule):
    """Lets partial prompts take memory from others where it does not make them thrash.

    Those that only grow are served well by it where what is lost is copied back and not computed again: little is left
    to compute when they are complete.

    can_partial: whether all partial prompts may.
    can_growing: whether those may, now, of which nothing is replaced.
    """

    __slots__ = ("_can_growing", "_can_growing_now", "_can_partial")

    asks_complete = False

    def __init__(self, can_partial: bool = False, can_growing: Callable[[], bool] = lambda: False) -> None:
        self._can_partial = can_partial
        self._can_growing = can_growing

    def start(self, walk: Walk) -> None:
        self._can_growing_now = self._can_growing()

    def may_evict(self, candidate: Candidate) -> bool:
        return self._can_partial or (self._can_growing_now and not candidate.request.is_speculative)
