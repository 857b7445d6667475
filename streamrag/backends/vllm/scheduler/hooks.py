"""The hooks in vLLM's scheduler: the only module that subclasses it. Each hook forwards to an object of the plugin.

| hook                      | why it is overridden                                                                 |
|---------------------------|--------------------------------------------------------------------------------------|
| `add_request`             | a chunk of a stream replaces the prompt of its request                               |
| `schedule`                | plans the step first, and hides from vLLM the requests that must not run             |
| `_update_after_schedule`  | records what the step computes; a partial prompt must not sample a token             |
| `update_from_output`      | learns from the step, finds streams that became idle, adds acknowledgements          |
| `_preempt_request`        | saves KV to host memory, and logs the preemption                                     |
| `_handle_invalid_blocks`  | idle streams, and requests that lost the block since, may hold KV of a failed load   |
| `_handle_blocked_waiting_request` | a stream whose KV was loaded must be sent with its new prompt                |
| `_free_request`           | sends the record of a finished request with its last output                          |
| `finish_requests`         | idle streams are in none of vLLM's queues                                            |
| `has_requests`            | the engine must sleep while every partial prompt waits for memory                    |
| `has_finished_requests`   | idle streams have not finished                                                       |
| `reset_prefix_cache`      | idle and waiting streams hold KV, and host memory must be cleared as well            |
| `set_pause_state`         | no step is planned while paused, so the stuck state is cleared                       |
| `_holds_kv_blocks`        | vLLM would serve such requests first, regardless of the policy                       |
| `make_spec_decoding_stats`| counts the tokens of a draft that were verified                                      |
| `make_stats`, `shutdown`  | reports the use of KV memory; closes the file of records                             |

All hooks exist since vLLM 0.32. Nothing of vLLM is copied or patched. docs/internals/vllm-surface.md lists what else
the plugin relies on; tests/backends/vllm/test_surface.py has fingerprints of all of it.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.scheduler.plugin import StreamingPlugin
from streamrag.backends.vllm.scheduler.supported import check_supported
from streamrag.backends.vllm.scheduler_options import EngineOptions
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
    """The hooks that `StreamingScheduler` and `AsyncStreamingScheduler` share."""

    def __init__(self, vllm_config: "VllmConfig", kv_cache_config: "KVCacheConfig", *args: Any, **kwargs: Any) -> None:
        check_supported(vllm_config, kv_cache_config)
        super().__init__(vllm_config, kv_cache_config, *args, **kwargs)
        if self.num_spec_tokens:
            # A constant schedule. Without one, vLLM adds placeholders to requests that have one token to compute.
            self.dynamic_sd_lookup = [self.num_spec_tokens] * (self.scheduler_config.max_num_seqs + 1)
        options = EngineOptions.of(vllm_config)
        self.plugin = StreamingPlugin(self, options, super().add_request, super()._preempt_request)

    def add_request(self, request: Request) -> None:
        self.plugin.executor.forget_stuck()
        self.plugin.intake.receive(request)

    def schedule(self, throttle_prefills: bool = False) -> SchedulerOutput:
        """Let vLLM schedule a step after our plan; while paused, without one."""
        self.plugin.steps.mark_start()
        if self.pause_state != PauseState.UNPAUSED:
            return super().schedule(throttle_prefills)
        with self.plugin.executor.planned_step():
            return super().schedule(throttle_prefills)

    def _update_after_schedule(self, scheduler_output: SchedulerOutput) -> None:
        with self.plugin.steps.record_scheduled(scheduler_output):
            super()._update_after_schedule(scheduler_output)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: "ModelRunnerOutput"
    ) -> dict[int, "EngineCoreOutputs"]:
        """Learn from the step, let vLLM process its output, make idle what is done, and add our outputs."""
        step = self.plugin.steps.end_oldest(scheduler_output, model_runner_output)
        if step.prefills:
            self.plugin.executor.forget_stuck()  # the next plan acknowledges streams that got stuck in the meantime
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        self.plugin.queues.make_done_idle(request for request, _ in step.prefills)
        return self.plugin.outbox.add_to(outputs)

    def _preempt_request(self, request: Request, timestamp: float, drop_stale_output: bool = False) -> None:
        self.plugin.evictions.on_preemption(request)
        super()._preempt_request(request, timestamp, drop_stale_output)
        if drop_stale_output:
            self.plugin.evictions.on_dropped_output(request)

    def _handle_invalid_blocks(self, invalid_block_ids: set[int], num_scheduled_tokens: dict[str, int]) -> set[str]:
        if self.plugin.host_memory is None:  # a third-party KV connector
            failed = super()._handle_invalid_blocks(invalid_block_ids, num_scheduled_tokens)
            self.plugin.evictions.on_their_failed_loads(failed)
            return failed
        return self.plugin.evictions.on_failed_loads(invalid_block_ids)

    def _handle_blocked_waiting_request(self, request: Request) -> bool:
        """Return whether a request that waited for a grammar or a load may be scheduled now. One without output waits
        anew after a load: the model runner would resume a PREEMPTED one with the prompt that it remembers."""
        was_loading = request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
        is_ready = super()._handle_blocked_waiting_request(request)
        if was_loading and is_ready and not request.num_output_tokens:
            request.status = RequestStatus.WAITING
        return is_ready

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        """Release and record a request that ended. Return vLLM's two results, with the record added to the first."""
        self.plugin.claims.release(request)
        self.plugin.estimates.on_end(request)
        record = self.plugin.records.end(request)
        kv_params, ec_params = super()._free_request(request, delay_free_blocks)
        return {**(kv_params or {}), KEY: {"record": record}}, ec_params  # next to a KV connector's own parameters

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        """Let vLLM finish these requests, for None all, after removing them from the idle ones."""
        if request_ids is None:
            ids = list(self.requests)
        else:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        self.plugin.queues.forget_idle(ids)
        return super().finish_requests(ids, finished_status)

    def has_requests(self) -> bool:
        """Whether the engine has work: outputs, KV that a connector still writes elsewhere, requests or, if these all
        wait for memory, a change of the free blocks."""
        if not self.plugin.outbox.is_empty:
            return True
        if self.connector is not None and self.connector.has_pending_push_work():
            return True
        if self.plugin.executor.is_stuck and not self.has_finished_requests():
            return self.plugin.executor.has_memory_changed
        return super().has_requests()

    def has_finished_requests(self) -> bool:
        # With a KV connector, vLLM counts requests outside its queues as finished: idle streams would keep it awake.
        if self.finished_req_ids or self.connector is None:
            return bool(self.finished_req_ids)
        return len(self.requests) > sum(self.get_request_counts()) + len(self.plugin.queues.idle)

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Reset vLLM's cache, and return whether that was possible; clear host memory in any case. If running requests
        are reset, first evict idle and waiting ones."""
        if reset_running_requests:
            self.plugin.evictions.evict_all((*self.plugin.queues.idle.values(), *self.waiting))
        self.plugin.executor.forget_stuck()  # a request without a prefix hit needs fewer blocks to start
        try:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        finally:
            # Last, whether or not vLLM resets its connector: running requests have only now released their blocks.
            if self.plugin.host_memory is not None:
                self.plugin.host_memory.clear()

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.plugin.executor.forget_stuck()
        super().set_pause_state(pause_state)

    @staticmethod
    def _holds_kv_blocks(request: Request) -> bool:
        return request.status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def make_spec_decoding_stats(self, *args: Any, request_id: str = "", **kwargs: Any) -> Any:
        """Count the tokens of a draft that a step verified and accepted, and return vLLM's statistics."""
        request = self.requests[request_id]
        counts = kwargs["num_draft_tokens"], kwargs["num_accepted_tokens"]
        request.log.on_verified(*counts, are_copies=request.draft.is_copying)
        return super().make_spec_decoding_stats(*args, request_id=request_id, **kwargs)

    def make_stats(self, *args: Any, **kwargs: Any) -> "SchedulerStats | None":
        """Return vLLM's statistics, with the use of KV memory if that is reported; None if vLLM makes none."""
        stats = super().make_stats(*args, **kwargs)
        if stats is not None and self.plugin.options.reports_kv_use:
            use = self.plugin.kv_memory.use(self.plugin.queues.idle.values())
            stats.kv_connector_stats = {**(stats.kv_connector_stats or {}), KEY: use}
        return stats

    def shutdown(self) -> None:
        super().shutdown()
        self.plugin.records.close()


class StreamingScheduler(StreamingHooks, Scheduler):
    """The `scheduler_cls` without asynchronous scheduling."""


class AsyncStreamingScheduler(StreamingHooks, AsyncScheduler):
    """The `scheduler_cls` with asynchronous scheduling: one step is planned while another computes."""


def streaming_scheduler(vllm_config: "VllmConfig", **kwargs: Any) -> StreamingHooks:
    """Construct the scheduler that fits the configuration. vLLM calls this as its `scheduler_cls`."""
    is_async = vllm_config.scheduler_config.async_scheduling
    return (AsyncStreamingScheduler if is_async else StreamingScheduler)(vllm_config=vllm_config, **kwargs)
