"""Data of sessions are computed only where memory is left for questions."""

from streamrag.engine.rules.rule import WaitRule
from streamrag.engine.walk import Candidate, Wait


class DataHighWater(WaitRule):
    """Lets data of sessions wait unless blocks stay free for questions.

    Data take memory from nobody.

    num_blocks: so many stay free.
    """

    __slots__ = ("_num_blocks",)

    asks_complete = False

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def must_wait(self, candidate: Candidate) -> Wait | None:
        if candidate.request.request_class != "stream":
            return None
        candidate.may_evict = False
        return Wait.RESERVE if -self._num_blocks < candidate.num_missing <= 0 else None
