"""Not everybody is asked in each step whether it fits."""

from streamrag.engine.rules.rule import WaitRule
from streamrag.engine.walk import Candidate, Wait, Walk

MOST_TRIES = 4
"""New requests in a step that are found not to fit, before only those are asked whose turn it is: what each needs is
costly to know, they are many when memory is short, and hardly anybody fits then."""

NUM_IN_TURN = 4
"""Positions of the order that have their turn in a step, so that everybody is asked some time."""


class Turns(WaitRule):
    """Keeps planning short where memory is: once some partial prompts do not fit, others are asked in turn."""

    __slots__ = ("_turn",)

    asks_complete = False
    only_saves_time = True

    def __init__(self, turn: int = 0) -> None:
        self._turn = turn - 1

    def start(self, walk: Walk) -> None:
        self._turn += 1

    def must_wait(self, candidate: Candidate) -> Wait | None:
        if candidate.walk.num_unfit < MOST_TRIES or not candidate.is_new or candidate.may_evict:
            return None
        num = len(candidate.walk.order)
        has_turn = (candidate.position - self._turn * NUM_IN_TURN) % num < NUM_IN_TURN
        return None if has_turn else Wait.SKIP
