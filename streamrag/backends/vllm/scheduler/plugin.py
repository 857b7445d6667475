"""The objects of the plugin, constructed and connected in one place."""

from collections.abc import Callable

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from streamrag.backends.vllm.scheduler.estimates import Estimates
from streamrag.backends.vllm.scheduler.host_memory.memory import host_memory_of
from streamrag.backends.vllm.scheduler.intake import Intake
from streamrag.backends.vllm.scheduler.kv.eviction import Evictions, KvClaims
from streamrag.backends.vllm.scheduler.kv.later_hits import LaterHits, can_look_again
from streamrag.backends.vllm.scheduler.kv.memory import KvMemory
from streamrag.backends.vllm.scheduler.outbox import Outbox
from streamrag.backends.vllm.scheduler.plan_executor import PlanExecutor
from streamrag.backends.vllm.scheduler.queues import Queues
from streamrag.backends.vllm.scheduler.records import Records
from streamrag.backends.vllm.scheduler.request_log import HostClock
from streamrag.backends.vllm.scheduler.step import StepPlanner
from streamrag.backends.vllm.scheduler.steps_in_flight import StepsInFlight
from streamrag.backends.vllm.scheduler.supported import only_sends_kv
from streamrag.backends.vllm.scheduler_options import EngineOptions
from streamrag.engine import ClassPolicy, make_policy


class StreamingPlugin:
    """The objects that streaming adds to one vLLM scheduler."""

    def __init__(
        self,
        scheduler: Scheduler,
        options: EngineOptions,
        enqueue: Callable[[Request], None],
        preempt_in_vllm: Callable[..., None],
    ) -> None:
        self.options = options
        clock = self.clock = HostClock()
        policy = make_policy(options.policy)
        policy = self.policy = policy if options.class_ageing_s is None else ClassPolicy(policy, options.class_ageing_s)
        host_memory = self.host_memory = host_memory_of(scheduler.connector)
        has_their_connector = scheduler.connector is not None and host_memory is None
        theirs_may_load = has_their_connector and not only_sends_kv(scheduler.vllm_config)
        later_hits = None
        if (options.groups_prefills or options.looks_up_again) and not theirs_may_load and can_look_again(scheduler):
            later_hits = LaterHits(scheduler, includes_plain=options.groups_prefills)
        outbox = self.outbox = Outbox()
        records = self.records = Records(options.records, clock=clock)
        estimates = self.estimates = Estimates(options, clock=clock, policy=policy)
        kv_memory = self.kv_memory = KvMemory(scheduler, host_memory, later_hits, theirs_may_load)
        claims = self.claims = KvClaims(options.kv_budget, kv_memory.num_device_blocks)
        evictions = self.evictions = Evictions(scheduler, preempt_in_vllm, clock, claims, host_memory, theirs_may_load)
        queues = self.queues = Queues(scheduler, evictions, outbox)
        steps = self.steps = StepsInFlight(scheduler, clock, estimates, host_memory)
        self.intake = Intake(
            scheduler, enqueue, clock, queues, outbox, records, estimates, steps, kv_memory, host_memory, options
        )
        self.planner = StepPlanner(
            scheduler, options, policy, steps, estimates, queues, kv_memory, host_memory, claims, evictions
        )
        self.executor = PlanExecutor(scheduler, self.planner, steps, evictions, claims, kv_memory, queues, outbox)
