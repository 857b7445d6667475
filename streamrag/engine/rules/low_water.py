"""Who has lost its KV starts again only where memory is plenty."""

from streamrag.engine.rules.rule import ReserveRule
from streamrag.engine.walk import Candidate


class LowWater(ReserveRule):
    """Keeps blocks free where a partial prompt that was evicted starts again.

    What it needs before it is complete is likely to be wanted by others soon, and then computed in vain a second time.

    num_blocks: so many stay free.
    """

    __slots__ = ("_num_blocks",)

    asks_complete = False

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks

    def num_reserved(self, candidate: Candidate) -> int | None:
        starts_again = candidate.is_new and candidate.request.was_evicted and not candidate.may_evict
        return self._num_blocks if starts_again else None
