"""Evictions: taking KV from requests. The KV is dropped, or saved to host memory."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from streamrag.backends.vllm.scheduler.host_memory.loads import Suspects
from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory
from streamrag.backends.vllm.scheduler.kv.replacement import release_kv
from streamrag.backends.vllm.scheduler.request import StreamRequest, has_prompt_logprobs
from streamrag.backends.vllm.scheduler.request_log import HostClock
from streamrag.engine import Fate, RequestView
from streamrag.engine.recompute_or_swap import DROPPED, CostComparison
from streamrag.engine.rules import KvBudgetLeft


class KvClaims:
    """Counts the KV blocks that requests claim of a budget: `share` of `num_blocks`; None for no budget."""

    def __init__(self, share: float | None, num_blocks: int) -> None:
        self._num_blocks = None if share is None else int(share * num_blocks)
        self._num_claimed = 0
        self._num_claims = 0

    @property
    def budget_left(self) -> KvBudgetLeft:
        """The blocks that further requests may claim. Only for an engine with a budget."""
        assert self._num_blocks is not None
        return KvBudgetLeft(self._num_blocks - self._num_claimed, has_claims=self._num_claims > 0)

    def claim(self, request: StreamRequest, num_blocks: int) -> None:
        """Add the claim of a request that begins and has no claim."""
        request.num_blocks_claimed, request.view = num_blocks, None
        self._num_claimed += num_blocks
        self._num_claims += 1

    def release(self, request: StreamRequest) -> None:
        """Remove the claim, if any, of a request that has lost its KV or has ended."""
        if request.num_blocks_claimed is not None:
            self._num_claimed -= request.num_blocks_claimed
            self._num_claims -= 1
            request.num_blocks_claimed = request.view = None


@dataclass(eq=False)
class Evictions:
    """Takes KV from requests. `preempt_in_vllm` is vLLM's own `_preempt_request`; calling it runs no hook."""

    scheduler: Scheduler
    preempt_in_vllm: Callable[..., None]
    clock: HostClock
    claims: KvClaims
    host_memory: HostMemory | None
    theirs_may_load: bool

    def fate(self, view: RequestView) -> Fate:
        """Choose the fate of a planned victim's KV, and keep the comparison until `evict` logs it."""
        request = self.scheduler.requests[view.request_id]
        request.comparison = self._compare(request)
        return request.comparison.choice

    def evict(self, request: StreamRequest) -> None:
        """Take all KV of a request. The request then waits, or stays idle."""
        if request.status == RequestStatus.RUNNING:
            self.scheduler.running.remove(request)
            # It may be resumed in this very step, and then the first model runner must be sent its tokens.
            self.preempt(request)
        else:
            self.on_preemption(request)
            release_kv(self.scheduler, request)
            request.num_preemptions += 1

    def evict_all(self, requests: Iterable[StreamRequest]) -> None:
        """Evict each waiting or idle request that holds KV."""
        for request in requests:
            if any(self.scheduler.kv_cache_manager.get_block_ids(request.request_id)):
                self.evict(request)

    def preempt(self, request: StreamRequest) -> None:
        """Preempt a running request that has been removed from all queues."""
        self.on_preemption(request)
        self._preempt_now(request)

    def on_preemption(self, request: StreamRequest) -> None:
        """Update the state and log of a request that is about to lose its KV; have host memory save it if worth it."""
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
        """Restart the unfinished requests that hold KV of failed loads, or have computed from it; return their ids.

        Idle streams are included. The wrong KV is dropped from host memory and the prefix cache, too.
        vLLM's own method checks only running requests, and relies on their order to recompute a shared block before
        others read it.
        """
        assert self.host_memory is not None
        wrong = self.host_memory.on_failed_loads(block_ids)
        self.scheduler.kv_cache_manager.evict_blocks(wrong.blocks)
        affected = [r for r in self.scheduler.requests.values() if self._is_affected(r, wrong)]
        for request in affected:
            self._restart(request)
        return {request.request_id for request in affected}

    def on_their_failed_loads(self, request_ids: Iterable[str]) -> None:
        """Forget KV that a third-party connector failed to load, and what was computed from it: vLLM computes it again,
        but keeps it in the prefix cache meanwhile, and the request could be evicted before."""
        manager = self.scheduler.kv_cache_manager
        (group,) = manager.coordinator.single_type_managers  # vLLM raises for more
        for request_id in request_ids:
            request = self.scheduler.requests[request_id]
            num_valid = request.num_computed_tokens // group.block_size
            manager.evict_blocks({block.block_id for block in group.req_to_blocks[request_id][num_valid:]})
            if request_id in group.num_cached_block:
                group.num_cached_block[request_id] = min(group.num_cached_block[request_id], num_valid)
            request.log.num_present = min(request.log.num_present, request.num_computed_tokens)
            request.view = None

    def _compare(self, request: StreamRequest) -> CostComparison:
        return DROPPED if self.host_memory is None else self.host_memory.compare(request)

    def _is_affected(self, request: StreamRequest, wrong: Suspects) -> bool:
        """Whether an unfinished request holds a wrong block, or has computed from one."""
        if request.is_finished():
            return False
        (block_ids,) = self.scheduler.kv_cache_manager.get_block_ids(request.request_id)
        # A request that has lost such blocks since may still be sent output that was computed from them.
        return request.request_id in wrong.requests or not wrong.blocks.isdisjoint(block_ids)

    def _restart(self, request: StreamRequest) -> None:
        """Drop all KV of a request, and the output of its steps in flight. A running one waits again."""
        self.claims.release(request)
        request.view = None
        if request.num_computed_tokens:
            request.log.on_loss(request.num_computed_tokens, DROPPED, self.clock.monotonic())
        if request.status == RequestStatus.RUNNING:
            self.scheduler.running.remove(request)
            self._preempt_now(request, drop_stale_output=True)
        else:
            release_kv(self.scheduler, request)
            self.on_dropped_output(request)

    def on_dropped_output(self, request: StreamRequest) -> None:
        """Have the log-probabilities of a prompt made again, as the output that had them may have been dropped. The
        first model runner makes them only for a request that it does not know."""
        if has_prompt_logprobs(request) and not request.num_output_tokens:
            self.scheduler.finished_req_ids.add(request.request_id)
            request.status = RequestStatus.WAITING

    def _preempt_now(self, request: StreamRequest, *, drop_stale_output: bool = False) -> None:
        """Preempt a running request in vLLM. Its output in flight is dropped if a third-party connector hands over the
        KV of finished requests, because it could finish without KV, or loads KV, which may fail in that step."""
        drop_stale_output = drop_stale_output or self.scheduler.requires_kv_delivery or self.theirs_may_load
        self.preempt_in_vllm(request, time.monotonic(), drop_stale_output)
        self.scheduler.prev_step_scheduled_req_ids.discard(request.request_id)
        if drop_stale_output:
            self.on_dropped_output(request)
