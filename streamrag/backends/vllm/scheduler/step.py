"""Plan one step: which requests may run, in which order, and under which rules."""

from dataclasses import dataclass
from typing import NamedTuple

from vllm.sampling_params import SamplingType
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.scheduler import Scheduler

from streamrag.backends.vllm.scheduler.estimates import Estimates
from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory
from streamrag.backends.vllm.scheduler.kv.eviction import Evictions, KvClaims
from streamrag.backends.vllm.scheduler.kv.memory import KvMemory
from streamrag.backends.vllm.scheduler.queues import Queues
from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.steps_in_flight import StepsInFlight
from streamrag.backends.vllm.scheduler_options import EngineOptions
from streamrag.engine import Plan, Policy, RequestView, StepBudget, plan, rules
from streamrag.engine.step_size import StepCosts
from streamrag.engine.victims import order_idle


class PlannedStep(NamedTuple):
    """The decisions for one step."""

    plan: Plan
    order: list[RequestView]  # requests that the plan chose from, most urgent first
    decoding: list[StreamRequest]  # requests that run regardless of the plan, or whose last token is being sampled
    blocked: list[StreamRequest]  # requests that vLLM would skip; see `Queues.is_blocked_in_vllm`


@dataclass(eq=False)
class StepPlanner:
    """A planner of steps. It evicts nothing and starts nothing; only loaded requests change their queue."""

    scheduler: Scheduler
    options: EngineOptions
    policy: Policy
    steps: StepsInFlight
    estimates: Estimates
    queues: Queues
    kv_memory: KvMemory
    host_memory: HostMemory | None
    claims: KvClaims
    evictions: Evictions

    def __post_init__(self) -> None:
        num_blocks, high_water = self.kv_memory.num_device_blocks, self.options.data_high_water
        self.num_reserved_free = int(self.options.low_water * num_blocks)
        self.num_reserved_from_data = None if high_water is None else num_blocks - int(high_water * num_blocks)
        # With more free blocks than this, even the largest step leaves the low-water reserve free.
        largest_step = self.scheduler.max_num_scheduled_tokens // self.kv_memory.smallest_block_size
        self._num_free_if_short = self.num_reserved_free + largest_step + self.scheduler.max_num_active_reqs
        self._adapters_ahead: set[int] = set()  # of the requests that run before the plan
        self.rules = rules.RuleList(self._make_rules())

    def plan_step(self) -> PlannedStep:
        """Return a step's plan: which requests compute how many tokens, in the policy's order. Logs why others wait.

        Decodes run without being in the plan, except drafts. Requests that vLLM would skip are listed as blocked.
        """
        self.kv_memory.start_step()
        if self.host_memory is not None:
            self.host_memory.start_step(self.steps.start_s)
        self.queues.take_loaded()
        decoding, others, ending = self._split_running()
        if self.scheduler.lora_config:
            self._adapters_ahead = {r.adapter_id for r in decoding + ending if r.adapter_id is not None}
        views, blocked = [self.kv_memory.cached_view(r) for r in others], []
        for request in self.scheduler.waiting:
            view = request.view
            # A request that has a view is not blocked: entering that state clears the view.
            if view is None:
                if self.queues.is_blocked_in_vllm(request):
                    blocked.append(request)
                    continue
                view = self.kv_memory.cached_view(request)
            views.append(view)
        num_tokens = self.scheduler.max_num_scheduled_tokens - sum(len(r.spec_token_ids) for r in decoding)
        budget = StepBudget(num_tokens, self.scheduler.max_num_active_reqs, len(decoding), len(ending))
        if not views:  # nothing to plan
            return PlannedStep(Plan(budget), views, decoding + ending, blocked)
        if self.policy.needs_prefix_hits:
            views = [self.kv_memory.with_prefix_hit(v) for v in views]
        order = self.policy.order(views, self.steps.start_s)
        logs_holds = self.options.records is not None
        step_plan = plan(order, self._idle_views, budget, self.kv_memory, self.rules, self.evictions.fate, logs_holds)
        for request_id, rule in step_plan.holds:
            self.scheduler.requests[request_id].log.holds[rule] += 1
        self.policy.on_admitted([g.request for g in step_plan.grants if not g.request.is_running])
        return PlannedStep(step_plan, order, decoding + ending, blocked)

    def _make_rules(self) -> list[rules.Rule]:
        """Return the rules that are switched on, in their order; see `streamrag.engine.rules`."""

        def step_costs() -> StepCosts | None:
            return estimates.step_costs.at(self.steps.start_s)

        options, estimates = self.options, self.estimates
        can_growing = self._is_evicted_kv_kept if options.can_partial_evict is None else lambda: False
        sized = rules.SizedSteps(step_costs) if options.sizes_steps else None
        lora = self.scheduler.lora_config
        has_drafts = self.scheduler.num_spec_tokens > 0
        listed = [
            rules.DraftPrice(step_costs, lambda: estimates.survival()) if has_drafts else None,
            rules.ShortDrafts(lambda: estimates.pace.num_partial_tokens) if has_drafts else None,
            None if lora is None else rules.AdapterSlots(lora.max_loras, lambda: self._adapters_ahead),
            rules.LeanPartials(lambda: estimates.pace.num_partial_tokens, self.num_reserved_free),
            rules.ShortBeforeReplaced(),
            None if options.max_data_tokens is None else rules.DataShare(options.max_data_tokens),
            rules.PartialEviction(bool(options.can_partial_evict), can_growing),
            rules.Turns(self.scheduler.current_step),
            rules.LowWater(self.num_reserved_free),
            None if options.kv_budget is None else rules.KvBudget(lambda: self.claims.budget_left),
            rules.ConnectorLookup(self.kv_memory.connector_wait) if self.kv_memory.theirs_may_load else None,
            sized,
            None if self.kv_memory.prefill_unit == 1 else rules.WholeUnits(self.kv_memory.prefill_unit),
            None if self.kv_memory.next_block is None else rules.GroupedPrefills(self.kv_memory.next_block),
            rules.DraftMemory(self.num_reserved_free) if has_drafts else None,
            None if self.num_reserved_from_data is None else rules.DataHighWater(self.num_reserved_from_data),
            rules.LateBinding(lambda: self.steps.has_prefills, sized) if options.late_binding else None,
        ]
        return [rule for rule in listed if rule is not None]

    def _is_evicted_kv_kept(self) -> bool:
        """Whether device memory is short and the KV of all prompts is worth keeping in host memory."""
        if self.host_memory is None or self.kv_memory.num_free_blocks > self._num_free_if_short:
            return False
        requests = self.scheduler.requests
        return self.host_memory.is_worth_keeping(sum(r.num_prompt_tokens for r in requests.values()), len(requests))

    def _split_running(self) -> tuple[list[StreamRequest], list[StreamRequest], list[StreamRequest]]:
        """Split the running requests into those that decode, the others, and those whose last token is being sampled.

        If the decodes do not fit, they are others. Drafts are others, although they decode: whether they compute is for
        the plan to decide. Takes the decodes' blocks from the free ones. Then proposes tokens of drafts, if vLLM can
        verify them, as far as tokens and free blocks are left, and takes these blocks too; proposes none if the decodes
        do not fit.
        """
        scheduler, memory = self.scheduler, self.kv_memory
        decoding: list[StreamRequest] = []
        others: list[StreamRequest] = []
        ending: list[StreamRequest] = []
        block_size, num_whole = memory.smallest_block_size, 0
        for request in scheduler.running:
            if request.ends_in_flight:
                ending.append(request)
            elif request.is_decoding and request.request_class != "draft":
                decoding.append(request)
                num_whole += request.num_computed_tokens % block_size == 0
            else:
                others.append(request)
        num_blocks = len(memory.groups) * num_whole
        if num_blocks > memory.num_free_blocks or len(decoding) > scheduler.max_num_scheduled_tokens:
            others = [request for request in scheduler.running if not request.ends_in_flight]
            for request in others:
                request.propose_tokens(0)
            return [], others, ending
        memory.num_free_blocks -= num_blocks
        if scheduler.num_spec_tokens:
            depth = scheduler.num_spec_tokens if self._can_verify_drafts() else 0
            self._verify_drafts(decoding, depth)
            for request in others:
                if request.is_decoding:  # the plan counts its tokens and blocks
                    request.propose_tokens(depth)
        return decoding, others, ending

    def _can_verify_drafts(self) -> bool:
        """Whether vLLM verifies drafts exactly in this step. On a CPU, it does not if any request samples at random.

        Source: https://github.com/vllm-project/vllm/issues/55005. Its temperatures are read from memory never written.
        """
        if self.scheduler.vllm_config.device_config.device_type != "cpu":
            return True
        return all(r.sampling_params.sampling_type is SamplingType.GREEDY for r in self.scheduler.requests.values())

    def _verify_drafts(self, decoding: list[StreamRequest], depth: int) -> None:
        """Propose up to `depth` tokens per draft and take their blocks, as far as budget and free blocks allow."""
        memory, block_size = self.kv_memory, self.kv_memory.smallest_block_size
        num_groups, num_left = len(memory.groups), self.scheduler.max_num_scheduled_tokens - len(decoding)
        for request in decoding:
            if request.draft is not None:
                end = request.num_computed_tokens + 1
                num_room = -end % block_size + memory.num_free_blocks // num_groups * block_size
                num_tokens = request.propose_tokens(min(depth, num_left, num_room))
                num_left -= num_tokens
                memory.num_free_blocks -= num_groups * (cdiv(end + num_tokens, block_size) - cdiv(end, block_size))

    def _idle_views(self) -> list[RequestView]:
        views = [self.kv_memory.cached_view(r, is_idle=True) for r in self.queues.idle.values()]
        return order_idle(views, self.policy, self.estimates.forecast, self.steps.start_s)
