"""The loop of vLLM's `EngineCore` in virtual time."""

import copy
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager

from streamrag.backends.simulated.blind_runner import Runner
from streamrag.backends.simulated.config import EngineShape, kv_cache_config, vllm_config
from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.backends.vllm.copy_wire import HostCopies
from streamrag.backends.vllm.scheduler.hooks import streaming_scheduler

BlockHasher: TypeAlias = Callable[[Request], list[Any]]
"""Returns the hashes of a request's full blocks that have none yet."""


def always(seconds: float) -> Callable[[SchedulerOutput, float], float]:
    """Return a step time function: `seconds` for every step that computes tokens."""
    return lambda step, start_s: seconds if step.total_num_scheduled_tokens else 0.0


class _Launched(NamedTuple):
    """A step in flight."""

    scheduled: SchedulerOutput
    output: ModelRunnerOutput
    end_s: float


class SimulatedEngine:
    """An engine without a model. `add`, `abort` and `step` are the operations of vLLM's loop; the caller decides when.

    With asynchronous scheduling, one step is scheduled while the previous one computes. Inputs and outputs then take
    effect one step later, as in `EngineCore.step_with_batch_queue`.
    """

    def __init__(
        self,
        shape: EngineShape,
        runner: Runner,
        step_s: Callable[[SchedulerOutput, float], float],
        make_scheduler: Callable[..., Any] = streaming_scheduler,
        *,
        has_v2_runner: bool = False,
        block_hasher: BlockHasher | None = None,
    ) -> None:
        config, kv_config = vllm_config(shape), kv_cache_config(shape)
        self.shape = shape
        self.runner = runner
        self.step_s = step_s  # returns the seconds of a step, given its start. Also called for steps that only copy.
        self.on_step: Callable[[SchedulerOutput, float, float], None] | None = None
        """Called with each step that computes tokens, its start and its end."""
        self.now_s = 0.0
        self.num_steps = 0
        self.scheduler: Scheduler = make_scheduler(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=StructuredOutputManager(config),
            block_size=math.lcm(*(group.kv_cache_spec.block_size for group in kv_config.kv_cache_groups)),
            hash_block_size=shape.block_size,
            log_stats=False,
        )
        self.scheduler.use_v2_model_runner = has_v2_runner
        if hasattr(self.scheduler, "plugin"):
            self.scheduler.plugin.clock.monotonic = self.scheduler.plugin.clock.wall = lambda: self.now_s
        self._hasher = block_hasher
        if shape.has_prefix_cache and block_hasher is None:
            hash_function = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
            init_none_hash(hash_function)
            self._hasher = get_request_block_hasher(shape.block_size, hash_function)
        self._in_flight: deque[_Launched] = deque()
        self._device_free_s = 0.0

    @property
    def has_work(self) -> bool:
        """Whether vLLM's loop would continue, rather than sleep until the next input."""
        return bool(self._in_flight) or self.scheduler.has_requests()

    def add(
        self,
        request_id: str,
        token_ids: Sequence[int],
        params: SamplingParams,
        chunk: PromptMessage | None = None,
        *,
        is_session: bool = False,
        arrival_s: float | None = None,
    ) -> None:
        """Add a plain request, or a chunk of a stream with its message.

        With `is_session`, add a chunk of one of vLLM's own streaming sessions; a plain request of the same id ends it.
        """
        params = copy.copy(params)
        if chunk is not None:
            params.extra_args = {**(params.extra_args or {}), **chunk.extra_args()}
        request = Request(
            request_id,
            list(token_ids),
            params,
            pooling_params=None,
            arrival_time=self.now_s if arrival_s is None else arrival_s,
            block_hasher=self._hasher,
            resumable=chunk is not None or is_session,
        )
        self.scheduler.add_request(request)

    def abort(self, request_id: str) -> None:
        self.scheduler.finish_requests(request_id, RequestStatus.FINISHED_ABORTED)

    def step(self) -> list[EngineCoreOutput]:
        """Run one turn of the loop: schedule, compute, process the output of the oldest step in flight."""
        return self.collect() if self.launch() is not None else []

    def launch(self) -> float | None:
        """Schedule work, up to one step in flight, two if asynchronous; return the end of the oldest step, if any."""
        depth = 2 if self.shape.is_async else 1
        while self.scheduler.has_requests() and len(self._in_flight) < depth:
            scheduled = self.scheduler.schedule()
            self._submit(scheduled)
            if not (scheduled.total_num_scheduled_tokens or self.scheduler.has_requests()):
                break
        return self._in_flight[0].end_s if self._in_flight else None

    def collect(self) -> list[EngineCoreOutput]:
        """Process and return the outputs of the oldest step in flight, which there must be; set `now_s` to its end."""
        step = self._in_flight.popleft()
        self.now_s = max(self.now_s, step.end_s)
        by_client = self.scheduler.update_from_output(step.scheduled, step.output)
        return [output for client_outputs in by_client.values() for output in client_outputs.outputs]

    def _submit(self, scheduled: SchedulerOutput) -> None:
        """Execute a step when the device is free, call `on_step` if it has tokens, and add it to those in flight."""
        self.num_steps += 1
        start_s = max(self.now_s, self._device_free_s)
        copies = scheduled.kv_connector_metadata
        # Loads must be finished before the step computes, and saves before it overwrites their blocks.
        copied = self.runner.copy(copies) if isinstance(copies, HostCopies) else None
        self._device_free_s = start_s + self.step_s(scheduled, start_s)
        if self.on_step and scheduled.total_num_scheduled_tokens:
            self.on_step(scheduled, start_s, self._device_free_s)
        output = self.runner.execute(scheduled)
        if copied is not None:
            output = replace(output, kv_connector_output=copied)
        self._in_flight.append(_Launched(scheduled, output, self._device_free_s))


def quick_block_hasher(block_size: int) -> BlockHasher:
    """Return a hasher, which returns the hashes of a request's new full blocks, for text requests without adapters.
    Blocks are equal if all tokens up to their ends are equal.

    vLLM's secure hashes would be most of the work in large simulations. These are Python's, of integers only, which are
    the same in every run, and not secure against forgery.
    """

    def block_hashes(request: Request) -> list[Any]:
        hashes = request.block_hashes
        tokens = request._all_token_ids
        start, end = len(hashes) * block_size, request.num_tokens
        before = int.from_bytes(hashes[-1], "little", signed=True) if hashes else 0
        new_hashes = []
        while start + block_size <= end:
            before = hash((before, *tokens[start : start + block_size]))
            new_hashes.append(before.to_bytes(8, "little", signed=True))
            start += block_size
        return new_hashes

    return block_hashes
