"""Bound the planning time when memory is short."""

from streamrag.engine.rules.rule import Rule
from streamrag.engine.walk import Candidate, Wait, Walk

MOST_TRIES = 4
"""Requests that are measured not to fit, before further ones are only examined in turn: measuring is costly, and when
memory is short, many requests wait and hardly any fits."""

NUM_IN_TURN = 4
"""Positions of the order that are examined in each step once `MOST_TRIES` is reached, so that all get their turn."""


class Turns(Rule):
    """Skips partial prompts that would start and may not evict, except some in turn, once `MOST_TRIES` did not fit."""

    asks_complete = False
    is_waived_if_idle = True

    def __init__(self, turn: int = 0) -> None:
        self._turn = turn - 1

    def start(self, walk: Walk) -> None:
        self._turn += 1

    def ask(self, candidate: Candidate) -> Wait | None:
        if candidate.walk.num_unfit < MOST_TRIES or not candidate.is_new or candidate.may_evict:
            return None
        num = len(candidate.walk.order)
        has_turn = (candidate.position - self._turn * NUM_IN_TURN) % num < NUM_IN_TURN
        return None if has_turn else Wait.SKIP
