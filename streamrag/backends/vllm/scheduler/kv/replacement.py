"""Replace the prompt of a request inside vLLM, and keep the KV that is still valid.

computed   ├──────────────────────┤
old        k k k k k k k k o o o o o o          k: common, o: only in the old prompt, n: only in the new
new        k k k k k k k k n n n
LCP        ├─────────────┤
blocks     [       ][       ][       ]          the block in which the LCP ends is kept only if it is not shared
"""

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.request import Request

from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.backends.vllm.scheduler.request import PromptUpdate, StreamRequest
from streamrag.core import common_prefix_len
from streamrag.records import ChunkRecord


def replace_prompt(
    scheduler: Scheduler, stream: StreamRequest, message: PromptMessage, chunk: Request, arrival_s: float
) -> PromptUpdate:
    """Replace the prompt and the parameters of `stream` by those of a further chunk, and return the update.

    Frees the KV after the LCP. The stream must have no output; the output of its steps in flight is dropped.
    """
    num_old, num_computed = stream.num_all_tokens, stream.num_computed_tokens
    gap_s = max(arrival_s - stream.last_chunk_s, 0.0)  # clients report arrival times, which may be wrong
    stream.is_complete = message.is_complete  # before hashing: a complete prompt has one token more to hash
    num_shared = _replace_tokens(scheduler, stream, message.num_kept, chunk)
    stream.num_messages += 1
    stream.last_chunk_s, stream.expected_complete_s = arrival_s, message.expected_complete_s
    stream.view = None
    stream.sampling_params = chunk.sampling_params
    stream.limit_answer(chunk.max_tokens, scheduler.max_model_len)
    record = ChunkRecord(arrival_s, stream.num_prompt_tokens, num_shared, num_computed)
    return PromptUpdate(record, message.source_name, num_old, gap_s)


def _replace_tokens(scheduler: Scheduler, request: StreamRequest, num_kept: int, new: Request) -> int:
    """Set the prompt to its first `num_kept` tokens, then those of `new`. Return the length of the LCP."""
    assert request.num_output_tokens == 0
    assert request.num_output_placeholders == 0
    assert new.prompt_token_ids is not None
    tokens = request._all_token_ids
    new_tokens = tokens[:num_kept] + new.prompt_token_ids if num_kept else new.prompt_token_ids
    num_shared = common_prefix_len(tokens, new_tokens, start=num_kept)
    num_valid = min(request.num_computed_tokens, num_shared, len(new_tokens) - 1)
    num_left = truncate_kv(scheduler, request, num_valid)
    # In place: vLLM's read-only view refers to this list.
    del tokens[num_shared:]
    tokens.extend(new_tokens[num_shared:])
    # Not in place: an in-process model runner refers to the old list.
    request.prompt_token_ids = tokens.copy()
    request.num_prompt_tokens = len(tokens)
    if num_kept == 0:
        request.block_hashes = new.block_hashes  # of the whole prompt
    else:
        del request.block_hashes[num_shared // scheduler.hash_block_size :]
        request.update_block_hashes()
    request.num_computed_tokens = num_left
    request.num_kept_tokens = min(request.num_kept_tokens, num_shared)
    request.is_prefill_chunk = True
    request.spec_token_ids = []
    drop_output_in_flight(request)
    return num_shared


def drop_output_in_flight(request: StreamRequest) -> None:
    """Have the scheduler drop the output of steps in flight, which was computed from the old prompt."""
    request.num_stale_output_tokens = request.num_in_flight_tokens
    request.drop_stale_output = request.num_in_flight_tokens > 0


def truncate_kv(scheduler: Scheduler, request: StreamRequest, num_valid: int) -> int:
    """Free the KV after the first `num_valid` tokens. Return the number of tokens whose KV is left.

    The number is less than `num_valid` where a full block is shared through the prefix cache, and must not be written
    again. For models without plain full attention it is 0, and prefix hits restore the KV. The caller sets the number
    as `num_computed_tokens`.
    """
    manager = scheduler.kv_cache_manager
    if num_valid >= request.num_computed_tokens:
        return request.num_computed_tokens
    managers = manager.coordinator.single_type_managers
    if len(managers) != 1 or type(managers[0].kv_cache_spec) is not FullAttentionSpec:
        release_kv(scheduler, request)
        return 0
    (group,) = managers
    blocks = group.req_to_blocks[request.request_id]
    index, offset = divmod(num_valid, group.block_size)
    if offset and not manager.block_pool.is_block_writable(blocks[index]):
        num_valid -= offset
    if num_valid == 0:
        release_kv(scheduler, request)
        return 0
    num_kept = cdiv(num_valid, group.block_size)
    freed = blocks[num_kept:]
    del blocks[num_kept:]
    if request.request_id in group.num_cached_block:
        num_full = num_valid // group.block_size
        group.num_cached_block[request.request_id] = min(group.num_cached_block[request.request_id], num_full)
    free_blocks(scheduler, request, freed)
    return num_valid


def free_blocks(scheduler: Scheduler, request: StreamRequest, freed: list[KVCacheBlock]) -> None:
    """Free what `request` does not hold any more, the last one first; later, if a step in flight may still write it."""
    if scheduler._request_blocks_can_be_freed(request):
        scheduler.kv_cache_manager.block_pool.free_blocks(reversed(freed))
    elif freed:
        scheduler.deferred_frees.append((scheduler.sched_step_seq, freed))


def release_kv(scheduler: Scheduler, request: StreamRequest) -> None:
    """Free all KV of a request that is not running, or will be queued anew before the next step.

    Blocks in the prefix cache stay there until they are reused.
    """
    scheduler._free_request_blocks(request)
    scheduler._inflight_prefills.discard(request)  # or vLLM would reserve memory for its load for ever
    request.num_computed_tokens = 0
    drop_output_in_flight(request)
