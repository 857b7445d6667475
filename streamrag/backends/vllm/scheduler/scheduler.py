"""vLLM's scheduler, extended so that prompts may grow and change while they are computed.

Nothing of vLLM is copied or patched: each step, what must run is put before `Scheduler.schedule`, and the rest is kept
out of its sight until it returns.

    add_request ─▶ waiting ─grant─▶ running ─prompt complete─▶ tokens ─▶ finished
                      ▲                │ all of a partial prompt is computed
                      │                ▼
                      └── new chunk ─ idle      keeps its KV until somebody needs the memory, but no sequence slot
"""

import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.options import SchedulerOptions
from streamrag.backends.vllm.scheduler.host_memory.loads import Suspects
from streamrag.backends.vllm.scheduler.intake import StreamIntakeMixin
from streamrag.backends.vllm.scheduler.kv.claims import Admission
from streamrag.backends.vllm.scheduler.kv.later_hits import LaterHits, can_look_again
from streamrag.backends.vllm.scheduler.kv.memory import KvMemory
from streamrag.backends.vllm.scheduler.kv.replacement import release_kv
from streamrag.backends.vllm.scheduler.record_file import RecordFile
from streamrag.backends.vllm.scheduler.request import StreamRequest, has_prompt_logprobs
from streamrag.backends.vllm.scheduler.supported import check_supported
from streamrag.backends.vllm.version import check_version
from streamrag.engine import ClassPolicy, Fate, Limits, Pace, Plan, Policy, RequestView, make_policy, plan
from streamrag.engine.swapping import DROPPED, Comparison

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput

check_version()


class _Step(NamedTuple):
    """What was decided for one step."""

    plan: Plan
    order: list[RequestView]
    """Whom the plan chose from, the most urgent first."""
    decoding: list[Request]
    """Who runs ahead of the plan."""
    held_up: list[Request]
    """Who waits for something else than memory and budget."""


class StreamingSchedulerMixin(StreamIntakeMixin):
    """What streaming adds to `Scheduler` and to `AsyncScheduler` alike."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", *args: Any, **kwargs: Any) -> None:
        check_supported(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        self.options = SchedulerOptions.of(vllm_config)
        self.record_file = RecordFile(Path(self.options.records)) if self.options.records else None
        policy, ageing_s = make_policy(self.options.policy), self.options.class_ageing_s
        self.streaming_policy: Policy = policy if ageing_s is None else ClassPolicy(policy, ageing_s)
        # Connectors of others are not told of blocks that a request gets later.
        can_share = can_look_again(self) and (self.connector is None or self.host_memory is not None)
        self._is_grouped = self.options.groups_prefills and can_share
        has_later_hits = self._is_grouped or (self.options.looks_up_again and can_share)
        later_hits = LaterHits(self, are_of_all=self._is_grouped) if has_later_hits else None
        self.kv_memory = KvMemory(self, self.host_memory, later_hits)
        self.pace = Pace(self.options.num_partial_tokens, self.options.partial_step_s)
        num_blocks = self.kv_cache_manager.block_pool.num_gpu_blocks
        self._num_kept_free = int(self.options.low_water * num_blocks)
        high_water, budget = self.options.data_high_water, self.options.kv_budget
        self._num_kept_from_data = None if high_water is None else num_blocks - int(high_water * num_blocks)
        self.admission = Admission(None if budget is None else int(budget * num_blocks))
        # With more than that, the largest step leaves free what must be.
        largest_step = self.max_num_scheduled_tokens // self.kv_memory.smallest_block_size + self.max_num_active_reqs
        self._num_free_if_short = self._num_kept_free + largest_step
        self._step_s = 0.0
        self._last_output_s = 0.0
        # Of each step whose output is still to come: when it was planned, and its pairs, see `StepSizes.observe_step`.
        self._started: deque[tuple[float, float]] = deque()
        self._num_free_when_stuck: int | None = None

    # ----------------------------------------------------------------------------------------------------- one step

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self._step_s = self.clock()
        if self._pause_state != PauseState.UNPAUSED:
            return super().schedule(throttle_prefills)
        step = self._plan()
        is_stuck = not (
            step.plan.grants or step.plan.is_put_off or step.decoding or step.held_up or self.deferred_frees
        )
        self._num_free_when_stuck = self.kv_memory.num_free_blocks if is_stuck else None
        for eviction in step.plan.evictions:
            self._evict(self._request(eviction.request))
        for grant in step.plan.grants:
            if grant.num_blocks_claimed is not None:
                self.admission.claim(self._request(grant.request), grant.num_blocks_claimed)
            if self.kv_memory.take_later(grant.request):
                self._begin_anew(self._request(grant.request))
        for view in step.plan.waiting:
            self._on_waiting_for_memory(self._request(view))
        running, waiting = self._set_aside(step)
        try:
            return super().schedule(throttle_prefills)
        finally:
            self.kv_memory.end_step()
            self.running.extend(running)
            self.waiting.extend(waiting)
            self.num_waiting_for_streaming_input = 0
            for grant in step.plan.grants:
                self._request(grant.request).step_end = None

    def has_requests(self) -> bool:
        # Partial prompts alone may all wait for memory. vLLM's loop sleeps if it is told that there is nothing to do.
        if self._num_free_when_stuck is None or self.deferred_frees or self._outbox or self.has_finished_requests():
            return super().has_requests()
        return self.kv_cache_manager.block_pool.get_num_free_blocks() != self._num_free_when_stuck

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._num_free_when_stuck = None  # only a plan says who is stuck, and while paused there is none
        super().set_pause_state(pause_state)

    def add_request(self, request: Request) -> None:
        self._num_free_when_stuck = None
        super().add_request(request)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: "ModelRunnerOutput"
    ) -> dict[int, "EngineCoreOutputs"]:
        now_s, (started_s, num_pairs) = self.clock(), self._started.popleft()
        duration_s = now_s - max(started_s, self._last_output_s)
        num_tokens = scheduler_output.total_num_scheduled_tokens
        self.pace.observe(num_tokens, duration_s)
        if num_tokens:
            self.step_sizes.observe_step(num_tokens, num_pairs, duration_s)
        if self.pace.tokens_per_s:
            self.streaming_policy.on_speed(self.pace.tokens_per_s)
        if self.host_memory is not None:
            self.host_memory.on_step_end(scheduler_output, model_runner_output.kv_connector_output, duration_s)
        self._last_output_s = now_s
        if self._prefills_in_flight[0]:
            self._num_free_when_stuck = None  # the next plan tells those who got stuck while this step computed
        return super().update_from_output(scheduler_output, model_runner_output)

    def make_stats(self, *args: Any, **kwargs: Any) -> "SchedulerStats | None":
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self.options.tells_kv_use:
            use = asdict(self.kv_memory.use(self.idle.values()))
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: use}
        return stats

    def _request(self, view: RequestView | Request) -> StreamRequest:
        request = self.requests[view.request_id]
        assert isinstance(request, StreamRequest)
        return request

    def _plan(self) -> _Step:
        self.kv_memory.start_step()
        if self.host_memory is not None:
            self.host_memory.start_step(self._step_s)
        decoding, others = self._split_running()
        views, held_up = [self.kv_memory.view(r) for r in others], []
        for request in self.waiting:
            view = request.view
            # One that has a view is not held up: it would have lost its view on the way there.
            if view is None:
                if self._is_held_up(request):
                    held_up.append(request)
                    continue
                view = self.kv_memory.view(request)
            views.append(view)
        policy = self.streaming_policy
        if policy.needs_prefix_hits:
            views = [self.kv_memory.with_prefix_hit(v) for v in views]
        limits = Limits(
            num_tokens=self.max_num_scheduled_tokens,
            num_seqs=self.max_num_active_reqs,
            can_partial_evict=bool(self.options.can_partial_evict),
            can_growing_evict=self.options.can_partial_evict is None and self._is_kv_kept(),
            num_ahead=len(decoding),
            num_partial_tokens=self.pace.num_partial_tokens,
            step_size=self.step_sizes.at(self._step_s) if self.options.sizes_steps else None,
            is_early=self.options.late_binding and any(self._prefills_in_flight),
            num_blocks_kept_free=self._num_kept_free,
            num_blocks_kept_from_data=self._num_kept_from_data,
            max_data_tokens=self.options.max_data_tokens,
            budget=self.admission.budget,
            turn=self.current_step,
        )
        order = policy.order(views, self._step_s)
        next_block = self.kv_memory.next_block if self._is_grouped else None
        made = plan(order, self._idle_views, limits, self.kv_memory, self._fate, next_block)
        policy.on_admitted([g.request for g in made.grants if not g.request.is_running])
        return _Step(made, order, decoding, held_up)

    def _is_kv_kept(self) -> bool:
        """Whether KV that is taken away can be had back: host memory has room for that of all requests."""
        if self.host_memory is None or self.kv_memory.num_free_blocks > self._num_free_if_short:
            return False  # or nobody needs it
        num_tokens = sum(request.num_prompt_tokens for request in self.requests.values())
        return self.host_memory.holds(num_tokens, len(self.requests))

    def _split_running(self) -> tuple[list[Request], list[Request]]:
        """The running requests that decode and have what they need, which is one token each; and the others."""
        decoding: list[Request] = []
        others: list[Request] = []
        block_size, num_whole = self.kv_memory.smallest_block_size, 0
        for request in self.running:
            if request._output_token_ids and not request.is_prefill_chunk:
                decoding.append(request)
                num_whole += request.num_computed_tokens % block_size == 0
            else:
                others.append(request)
        num_blocks = len(self.kv_memory.groups) * num_whole
        if num_blocks > self.kv_memory.num_free_blocks or len(decoding) > self.max_num_scheduled_tokens:
            return [], self.running
        self.kv_memory.num_free_blocks -= num_blocks
        return decoding, others

    def _idle_views(self) -> list[RequestView]:
        """Those that hold KV, the last of which is the first victim: the one that is expected to wait for longest."""
        views = [self.kv_memory.view(r, is_idle=True) for r in self.idle.values()]
        held = self.streaming_policy.order([v for v in views if v.num_blocks], self._step_s)
        return sorted(held, key=lambda view: self.forecast.expected_s(view, self._step_s))

    def _is_held_up(self, request: Request) -> bool:
        """Whether vLLM itself would skip it: a grammar, or output in flight from before it was preempted.

        vLLM looks whether a grammar is ready when its turn comes, which may be never behind what was granted.
        """
        if not self._handle_blocked_waiting_request(request):
            return True
        self.deferred_waiting.discard(request)
        return request.num_stale_output_tokens > 0 and not request.drop_stale_output

    def _begin_anew(self, request: StreamRequest) -> None:
        """Have the model runner be sent `request` as a whole: it holds other blocks than the runner knows."""
        request.log.on_later_hit(request.num_computed_tokens, self._step_s)
        if request.status == RequestStatus.RUNNING:
            self._leave_running(request)
            request.status = RequestStatus.WAITING

    def _set_aside(self, step: _Step) -> tuple[list[Request], list[Request]]:
        """Leave in the queues what may run, in the plan's order. Returns what was taken out, running and waiting."""
        granted: set[str] = set()
        running = step.decoding
        starting: list[Request] = []
        has_their_connector = self.connector is not None and self.host_memory is None
        for grant in step.plan.grants:
            request = self._request(grant.request)
            granted.add(request.request_id)
            (running if request.status == RequestStatus.RUNNING else starting).append(request)
            end = self.kv_memory.num_present_tokens(grant.request) + grant.num_tokens
            # Other people's connectors look up all of a complete prompt, and may load more than this step's part.
            is_limited = request.status == RequestStatus.RUNNING or not (request.is_complete and has_their_connector)
            if is_limited and end < grant.request.num_tokens:
                request.step_end = end
        rest: list[Request] = []
        waiting = step.held_up.copy()
        requests, running_status = self.requests, RequestStatus.RUNNING  # hundreds may wait
        for view in step.order:
            if view.request_id not in granted:
                request = requests[view.request_id]
                (rest if request.status is running_status else waiting).append(request)
        self.running = running
        num_wanted = len(running) + len(starting) + len(rest) - self.max_num_active_reqs
        for request in self._beyond_slots(rest, num_wanted):
            rest.remove(request)
            waiting.append(request)
        self.waiting.clear()
        self.waiting.extend(starting)
        # vLLM counts these as sequences that hold a slot without being in `running`, which is what they are here.
        self.num_waiting_for_streaming_input = len(rest)
        return rest, waiting

    def _beyond_slots(self, rest: list[Request], num_wanted: int) -> list[Request]:
        """The last `num_wanted` of the running requests that get nothing in this step. Most keep their KV.

        One that has shown a token keeps its slot as well: as a waiting request it would lose its output.
        """
        if num_wanted <= 0:
            return []
        leaving = [r for r in reversed(rest) if not r.has_output][:num_wanted]
        for request in leaving:
            if has_prompt_logprobs(request):
                # With the slot the second model runner forgets those that it has: it must begin again.
                self._preempt_request(request, time.monotonic())
                self.prev_step_scheduled_req_ids.discard(request.request_id)
            self.reset_preempted_req_ids.add(request.request_id)
            request.status = RequestStatus.WAITING
            request.view = None
        return leaving

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        requests = self.requests
        partial: list[StreamRequest] = []
        prefills: list[tuple[StreamRequest, bool]] = []
        num_pairs = 0.0
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = requests[request_id]
            request.view = request.step_end = None  # first: a request with tokens left to compute samples none
            num_pairs += num_tokens * (request.num_computed_tokens + num_tokens / 2)
            if request.log.num_present >= request.num_prompt_tokens:
                continue  # a decode
            prefills.append((request, self._record_prefill(request, num_tokens)))
            if not request.is_complete:
                partial.append(request)
                if self.host_memory is not None:
                    self.host_memory.on_partial(request)
        self._prefills_in_flight.append(prefills)
        self._counts_in_flight.append(scheduler_output.num_scheduled_tokens)
        self._started.append((self._step_s, num_pairs))
        super()._update_after_schedule(scheduler_output)
        self._inflight_prefills.update(r for r, _ in prefills if r.is_complete and r.is_prefill_chunk)
        for request in partial:
            # The prompt is not at its end, whatever the numbers say: no token comes from this step.
            request.is_prefill_chunk = True
            request.num_output_placeholders = 0
            request.spec_token_ids = []
            request.next_decode_eligible_step = 0

    def _record_prefill(self, request: StreamRequest, num_tokens: int) -> bool:
        """Returns whether the prompt is complete, and all of it computed with this step."""
        num_prompt_tokens = request.num_prompt_tokens
        start = min(request.num_computed_tokens, num_prompt_tokens)
        end = min(request.num_computed_tokens + num_tokens, num_prompt_tokens)
        request.log.on_step(start, end, self._step_s, request.num_loaded_tokens)
        request.num_loaded_tokens = 0
        return end == num_prompt_tokens  # never of a partial one, whose last token is hidden

    # -------------------------------------------------------------------------------------------------------- memory

    def _evict(self, request: StreamRequest) -> None:
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
            self._preempt_request(request, time.monotonic())
            # It may be resumed in this very step, for which the first model runner must be sent its tokens.
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        else:
            self._give_up_kv(request)
            release_kv(self, request)
            request.num_preemptions += 1

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        assert isinstance(request, StreamRequest)
        self._give_up_kv(request)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _fate(self, view: RequestView) -> Fate:
        request = self._request(view)
        request.comparison = self._compare(request)
        return request.comparison.choice

    def _compare(self, request: StreamRequest) -> Comparison:
        return DROPPED if self.host_memory is None else self.host_memory.compare(request)

    def _give_up_kv(self, request: StreamRequest) -> None:
        self.admission.release(request)
        comparison = request.comparison or self._compare(request)
        request.num_kept_tokens = 0
        if self.host_memory is not None and comparison.choice == "swap":
            self.host_memory.on_release(request)
            request.num_kept_tokens = request.num_computed_tokens
        request.view = request.comparison = None
        request.was_evicted = True
        request.log.on_loss(request.num_computed_tokens, comparison, self.clock())

    def _handle_invalid_blocks(self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        """KV could not be loaded: whoever holds some of it, idle streams included, starts again without it.

        vLLM's own way looks at the running requests only, and leaves it to the order in which they run next that one
        of those that share a block computes it before the others read it.
        """
        if self.host_memory is None:  # somebody else's KV connector
            return super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
        wrong = self.host_memory.on_failed_loads(invalid_block_ids)
        self.kv_cache_manager.evict_blocks(wrong.blocks)
        affected = [r for r in self.requests.values() if self._is_affected(r, wrong)]
        for request in affected:
            self._restart(request)
        return {request.request_id for request in affected}

    def _is_affected(self, request: Request, wrong: Suspects) -> bool:
        if request.is_finished():
            return False
        (block_ids,) = self.kv_cache_manager.get_block_ids(request.request_id)
        # Who has lost the blocks since may still be sent what was computed from them.
        return request.request_id in wrong.requests or not wrong.blocks.isdisjoint(block_ids)

    def _restart(self, request: Request) -> None:
        """Drop all KV of `request`, and what its steps in flight return."""
        assert isinstance(request, StreamRequest)
        self.admission.release(request)
        request.view = None
        if request.num_computed_tokens:
            request.log.on_loss(request.num_computed_tokens, DROPPED, self.clock())
        if request.status == RequestStatus.RUNNING:
            self.running.remove(request)
            super()._preempt_request(request, time.monotonic(), drop_stale_output=True)
            self.prev_step_scheduled_req_ids.discard(request.request_id)
        else:
            release_kv(self, request)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        assert isinstance(request, StreamRequest)
        self.admission.release(request)
        return super()._free_request(request, delay_free_blocks)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if reset_running_requests:
            for request in (*self.idle.values(), *self.waiting):
                assert isinstance(request, StreamRequest)
                if self.kv_memory.num_blocks(request):
                    self._evict(request)
        self._num_free_when_stuck = None  # who finds nothing in the cache needs fewer blocks to start
        try:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        finally:
            # Last, whether vLLM resets its connector or not: those that ran have only now given up what they held.
            if self.host_memory is not None:
                self.host_memory.forget()

    @staticmethod
    def _holds_kv_blocks(request: Request) -> bool:
        # What vLLM calls so is served before all else, whatever the policy says.
        return request.status == RequestStatus.WAITING_FOR_REMOTE_KVS


class StreamingScheduler(StreamingSchedulerMixin, Scheduler):
    """For `scheduler_cls`, without asynchronous scheduling."""


class AsyncStreamingScheduler(StreamingSchedulerMixin, AsyncScheduler):
    """For `scheduler_cls`, with asynchronous scheduling: one step is planned while another computes."""


def streaming_scheduler(vllm_config: "VllmConfig", **kwargs: Any) -> StreamingSchedulerMixin:
    """For `scheduler_cls`: the scheduler that fits the configuration; vLLM leaves the choice to us."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AsyncStreamingScheduler if is_async else StreamingScheduler)(vllm_config=vllm_config, **kwargs)
