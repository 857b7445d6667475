"""Later hits: prefix hits for a request that already holds KV.

    held       [ b0 ][ b1 ][ b2 ..  ]            the last block is not full, and is given back
    cached                 [ b2 ][ b3 ][ b4 ]    by others
    then       [ b0 ][ b1 ][ b2 ][ b3 ][ b4 ]    at least one token is left to compute

vLLM looks up each request only once, before it holds any KV. But the prompts of streams grow, and others may have
computed the new part meanwhile. A block's hash covers its tokens and all before it, so a hit equals what would be
computed. A running request is sent to the model runner as a whole again, so that the runner learns of its new blocks.
"""

from collections.abc import Sequence

from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from streamrag.backends.vllm.scheduler.kv.replacement import drop_output_in_flight, free_blocks
from streamrag.backends.vllm.scheduler.request import StreamRequest, has_prompt_logprobs


def can_look_again(scheduler: Scheduler) -> bool:
    """Whether `LaterHits` can serve this engine: one kind of blocks, cached, with full attention, each hashed."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    if not scheduler.kv_cache_manager.enable_caching or len(groups) != 1:
        return False
    return type(groups[0].kv_cache_spec) is FullAttentionSpec and groups[0].block_size == scheduler.hash_block_size


class LaterHits:
    """Finds later hits in an engine for which `can_look_again` holds.

    includes_plain: whether plain requests are looked up again too, and not only streams.
    """

    def __init__(self, scheduler: Scheduler, *, includes_plain: bool) -> None:
        self._scheduler = scheduler
        self.includes_plain = includes_plain
        self._pool = scheduler.kv_cache_manager.block_pool
        (self._group,) = scheduler.kv_cache_manager.coordinator.single_type_managers
        self._group_ids = [self._group.kv_cache_group_id]
        self._block_size = self._group.block_size

    def find(self, request: StreamRequest) -> Sequence[KVCacheBlock]:
        """Return the cached blocks after the full ones of `request`; none if it may not take them. Changes nothing."""
        block_hashes = request.block_hashes
        start = request.num_computed_tokens // self._block_size
        end = min((request.num_tokens - 1) // self._block_size, len(block_hashes))
        found: list[KVCacheBlock] = []
        for index in range(start, end):
            cached = self._pool.get_cached_block(block_hashes[index], self._group_ids)
            if cached is None:
                break
            found += cached
        return found if found and self._may_take(request) else ()

    def _may_take(self, request: StreamRequest) -> bool:
        """Whether the request is a stream, or plain ones are included, may read the cache, and waits or runs."""
        if not (request.is_stream or self.includes_plain):
            return False
        if request.skip_reading_prefix_cache or has_prompt_logprobs(request) or request.has_encoder_inputs:
            return False
        return request.status in (RequestStatus.WAITING, RequestStatus.RUNNING)

    def num_needed(self, request: StreamRequest, found: Sequence[KVCacheBlock], num_tokens: int) -> int:
        """Return how many blocks must be free for `request` to take `found` and hold its first `num_tokens` tokens."""
        num_held = request.num_computed_tokens // self._block_size + len(found)
        num_blocks = -(-num_tokens // self._block_size)
        return max(num_blocks - num_held, 0) + sum(block.ref_cnt == 0 for block in found)

    def take(self, request: StreamRequest, found: Sequence[KVCacheBlock]) -> None:
        """Put `found` after the full blocks of `request`, which runs next. Nothing was allocated after the lookup."""
        start = request.num_computed_tokens // self._block_size
        self._pool.touch(found)
        blocks = self._group.req_to_blocks[request.request_id]
        given_back = blocks[start:]
        blocks[start:] = found
        self._group.num_cached_block[request.request_id] = len(blocks)
        free_blocks(self._scheduler, request, given_back)
        request.num_computed_tokens = len(blocks) * self._block_size
        request.view = None
        drop_output_in_flight(request)  # there is none: a prompt that is not computed to its end samples no token
