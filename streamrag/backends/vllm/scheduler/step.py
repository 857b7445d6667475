"""The plan of one step: who may run, in which order, within which limits."""

from typing import NamedTuple

from vllm.v1.core.sched.scheduler import Scheduler

from streamrag.backends.vllm.options import SchedulerOptions
from streamrag.backends.vllm.scheduler.estimates import Estimates
from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory
from streamrag.backends.vllm.scheduler.kv.claims import KvClaims
from streamrag.backends.vllm.scheduler.kv.eviction import Evictions
from streamrag.backends.vllm.scheduler.kv.memory import KvMemory
from streamrag.backends.vllm.scheduler.queues import Queues
from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.steps_in_flight import StepsInFlight
from streamrag.engine import Limits, Plan, Policy, RequestView, plan


class PlannedStep(NamedTuple):
    """What was decided for one step."""

    plan: Plan
    order: list[RequestView]
    """Requests that the plan chose from, the most urgent first."""
    decoding: list[StreamRequest]
    """Requests that run ahead of the plan."""
    held_up: list[StreamRequest]
    """Requests that wait for something else than memory and budget."""


class StepPlanner:
    """Plans steps, and changes nothing by that."""

    def __init__(
        self,
        scheduler: Scheduler,
        options: SchedulerOptions,
        *,
        policy: Policy,
        steps: StepsInFlight,
        estimates: Estimates,
        queues: Queues,
        kv_memory: KvMemory,
        host_memory: HostMemory | None,
        claims: KvClaims,
        evictions: Evictions,
    ) -> None:
        self._scheduler = scheduler
        self._options = options
        self._policy = policy
        self._steps = steps
        self._estimates = estimates
        self._queues = queues
        self._kv_memory = kv_memory
        self._host_memory = host_memory
        self._claims = claims
        self._evictions = evictions
        num_blocks = scheduler.kv_cache_manager.block_pool.num_gpu_blocks
        high_water = options.data_high_water
        self.num_kept_free = int(options.low_water * num_blocks)
        self.num_kept_from_data = None if high_water is None else num_blocks - int(high_water * num_blocks)
        # With more than that, the largest step leaves free what must be.
        largest_step = scheduler.max_num_scheduled_tokens // kv_memory.smallest_block_size
        self._num_free_if_short = self.num_kept_free + largest_step + scheduler.max_num_active_reqs

    def plan_step(self) -> PlannedStep:
        self._kv_memory.start_step()
        if self._host_memory is not None:
            self._host_memory.start_step(self._steps.start_s)
        decoding, others = self._split_running()
        views, held_up = [self._kv_memory.view(r) for r in others], []
        for request in self._scheduler.waiting:
            view = request.view
            # One that has a view is not held up: it would have lost its view on the way there.
            if view is None:
                if self._queues.is_held_up(request):
                    held_up.append(request)
                    continue
                view = self._kv_memory.view(request)
            views.append(view)
        if self._policy.needs_prefix_hits:
            views = [self._kv_memory.with_prefix_hit(v) for v in views]
        limits = self._limits(num_ahead=len(decoding))
        order = self._policy.order(views, self._steps.start_s)
        memory = self._kv_memory
        made = plan(order, self._idle_views, limits, memory, self._evictions.fate, memory.next_block)
        self._policy.on_admitted([g.request for g in made.grants if not g.request.is_running])
        return PlannedStep(made, order, decoding, held_up)

    def _limits(self, num_ahead: int) -> Limits:
        options, estimates = self._options, self._estimates
        return Limits(
            num_tokens=self._scheduler.max_num_scheduled_tokens,
            num_seqs=self._scheduler.max_num_active_reqs,
            can_partial_evict=bool(options.can_partial_evict),
            can_growing_evict=options.can_partial_evict is None and self._is_kv_kept(),
            num_ahead=num_ahead,
            num_partial_tokens=estimates.pace.num_partial_tokens,
            step_size=estimates.step_sizes.at(self._steps.start_s) if options.sizes_steps else None,
            is_early=options.late_binding and self._steps.has_prefills,
            num_blocks_kept_free=self.num_kept_free,
            num_blocks_kept_from_data=self.num_kept_from_data,
            max_data_tokens=options.max_data_tokens,
            budget=self._claims.budget,
            turn=self._scheduler.current_step,
        )

    def _is_kv_kept(self) -> bool:
        """Whether KV that is taken away can be had back: host memory has room for that of all requests."""
        if self._host_memory is None or self._kv_memory.num_free_blocks > self._num_free_if_short:
            return False  # or nobody needs it
        requests = self._scheduler.requests
        return self._host_memory.holds(sum(r.num_prompt_tokens for r in requests.values()), len(requests))

    def _split_running(self) -> tuple[list[StreamRequest], list[StreamRequest]]:
        """Return the running requests that decode and have what they need, which is one token each; and the others."""
        scheduler, memory = self._scheduler, self._kv_memory
        decoding: list[StreamRequest] = []
        others: list[StreamRequest] = []
        block_size, num_whole = memory.smallest_block_size, 0
        for request in scheduler.running:
            if request.is_decoding:
                decoding.append(request)
                num_whole += request.num_computed_tokens % block_size == 0
            else:
                others.append(request)
        num_blocks = len(memory.groups) * num_whole
        if num_blocks > memory.num_free_blocks or len(decoding) > scheduler.max_num_scheduled_tokens:
            return [], scheduler.running
        memory.num_free_blocks -= num_blocks
        return decoding, others

    def _idle_views(self) -> list[RequestView]:
        """Return idle streams that hold KV, of which the last is the first victim: the one with most time to its next
        chunk."""
        now_s, forecast = self._steps.start_s, self._estimates.forecast
        views = [self._kv_memory.view(r, is_idle=True) for r in self._queues.idle.values()]
        held = self._policy.order([v for v in views if v.num_blocks], now_s)
        return sorted(held, key=lambda view: forecast.expected_s(view, now_s))
