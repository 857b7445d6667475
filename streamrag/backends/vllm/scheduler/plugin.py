"""The objects of the plugin, made in one place and given to each other by name.

hooks ─▶ intake            chunks come in, and change the prompts of their requests
      ─▶ executor          a step: planner (views, order, plan) ─▶ evictions, queues
      ─▶ steps             what the steps in flight compute, which estimates learn from
      ─▶ records, outbox   what goes out beside vLLM's outputs
"""

from collections.abc import Callable

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

from streamrag.backends.vllm.options import SchedulerOptions
from streamrag.backends.vllm.scheduler.clock import HostClock
from streamrag.backends.vllm.scheduler.estimates import Estimates
from streamrag.backends.vllm.scheduler.host_memory.memory import host_memory_of
from streamrag.backends.vllm.scheduler.intake import Intake
from streamrag.backends.vllm.scheduler.kv.claims import KvClaims
from streamrag.backends.vllm.scheduler.kv.eviction import Evictions
from streamrag.backends.vllm.scheduler.kv.later_hits import LaterHits, can_look_again
from streamrag.backends.vllm.scheduler.kv.memory import KvMemory
from streamrag.backends.vllm.scheduler.outbox import Outbox
from streamrag.backends.vllm.scheduler.plan_executor import PlanExecutor
from streamrag.backends.vllm.scheduler.queues import Queues
from streamrag.backends.vllm.scheduler.records import Records
from streamrag.backends.vllm.scheduler.step import StepPlanner
from streamrag.backends.vllm.scheduler.steps_in_flight import StepsInFlight
from streamrag.engine import ClassPolicy, Policy, make_policy


class StreamingPlugin:
    """What streaming adds to a scheduler of vLLM's. `enqueue` and `preempt` are its own methods, which call no hook."""

    def __init__(
        self,
        scheduler: Scheduler,
        options: SchedulerOptions,
        *,
        enqueue: Callable[[Request], None],
        preempt: Callable[..., None],
    ) -> None:
        self.options = options
        self.clock = clock = HostClock()
        self.policy = policy = _make_policy(options)
        self.host_memory = host_memory = host_memory_of(scheduler.connector)
        has_their_connector = scheduler.connector is not None and host_memory is None
        later_hits = _make_later_hits(scheduler, options, has_their_connector=has_their_connector)
        self.records = records = Records(options.records, clock=clock)
        self.outbox = outbox = Outbox()
        self.estimates = estimates = Estimates(options, clock=clock, policy=policy)
        self.kv_memory = kv_memory = KvMemory(scheduler, host_memory, later_hits)
        self.claims = claims = KvClaims(options.kv_budget, kv_memory.num_device_blocks)
        self.evictions = evictions = Evictions(
            scheduler=scheduler, preempt_in_vllm=preempt, clock=clock, claims=claims, host_memory=host_memory
        )
        self.queues = queues = Queues(scheduler=scheduler, evictions=evictions, outbox=outbox)
        self.steps = steps = StepsInFlight(
            scheduler=scheduler, clock=clock, estimates=estimates, host_memory=host_memory
        )
        self.intake = Intake(
            scheduler=scheduler,
            enqueue=enqueue,
            clock=clock,
            queues=queues,
            outbox=outbox,
            records=records,
            estimates=estimates,
            steps=steps,
            host_memory=host_memory,
        )
        self.planner = planner = StepPlanner(
            scheduler=scheduler,
            options=options,
            policy=policy,
            steps=steps,
            estimates=estimates,
            queues=queues,
            kv_memory=kv_memory,
            host_memory=host_memory,
            claims=claims,
            evictions=evictions,
        )
        self.executor = PlanExecutor(
            scheduler=scheduler,
            planner=planner,
            steps=steps,
            evictions=evictions,
            claims=claims,
            kv_memory=kv_memory,
            queues=queues,
            outbox=outbox,
            has_their_connector=has_their_connector,
        )


def _make_policy(options: SchedulerOptions) -> Policy:
    policy = make_policy(options.policy)
    return policy if options.class_ageing_s is None else ClassPolicy(policy, options.class_ageing_s)


def _make_later_hits(scheduler: Scheduler, options: SchedulerOptions, *, has_their_connector: bool) -> LaterHits | None:
    """Connectors of others are not told of blocks that a request gets later."""
    is_wanted = options.groups_prefills or options.looks_up_again
    if not is_wanted or has_their_connector or not can_look_again(scheduler):
        return None
    return LaterHits(scheduler, are_of_all=options.groups_prefills)
