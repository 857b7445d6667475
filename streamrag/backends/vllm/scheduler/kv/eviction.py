"""Evictions: requests lose their KV, which is dropped, or saved to host memory."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from streamrag.backends.vllm.scheduler.host_memory.loads import Suspects
from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory
from streamrag.backends.vllm.scheduler.kv.claims import KvClaims
from streamrag.backends.vllm.scheduler.kv.replacement import release_kv
from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.request_log import HostClock
from streamrag.engine import Fate, RequestView
from streamrag.engine.swapping import DROPPED, Comparison


@dataclass(kw_only=True, eq=False)
class Evictions:
    """Takes KV from requests. `preempt_in_vllm` is vLLM's own `_preempt_request`, which calls no hook."""

    scheduler: Scheduler
    preempt_in_vllm: Callable[..., None]
    clock: HostClock
    claims: KvClaims
    host_memory: HostMemory | None

    def fate(self, view: RequestView) -> Fate:
        """Decide what becomes of the KV of a victim."""
        request = self.scheduler.requests[view.request_id]
        request.comparison = self._compare(request)
        return request.comparison.choice

    def evict(self, request: StreamRequest) -> None:
        """Take all KV of a request, which waits afterwards, or stays idle."""
        if request.status == RequestStatus.RUNNING:
            self.scheduler.running.remove(request)
            # It may be resumed in this very step, for which the first model runner must be sent its tokens.
            self.preempt(request)
        else:
            self.on_preemption(request)
            release_kv(self.scheduler, request)
            request.num_preemptions += 1

    def evict_all(self, requests: Iterable[StreamRequest]) -> None:
        """Evict those of some waiting or idle requests that hold KV."""
        for request in requests:
            if any(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)):
                self.evict(request)

    def preempt(self, request: StreamRequest) -> None:
        """Preempt a request that runs, and is in no queue any more."""
        self.on_preemption(request)
        self._preempt_now(request)

    def on_preemption(self, request: StreamRequest) -> None:
        """Note that a request is about to lose its KV, and have host memory save it if that is worth it."""
        self.claims.release(request)
        comparison = request.comparison or self._compare(request)
        request.num_kept_tokens = 0
        if self.host_memory is not None and comparison.choice == "swap":
            self.host_memory.on_release(request)
            request.num_kept_tokens = request.num_computed_tokens
        request.view = request.comparison = None
        request.was_evicted = True
        request.log.on_loss(request.num_computed_tokens, comparison, self.clock.monotonic())

    def on_failed_loads(self, block_ids: set[int]) -> set[str]:
        """Have those that hold KV that could not be loaded start again without it, idle streams included.

        Return their ids. vLLM's own way looks at the running requests only, and leaves it to the order in which they
        run next that one of those that share a block computes it before the others read it.
        """
        assert self.host_memory is not None
        wrong = self.host_memory.on_failed_loads(block_ids)
        self.scheduler.kv_cache_manager.evict_blocks(wrong.blocks)
        affected = [r for r in self.scheduler.requests.values() if self._is_affected(r, wrong)]
        for request in affected:
            self._restart(request)
        return {request.request_id for request in affected}

    def _compare(self, request: StreamRequest) -> Comparison:
        return DROPPED if self.host_memory is None else self.host_memory.compare(request)

    def _is_affected(self, request: StreamRequest, wrong: Suspects) -> bool:
        if request.is_finished():
            return False
        (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        # Who has lost the blocks since may still be sent what was computed from them.
        return request.request_id in wrong.requests or not wrong.blocks.isdisjoint(block_ids)

    def _restart(self, request: StreamRequest) -> None:
        """Drop all KV of a request, and what its steps in flight return."""
        self.claims.release(request)
        request.view = None
        if request.num_computed_tokens:
            request.log.on_loss(request.num_computed_tokens, DROPPED, self.clock.monotonic())
        if request.status == RequestStatus.RUNNING:
            self.scheduler.running.remove(request)
            self._preempt_now(request, drop_stale_output=True)
        else:
            release_kv(self.scheduler, request)

    def _preempt_now(self, request: StreamRequest, *, drop_stale_output: bool = False) -> None:
        self.preempt_in_vllm(request, time.monotonic(), drop_stale_output)
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
