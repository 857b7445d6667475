"""Apply the plan of a step: evict, and show vLLM's `schedule` only the granted requests."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from streamrag.backends.vllm.scheduler.kv.eviction import Evictions, KvClaims
from streamrag.backends.vllm.scheduler.kv.memory import KvMemory
from streamrag.backends.vllm.scheduler.outbox import Outbox
from streamrag.backends.vllm.scheduler.queues import Queues
from streamrag.backends.vllm.scheduler.request import NEVER_LEFT, StreamRequest
from streamrag.backends.vllm.scheduler.step import PlannedStep, StepPlanner
from streamrag.backends.vllm.scheduler.steps_in_flight import StepsInFlight
from streamrag.engine import Grant


@dataclass(eq=False)
class PlanExecutor:
    """Applies the plan of each step, and records whether that step had anything to compute."""

    scheduler: Scheduler
    planner: StepPlanner
    steps: StepsInFlight
    evictions: Evictions
    claims: KvClaims
    kv_memory: KvMemory
    queues: Queues
    outbox: Outbox
    _num_free_when_stuck: int | None = None

    @property
    def is_stuck(self) -> bool:
        """Whether every request waited for memory when the last step was planned. vLLM's loop must sleep then."""
        return self._num_free_when_stuck is not None and not self.scheduler.deferred_frees

    @property
    def has_memory_changed(self) -> bool:
        """Whether the number of free blocks has changed since all requests got stuck."""
        return self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks() != self._num_free_when_stuck

    def forget_stuck(self) -> None:
        """Clear the stuck state, because another plan may find something to compute."""
        self._num_free_when_stuck = None

    @contextmanager
    def planned_step(self) -> Iterator[None]:
        """Plan a step and apply the plan. Within the context, vLLM's queues hold only requests that may run, and show
        only the granted part of their prompts; at the end, the other requests are put back."""
        step = self.planner.plan_step()
        step_plan, requests = step.plan, self.scheduler.requests
        self._update_stuck(step)
        if not step.order and not step.blocked:  # nothing to hide
            yield
            return
        for eviction in step_plan.evictions:
            self.evictions.evict(requests[eviction.request.request_id])
        granted = [requests[grant.request.request_id] for grant in step_plan.grants]
        for grant, request in zip(step_plan.grants, granted, strict=True):
            self._prepare(grant, request)
        for view in step_plan.waiting:
            self.outbox.acknowledge_waiting(requests[view.request_id])
        for grant, request in zip(step_plan.grants, granted, strict=True):
            self._limit_to_grant(grant, request)
        running, waiting = self.queues.hide_others(step.decoding, granted, step.order, step.blocked)
        try:
            with self._offered_rest(step, waiting) if self.kv_memory.theirs_may_load else nullcontext():
                yield
        finally:
            self.kv_memory.end_step()
            self.queues.put_back(running, waiting)
            for request in granted:
                request.step_end = None

    @contextmanager
    def _offered_rest(self, step: PlannedStep, hidden: list[StreamRequest]) -> Iterator[None]:
        """Within the context, have vLLM give tokens that a third-party connector saves, or still looks up, to complete
        prompts behind the grants, which are moved from `hidden`. At the end, mark the requests that it left without.
        """
        scheduler, most_tokens = self.scheduler, self.scheduler.max_num_scheduled_tokens
        if step.plan.is_full:
            num_ahead = sum(1 + len(r.spec_token_ids) for r in step.decoding if not r.ends_in_flight)
            scheduler.max_num_scheduled_tokens = num_ahead + sum(grant.num_tokens for grant in step.plan.grants)
            scheduler.waiting.extend(r for r in hidden if r.can_start)
            hidden[:] = [r for r in hidden if not r.can_start]
        # vLLM keeps free what loaded prompts still need, and starts none behind one whose load does not fit then.
        shown = sorted(scheduler.waiting, key=lambda request: not request.num_computed_tokens)
        scheduler.waiting.clear()
        scheduler.waiting.extend(shown)
        scheduler.deferred_waiting.difference_update(shown)
        try:
            yield
        finally:
            scheduler.max_num_scheduled_tokens = most_tokens
            granted = {grant.request.request_id for grant in step.plan.grants if grant.num_tokens}
            num_free = scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
            for request in shown:
                is_waiting = request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
                is_left = is_waiting and not request.num_computed_tokens
                is_looked_up = request in scheduler.deferred_waiting
                # Without memory for its load, vLLM leaves a request where it was, and its grant would starve others.
                if is_left and not is_looked_up and request.request_id in granted:
                    request.num_free_when_left = num_free
                    self.claims.release(request)
                elif not is_left or num_free > request.num_free_when_left:
                    request.num_free_when_left = NEVER_LEFT
                request.awaits_connector = is_left and (is_looked_up or request.num_free_when_left != NEVER_LEFT)

    def _update_stuck(self, step: PlannedStep) -> None:
        # Requests whose KV a connector loads asynchronously are in no plan; only a step learns that a load has ended.
        num_loads = len(self.scheduler.kv_holding_waiting)
        has_work = step.plan.grants or step.plan.is_put_off or step.decoding or step.blocked or num_loads
        is_stuck = not (has_work or self.scheduler.deferred_frees or self.kv_memory.has_pending_lookup)
        self._num_free_when_stuck = self.kv_memory.num_free_blocks if is_stuck else None

    def _prepare(self, grant: Grant, request: StreamRequest) -> None:
        """Claim KV of the budget for a granted request, and give it the later hits that were found for it, if any. They
        are logged, and a running request waits again, so that vLLM sends it as a whole."""
        if grant.num_blocks_claimed is not None:
            self.claims.claim(request, grant.num_blocks_claimed)
        if self.kv_memory.take_later_hits(grant.request):
            request.log.on_later_hit(request.num_computed_tokens, self.steps.start_s)
            self.queues.resubmit(request)

    def _limit_to_grant(self, grant: Grant, request: StreamRequest) -> None:
        """Show vLLM the prompt only to the end of its grant, or whole if another connector may load all of it."""
        end = self.kv_memory.num_present_tokens(grant.request) + grant.num_tokens
        # A third-party connector looks up all of a complete prompt.
        is_whole = self.kv_memory.theirs_may_load and request.is_complete and not grant.request.num_blocks
        if not is_whole and end < grant.request.num_tokens:
            request.end_step_at(end)
