"""Loads that may have failed, as is known only once their step has ended, and what would be wrong then.

step 7    loads block 3, and computes blocks 4 and 5 from it       3, 4, 5 ┐ suspects, until it is known
step 8    another request has block 4 in front of its block 6         4, 6 ┘ that step 7 has loaded
"""

from collections import deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock


class Suspects(NamedTuple):
    """KV that is wrong if a load of a step, or of one before it, has failed."""

    keys: Mapping[int, Any]
    """Keys of the blocks that the step loads, by the device block that each is loaded into."""
    blocks: set[int]
    """Device blocks that the step loads into, and the blocks that are computed from them."""
    requests: set[str]
    """Requests that read them."""


class LoadsInFlight:
    """The loads of the steps whose output is still to come. Steps end in the order in which they start."""

    def __init__(self, blocks_of: Mapping[str, Sequence["KVCacheBlock"]]) -> None:
        self._blocks_of = blocks_of
        """Blocks at this moment, by request id."""
        self._in_flight: deque[Suspects] = deque()
        self._ended = Suspects({}, set(), set())

    def blocks(self) -> set[int]:
        """Return the blocks that may not hold what they should: the outcome is not known yet."""
        return set().union(*(suspects.blocks for suspects in self._in_flight))

    def on_step(self, request_ids: Iterable[str], keys: Mapping[int, Any]) -> None:
        """Note a step that starts, which computes some of these requests, and loads `keys`, by device block."""
        found = Suspects(keys, set(keys), set())
        known = found.blocks | self.blocks()
        for request_id in request_ids if known else ():
            block_ids = [block.block_id for block in self._blocks_of[request_id]]
            first = next((i for i, block_id in enumerate(block_ids) if block_id in known), None)
            if first is not None:
                found.blocks.update(block_ids[first:])
                found.requests.add(request_id)
        self._in_flight.append(found)

    def on_step_end(self) -> None:
        self._ended = self._in_flight.popleft()

    def wrong(self, block_ids: Collection[int]) -> Suspects:
        """Return what is wrong, in later steps too, if these loads of the step that has just ended failed."""
        steps = [self._ended, *self._in_flight]
        # The keys of that step: the next one may have loaded something else into the same blocks already.
        keys = {block_id: self._ended.keys[block_id] for block_id in block_ids}
        return Suspects(keys, set().union(*(s.blocks for s in steps)), set().union(*(s.requests for s in steps)))
