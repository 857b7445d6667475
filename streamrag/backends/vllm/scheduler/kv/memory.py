"""vLLM's KV cache, as the planner sees it."""

from collections.abc import Hashable, Iterable, Sequence
from typing import NamedTuple

from vllm.utils.math_utils import cdiv
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.kv_cache_utils import KVCacheBlock
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory
from streamrag.backends.vllm.scheduler.kv.later_hits import LaterHits
from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.engine import RequestView
from streamrag.engine.rules import NextBlock
from streamrag.engine.walk import Wait
from streamrag.records import KvHeld, KvUse


class _Hit(NamedTuple):
    """KV that exists for a request."""

    blocks: KVCacheBlocks  # blocks in the prefix cache
    num_local: int  # number of tokens in these blocks, or in those that the request holds
    num_tokens: int  # number of tokens, including those that would be loaded


class KvMemory:
    """An `engine.Memory` over vLLM's KV cache. Its counts match what `Scheduler.schedule` allocates afterwards."""

    def __init__(
        self, scheduler: Scheduler, host_memory: HostMemory | None, later_hits: LaterHits | None, theirs_may_load: bool
    ) -> None:
        self._scheduler = scheduler
        self._host_memory = host_memory
        self._manager = scheduler.kv_cache_manager
        self.groups = self._manager.coordinator.single_type_managers
        self.num_device_blocks: int = self._manager.block_pool.num_gpu_blocks
        self.smallest_block_size = min(group.block_size for group in self.groups)
        self.prefill_unit = scheduler.block_size if scheduler.need_mamba_block_aligned_split else 1
        """Prompts are computed in multiples of this many tokens, except for the end of a complete one."""
        self._requests: dict[str, StreamRequest] = scheduler.requests
        self.later_hits = later_hits
        self.theirs_may_load = theirs_may_load  # whether there is a third-party KV connector that may load KV
        self.next_block: NextBlock | None = self._next_block if later_hits and later_hits.includes_plain else None
        """See `engine.rules.NextBlock`; None if prefills are not grouped."""
        self._hits: dict[str, _Hit] = {}
        self._found: dict[str, Sequence[KVCacheBlock]] = {}
        self.num_free_blocks = 0
        self.has_pending_lookup = False
        """Whether a third-party connector could not say yet what it would load of a partial prompt."""

    def start_step(self) -> None:
        """Discard the lookups of the last step, and count the free blocks."""
        self.end_step()
        self._manager.new_step_starts()  # states of Mamba layers that the last step computes may be used from now on
        self.num_free_blocks = self._manager.block_pool.get_num_free_blocks()
        self.has_pending_lookup = False

    def end_step(self) -> None:
        """Discard all lookups, because requests may be gone by the next step."""
        self._hits.clear()
        self._found.clear()

    def use(self, idle: Iterable[Request]) -> KvUse:
        """Return the current use of KV memory; `idle` are the requests outside vLLM's queues."""
        scheduler, pool = self._scheduler, self._host_memory.pool if self._host_memory else None
        num_blocks = self.num_device_blocks - 1  # vLLM reserves one null block
        return KvUse(
            running=_held(scheduler.running),
            waiting=_held(scheduler.waiting),
            idle=_held(idle),
            num_capacity=num_blocks * self.smallest_block_size // len(self.groups),
            num_host=pool.num_used * self.smallest_block_size if pool else 0,
            num_host_capacity=pool.num_slots * self.smallest_block_size if pool else 0,
        )

    def num_blocks(self, request: StreamRequest) -> int:
        return sum(len(group.req_to_blocks.get(request.request_id, ())) for group in self.groups)

    def cached_view(self, request: StreamRequest, is_idle: bool = False) -> RequestView:
        """Return the view of a request, which is made again only after something has set `request.view` to None."""
        if request.view is None:
            request.view = request.make_view(self.num_blocks(request), is_idle)
        return request.view

    def with_prefix_hit(self, view: RequestView) -> RequestView:
        """Return the view with the tokens that caches have for it; unchanged if it holds KV or they have none."""
        if view.num_blocks or not self._may_hit(view):
            return view
        return view._replace(num_cached_tokens=self._hit(view).num_tokens)

    def _may_hit(self, view: RequestView) -> bool:
        """Whether a lookup could find anything. With one kind of blocks and no host memory, the first one decides."""
        if self._host_memory is not None or len(self.groups) > 1:
            return True
        hashes = self._requests[view.request_id].block_hashes
        return bool(hashes) and self._manager.block_pool.get_cached_block(hashes[0], [0]) is not None

    def _hit(self, view: RequestView) -> "_Hit":
        """Return what the caches have for a request without KV, looked up once per step. Lowers `num_kept_tokens` if
        host memory has dropped blocks."""
        if view.request_id not in self._hits:
            request = self._requests[view.request_id]
            blocks, num_local, _ = self._manager.get_computed_blocks(request)
            match = self._host_memory.look_up(request, num_local) if self._host_memory else None
            hit = _Hit(blocks, num_local, num_local + (match.num_tokens if match else 0))
            self._hits[view.request_id] = hit
            if hit.num_tokens < request.num_kept_tokens - self.smallest_block_size:
                request.num_kept_tokens = hit.num_tokens  # host memory has dropped some blocks
                request.view = None
        return self._hits[view.request_id]

    def connector_wait(self, request: RequestView) -> Wait | None:
        """Return how a partial prompt without KV has to wait for a third-party connector; None if it need not.

        It waits until it is complete (`MEMORY`) if the connector would load it between steps, when a chunk may change
        it, or as a whole: vLLM admits none without a token to compute.
        """
        if request.num_blocks:
            return None
        vllm_request, hit = self._requests[request.request_id], self._hit(request)
        num_aligned = hit.num_local - hit.num_local % self._scheduler.block_size
        # Without an effect, by the connectors' interface: vLLM will ask again.
        num_loaded, is_async = self._scheduler.connector.get_num_new_matched_tokens(vllm_request, num_aligned)
        self.has_pending_lookup |= num_loaded is None
        if num_loaded is None:
            return Wait.SKIP
        if vllm_request.skip_reading_prefix_cache or num_aligned + num_loaded <= hit.num_local:
            return None
        self._hits[request.request_id] = hit._replace(num_tokens=num_aligned + num_loaded)
        return Wait.MEMORY if is_async or num_aligned + num_loaded >= request.num_tokens else None

    def num_present_tokens(self, request: RequestView) -> int:
        """Return how many leading tokens a request need not compute, because it holds them or finds them in caches: all
        while a third-party connector looks them up."""
        if self._requests[request.request_id].awaits_connector:
            return request.num_tokens
        if not request.num_blocks:
            return self._hit(request).num_tokens
        found = self._find_later_hits(request)
        if not found:
            return request.num_computed_tokens
        return (request.num_computed_tokens // self.smallest_block_size + len(found)) * self.smallest_block_size

    def _find_later_hits(self, request: RequestView) -> Sequence[KVCacheBlock]:
        """Return cached blocks after the request's own, looked up once per step; none for a request that has output, or
        that runs and would have to wait for memory to take them."""
        if self.later_hits is None or request.has_output:
            return ()
        if request.request_id not in self._found:
            vllm_request = self._requests[request.request_id]
            found = self.later_hits.find(vllm_request)
            # A running request would be admitted again, like a waiting one. It must not have to wait for memory then.
            if found and request.is_running and self._num_needed_with(vllm_request, found, 0) > self.num_free_blocks:
                found = ()
            self._found[request.request_id] = found
        return self._found[request.request_id]

    def _num_needed_with(self, request: StreamRequest, found: Sequence[KVCacheBlock], end: int) -> int:
        """Return how many blocks must be free for `request` to take `found` and to compute its tokens before `end`."""
        assert self.later_hits is not None
        num_tokens = request.num_tokens if self._scheduler.scheduler_reserve_full_isl else end
        return self.later_hits.num_needed(request, found, num_tokens) + self._manager.watermark_blocks

    def take_later_hits(self, view: RequestView) -> bool:
        """Add the later hits found in this step, if any, to a request. Return whether there are any."""
        found = self._found.get(view.request_id)
        if not found:
            return False
        assert self.later_hits is not None
        self.later_hits.take(self._requests[view.request_id], found)
        return True

    def _next_block(self, request: RequestView, num_tokens: int) -> Hashable | None:
        """Return the hash of the block after `num_tokens` tokens; None if it is not full, or caches are not read."""
        vllm_request = self._requests[request.request_id]
        index = num_tokens // self.smallest_block_size
        is_full = index < len(vllm_request.block_hashes) and not vllm_request.skip_reading_prefix_cache
        return vllm_request.block_hashes[index] if is_full else None

    def num_blocks_needed(self, request: RequestView, num_tokens: int) -> int:
        """Return how many blocks must be free for a request to compute `num_tokens` more.

        If the request must be admitted, as a running one that takes later hits must again, the number includes vLLM's
        watermark, and is enough for the whole prompt if vLLM reserves for that.
        """
        vllm_request = self._requests[request.request_id]
        if vllm_request.awaits_connector:
            return 0
        if found := self._found.get(request.request_id):
            return self._num_needed_with(vllm_request, found, self.num_present_tokens(request) + num_tokens)
        is_running = vllm_request.status == RequestStatus.RUNNING
        if is_running and len(self.groups) == 1:
            num_blocks = cdiv(request.num_computed_tokens + num_tokens, self.groups[0].block_size)
            return max(num_blocks - request.num_blocks, 0)
        if request.num_blocks:
            num_computed = request.num_computed_tokens
            hit = _Hit(self._manager.empty_kv_cache_blocks, num_computed, num_computed)
        else:
            hit = self._hit(request)
        num_needed = self._num_to_allocate(vllm_request, hit, hit.num_tokens + num_tokens, is_whole=False)
        if is_running:
            return num_needed
        # To be admitted, a request must fit as a whole, not only this step's part. For a sliding window, vLLM caps the
        # estimate for the whole, which may then be less than the part.
        if self._scheduler.scheduler_reserve_full_isl:
            whole = self._num_to_allocate(vllm_request, hit, vllm_request.num_tokens, is_whole=True)
            num_needed = max(num_needed, whole)
        return num_needed + self._manager.watermark_blocks

    def _num_to_allocate(self, request: StreamRequest, hit: "_Hit", num_tokens: int, *, is_whole: bool) -> int:
        """Return how many free blocks vLLM takes until a request with this hit has `num_tokens` tokens.

        With `is_whole`, vLLM caps the number for sliding windows, as at admission.
        """
        num_tokens = min(num_tokens, self._scheduler.max_model_len)
        return self._manager.coordinator.get_num_blocks_to_allocate(
            request_id=request.request_id,
            num_tokens=num_tokens,
            new_computed_blocks=hit.blocks.blocks,
            num_encoder_tokens=0,
            total_computed_tokens=hit.num_tokens,
            num_local_computed_tokens=hit.num_local,
            num_tokens_main_model=num_tokens,
            apply_admission_cap=is_whole,
            prefill_end=max(request.num_prompt_tokens, request.num_tokens - 1),
        )

    def can_evict(self, request: RequestView) -> bool:
        return self._scheduler._request_blocks_can_be_freed(self._requests[request.request_id])

    def num_blocks_freed(self, request: RequestView) -> int:
        held = (group.req_to_blocks.get(request.request_id, ()) for group in self.groups)
        return sum(block.ref_cnt == 1 and not block.is_null for blocks in held for block in blocks)


def _held(requests: Iterable[Request]) -> KvHeld:
    num_tokens = [request.num_computed_tokens for request in requests]
    return KvHeld(len(num_tokens), sum(num_tokens))
