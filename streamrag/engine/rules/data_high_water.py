"""Data of sessions are computed only where memory is left for questions."""

from streamrag.engine.rules.data_share import is_data
from streamrag.engine.rules.rule import WaitRule
from streamrag.engine.walk import Candidate, Wait


class DataHighWater(WaitRule):
    """Lets data of sessions wait unless blocks stay free for questions. They take memory from nobody.

    num_blocks: so many.
    """

    __slots__ = ("_num_blocks",)

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def must_wait(self, candidate: Candidate) -> Wait | None:
        if not is_data(candidate):
            return None
        candidate.may_evict = False
        return Wait.RESERVE if -self._num_blocks < candidate.num_missing <= 0 else None
