"""Steps whose output is outstanding: one, or two with asynchronous scheduling. They end in the order of their start."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from streamrag.backends.vllm.scheduler.estimates import Estimates
from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory
from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.request_log import HostClock


class StepInFlight(NamedTuple):
    """A step that has been scheduled and whose output is outstanding."""

    start_s: float  # time at which the step was planned
    num_pairs: float  # see `StepCostEstimator.observe_step`
    prefills: list[tuple[StreamRequest, bool]]
    """Requests whose prompt the step computes, and whether the step computes the last token of a complete prompt."""
    num_tokens_of: Mapping[str, int]  # tokens that the step computes, by request id


@dataclass(eq=False)
class StepsInFlight:
    """Records what each scheduled step computes, and feeds finished steps to the estimates, costs and logs."""

    scheduler: Scheduler
    clock: HostClock
    estimates: Estimates
    host_memory: HostMemory | None
    start_s: float = 0.0  # time at which the last step was planned
    _steps: deque[StepInFlight] = field(default_factory=deque)
    _last_output_s: float = 0.0

    @property
    def has_prefills(self) -> bool:
        """Whether any step in flight computes prompt tokens."""
        return any(step.prefills for step in self._steps)

    def num_tokens_of(self, request_id: str) -> int:
        """Return the number of tokens that the steps in flight compute for a request id."""
        return sum(step.num_tokens_of.get(request_id, 0) for step in self._steps)

    def mark_start(self) -> None:
        self.start_s = self.clock.monotonic()

    @contextmanager
    def record_scheduled(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Record what a step computes. Within the context, vLLM counts its tokens; then partial prompts sample none."""
        requests = self.scheduler.requests
        if self.scheduler.need_mamba_block_aligned_split and scheduler_output.preempted_req_ids is not None:
            # The first model runner then forgets in which block it left the state of a Mamba layer for such an id.
            scheduler_output.preempted_req_ids.update(new.req_id for new in scheduler_output.scheduled_new_reqs)
        partial: list[StreamRequest] = []
        prefills: list[tuple[StreamRequest, bool]] = []
        num_pairs = 0.0
        for request_id, num_tokens in scheduler_output.num_scheduled_tokens.items():
            request = requests[request_id]
            request.view = request.step_end = None  # first: a request with tokens left to compute samples no token
            num_pairs += num_tokens * (request.num_computed_tokens + num_tokens / 2)
            if request.log.num_present >= request.num_prompt_tokens:
                continue  # a decode
            prefills.append((request, self._record_prefill(request, num_tokens)))
            if not request.is_complete:
                partial.append(request)
                if self.host_memory is not None:
                    self.host_memory.on_partial(request)
        self._steps.append(StepInFlight(self.start_s, num_pairs, prefills, scheduler_output.num_scheduled_tokens))
        yield
        self.scheduler._inflight_prefills.update(r for r, _ in prefills if r.is_complete and r.is_prefill_chunk)
        for request in partial:
            # Even where the counts reach the end of a partial prompt, this step must not sample a token.
            request.is_prefill_chunk = True
            request.num_output_placeholders = 0
            request.spec_token_ids = []
            request.next_decode_eligible_step = 0

    def end_oldest(self, scheduler_output: SchedulerOutput, output: ModelRunnerOutput) -> StepInFlight:
        """Remove the oldest step, learn from it, and return it. Called before vLLM processes the step's output."""
        now_s = self.clock.monotonic()
        step = self._steps.popleft() if self._steps else StepInFlight(now_s, 0, [], {})  # not planned here
        duration_s = now_s - max(step.start_s, self._last_output_s)
        self._last_output_s = now_s
        self.estimates.on_step(scheduler_output.total_num_scheduled_tokens, step.num_pairs, duration_s)
        if self.host_memory is not None:
            self.host_memory.on_step_end(scheduler_output, output.kv_connector_output, duration_s)
        for request, is_complete in step.prefills:
            request.log.on_step_end(now_s, is_complete=is_complete)
        return step

    def _record_prefill(self, request: StreamRequest, num_tokens: int) -> bool:
        """Log the prompt tokens of a step. Return whether the step computes the last token of a complete prompt."""
        num_prompt_tokens = request.num_prompt_tokens
        start = min(request.num_computed_tokens, num_prompt_tokens)
        end = min(request.num_computed_tokens + num_tokens, num_prompt_tokens)
        request.log.on_step(start, end, self.start_s, request.num_loaded_tokens)
        request.num_loaded_tokens = 0
        return end == num_prompt_tokens  # False for a partial prompt, whose last token is hidden
