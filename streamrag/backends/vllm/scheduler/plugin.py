"""The objects of the plugin, constructed in one place and connected by name."""

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, TypeVar

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request

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
from streamrag.backends.vllm.scheduler.request_log import HostClock
from streamrag.backends.vllm.scheduler.step import StepPlanner
from streamrag.backends.vllm.scheduler.steps_in_flight import StepsInFlight
from streamrag.backends.vllm.scheduler.supported import only_sends_kv
from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.engine import ClassPolicy, make_policy

T = TypeVar("T")


class StreamingPlugin:
    """The objects that streaming adds to one vLLM scheduler.

    `enqueue` and `preempt_in_vllm` are vLLM's own `add_request` and `_preempt_request`; calling them runs no hook.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        options: SchedulerOptions,
        enqueue: Callable[[Request], None],
        preempt_in_vllm: Callable[..., None],
    ) -> None:
        self.scheduler = scheduler
        self.options = options
        self.enqueue = enqueue
        self.preempt_in_vllm = preempt_in_vllm
        self.clock = HostClock()
        policy = make_policy(options.policy)
        self.policy = policy if options.class_ageing_s is None else ClassPolicy(policy, options.class_ageing_s)
        self.host_memory = host_memory_of(scheduler.connector)
        has_their_connector = scheduler.connector is not None and self.host_memory is None
        self.theirs_may_load = has_their_connector and not only_sends_kv(scheduler.vllm_config)
        self.later_hits = None if self.theirs_may_load else _make_later_hits(scheduler, options)
        self.outbox = Outbox()
        self.records = Records(options.records, clock=self.clock)
        self.estimates = Estimates(options, clock=self.clock, policy=self.policy)
        self.kv_memory = KvMemory(scheduler, self.host_memory, self.later_hits)
        self.claims = KvClaims(options.kv_budget, self.kv_memory.num_device_blocks)
        self.evictions = self._make(Evictions)
        self.queues = self._make(Queues)
        self.steps = self._make(StepsInFlight)
        self.intake = self._make(Intake)
        self.planner = self._make(StepPlanner)
        self.executor = self._make(PlanExecutor)

    def _make(self, kind: type[T]) -> T:
        """Construct a dataclass, passing the attribute of the same name for each field that has no default."""
        required: Any = fields(kind)  # type: ignore[arg-type]
        names = [f.name for f in required if f.default is MISSING and f.default_factory is MISSING]
        return kind(**{name: getattr(self, name) for name in names})


def _make_later_hits(scheduler: Scheduler, options: SchedulerOptions) -> LaterHits | None:
    """Return None if later hits are switched off, or the engine cannot provide them."""
    if not (options.groups_prefills or options.looks_up_again) or not can_look_again(scheduler):
        return None
    return LaterHits(scheduler, includes_plain=options.groups_prefills)
