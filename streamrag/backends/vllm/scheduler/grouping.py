"""Followers of grouped prefill: what others have computed meanwhile is taken from the prefix cache.

    held       [ b0 ][ b1 ][ b2 ..  ]            the last block is not whole, and is given back
    cached                 [ b2 ][ b3 ][ b4 ]    by others
    then       [ b0 ][ b1 ][ b2 ][ b3 ][ b4 ]    one token at least is left to compute

vLLM looks only for those that hold nothing.
"""

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import RequestStatus

from streamrag.backends.vllm.scheduler.request import StreamRequest


def can_group(scheduler: Scheduler) -> bool:
    """Whether blocks are cached, and of one kind that is kept whole."""
    groups = scheduler.kv_cache_manager.coordinator.single_type_managers
    is_cached = scheduler.kv_cache_manager.enable_caching
    return is_cached and len(groups) == 1 and type(groups[0].kv_cache_spec) is FullAttentionSpec


def take_cached(scheduler: Scheduler, request: StreamRequest) -> None:
    """Give a request that waits with some KV whatever the prefix cache has behind that."""
    if not request.num_computed_tokens or request.status != RequestStatus.WAITING or request.num_in_flight_tokens:
        return
    manager = scheduler.kv_cache_manager
    (group,) = manager.coordinator.single_type_managers
    start, end = request.num_computed_tokens // group.block_size, (request.num_tokens - 1) // group.block_size
    found = []
    for block_hash in request.block_hashes[start:end]:
        cached = manager.block_pool.get_cached_block(block_hash, [group.kv_cache_group_id])
        if cached is None:
            break
        found += cached
    if not found or request.skip_reading_prefix_cache:
        return
    manager.block_pool.touch(found)
    blocks = group.req_to_blocks[request.request_id]
    given_back = blocks[start:]
    blocks[start:] = found
    manager.block_pool.free_blocks(reversed(given_back))
    group.num_cached_block[request.request_id] = len(blocks)
    request.num_computed_tokens = len(blocks) * group.block_size
    request.view = None
