"""The hooks in vLLM's scheduler: the only module that subclasses it. Each forwards to an object of the plugin.

| hook                      | why                                                                                  |
|---------------------------|--------------------------------------------------------------------------------------|
| `add_request`             | a chunk of a stream replaces the prompt of its request                               |
| `schedule`                | plan the step first, and hide from vLLM what must not run                            |
| `_update_after_schedule`  | note what the step computes; no token comes from a partial prompt                    |
| `update_from_output`      | learn from the step, find streams that became idle, add acknowledgements             |
| `_preempt_request`        | KV that is taken away goes to host memory, and into the request's log                |
| `_handle_invalid_blocks`  | idle streams, and requests that lost the block since, may hold KV of a failed load   |
| `_free_request`           | the record of a request that ends travels with its last output                       |
| `finish_requests`         | idle streams are in none of vLLM's queues                                            |
| `has_requests`            | partial prompts that all wait for memory must not keep the engine busy               |
| `has_finished_requests`   | idle streams have not finished                                                       |
| `reset_prefix_cache`      | idle and waiting streams hold KV; host memory forgets as well                        |
| `set_pause_state`         | while paused there is no plan, which alone says who is stuck                         |
| `_holds_kv_blocks`        | what vLLM calls so is served before all else, whatever the policy says               |
| `make_stats`, `shutdown`  | what KV memory is used for; the file of records is closed                            |

All are there since vLLM 0.32, the first version that the plugin was written for. Nothing of vLLM is copied or patched.
What else of it the plugin relies on is in docs/internals/scheduler.md; tests/backends/vllm/test_surface.py has
fingerprints of all of it.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.options import SchedulerOptions
from streamrag.backends.vllm.scheduler.plugin import StreamingPlugin
from streamrag.backends.vllm.scheduler.supported import check_supported
from streamrag.backends.vllm.version import check_version

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import ModelRunnerOutput

    class _Base(Scheduler): ...
else:
    _Base = object

check_version()


class StreamingHooks(_Base):
    """The hooks of `Scheduler` and `AsyncScheduler` alike."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", *args: Any, **kwargs: Any) -> None:
        check_supported(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        options = SchedulerOptions.of(vllm_config)
        self.plugin = StreamingPlugin(self, options, super().add_request, super()._preempt_request)

    def add_request(self, request: Request) -> None:
        self.plugin.executor.forget_stuck()
        self.plugin.intake.receive(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        self.plugin.steps.start()
        if self._pause_state != PauseState.UNPAUSED:
            return super().schedule(throttle_prefills)
        with self.plugin.executor.planned_step():
            return super().schedule(throttle_prefills)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        with self.plugin.steps.scheduled(scheduler_output):
            super()._update_after_schedule(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: "ModelRunnerOutput"
    ) -> dict[int, "EngineCoreOutputs"]:
        step = self.plugin.steps.end_first(scheduler_output, model_runner_output)
        if step.prefills:
            self.plugin.executor.forget_stuck()  # the next plan acknowledges those that got stuck meanwhile
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.plugin.queues.settle_all(request for request, _ in step.prefills)
        return self.plugin.outbox.add_to(outputs)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self.plugin.evictions.on_preemption(request)
        super()._preempt_request(request, timestamp, drop_stale_output)

    def _handle_invalid_blocks(self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        if self.plugin.host_memory is None:  # somebody else's KV connector
            return super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
        return self.plugin.evictions.on_failed_loads(invalid_block_ids)

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        self.plugin.claims.release(request)
        record = self.plugin.records.end(request)
        kv_params, ec_params = super()._free_request(request, delay_free_blocks)
        return {**(kv_params or {}), KEY: {"record": record}}, ec_params  # beside what a KV connector says

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        if request_ids is None:
            ids = list(self.requests)
        else:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.plugin.queues.forget_idle(ids)
        return super().finish_requests(ids, finished_status)

    def has_requests(self) -> bool:
        if not self.plugin.outbox.is_empty:
            return True
        if self.plugin.executor.is_stuck and not self.has_finished_requests():
            return self.plugin.executor.has_other_memory
        return super().has_requests()

    def has_finished_requests(self) -> bool:
        # With a KV connector, vLLM takes what is in no queue for finished, and would never sleep beside an idle stream.
        if self.finished_req_ids or self.connector is None:
            return bool(self.finished_req_ids)
        return len(self.requests) > sum(self.get_request_counts()) + len(self.plugin.queues.idle)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        if reset_running_requests:
            self.plugin.evictions.evict_all((*self.plugin.queues.idle.values(), *self.waiting))
        self.plugin.executor.forget_stuck()  # who finds nothing in the cache needs fewer blocks to start
        try:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        finally:
            # Last, whether vLLM resets its connector or not: those that ran have only now given up what they held.
            if self.plugin.host_memory is not None:
                self.plugin.host_memory.forget()

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.plugin.executor.forget_stuck()
        super().set_pause_state(pause_state)

    @staticmethod
    def _holds_kv_blocks(request: Request) -> bool:
        return request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def make_stats(self, *args: Any, **kwargs: Any) -> "SchedulerStats | None":
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self.plugin.options.tells_kv_use:
            use = self.plugin.kv_memory.use(self.plugin.queues.idle.values())
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: asdict(use)}
        return stats

    def shutdown(self) -> None:
        super().shutdown()
        self.plugin.records.close()


class StreamingScheduler(StreamingHooks, Scheduler):
    """A class for `scheduler_cls`, without asynchronous scheduling."""


class AsyncStreamingScheduler(StreamingHooks, AsyncScheduler):
    """A class for `scheduler_cls`, with asynchronous scheduling: one step is planned while another computes."""


def streaming_scheduler(vllm_config: "VllmConfig", **kwargs: Any) -> StreamingHooks:
    """Make the scheduler that fits the configuration, for `scheduler_cls`: vLLM leaves the choice to it."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AsyncStreamingScheduler if is_async else StreamingScheduler)(vllm_config=vllm_config, **kwargs)
