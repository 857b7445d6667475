"""Loads that may fail, which is known only when their step ends, and the KV that would be wrong then.

step 7    loads block 3, and computes blocks 4 and 5 from it       3, 4, 5 ┐ suspects, until the outcome
step 8    another request has block 4 in front of its block 6         4, 6 ┘ of step 7's load is known
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Suspects(NamedTuple):
    """KV that is wrong if a load of a step, or of an earlier step in flight, has failed."""

    keys: Mapping[int, Any]  # keys of the blocks that the step loads, by device block
    blocks: set[int]  # device blocks that the step loads into, and blocks that are computed from them
    requests: set[str]  # ids of requests that read these blocks


class LoadsInFlight:
    """The loads of steps whose output is outstanding. Steps end in the order of their start."""

    def __init__(self, blocks_of: Mapping[str, Sequence["KVCacheBlock"]]) -> None:
        self._blocks_of = blocks_of  # the current blocks of each request, by request id
        self._in_flight: deque[Suspects] = deque()
        self._ended = Suspects({}, set(), set())

    def uncertain_blocks(self) -> set[int]:
        """Return the blocks whose content depends on a load with an unknown outcome."""
        return set().union(*(suspects.blocks for suspects in self._in_flight))

    def on_step(self, request_ids: Iterable[str], keys: Mapping[int, Any]) -> None:
        """Register a step, its loads `keys` by device block, and what its requests compute from uncertain blocks."""
        suspects = Suspects(keys, set(keys), set())
        suspect_ids = suspects.blocks | self.uncertain_blocks()
        for request_id in request_ids if suspect_ids else ():
            block_ids = [block.block_id for block in self._blocks_of[request_id]]
            first = next((i for i, block_id in enumerate(block_ids) if block_id in suspect_ids), None)
            if first is not None:
                suspects.blocks.update(block_ids[first:])
                suspects.requests.add(request_id)
        self._in_flight.append(suspects)

    def on_step_end(self) -> None:
        self._ended = self._in_flight.popleft()

    def suspects_if_failed(self, block_ids: Collection[int]) -> Suspects:
        """Return the KV that is wrong, in steps in flight too, if these loads of the step that just ended failed."""
        steps = [self._ended, *self._in_flight]
        # Keys of the ended step only: the next step may already load something else into the same blocks.
        keys = {block_id: self._ended.keys[block_id] for block_id in block_ids}
        return Suspects(keys, set().union(*(s.blocks for s in steps)), set().union(*(s.requests for s in steps)))
