"""The steps whose output is still to come: one, or two with asynchronous scheduling. They end in the order in which
they start."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler

from streamrag.backends.vllm.scheduler.estimates import Estimates
from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory
from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.request_log import HostClock

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput


class StepInFlight(NamedTuple):
    """A step that was planned and whose output is still to come."""

    start_s: float
    """Time at which it was planned."""
    num_pairs: float
    """See `StepSizes.observe_step`."""
    prefills: list[tuple[StreamRequest, bool]]
    """Requests whose prompts it computes tokens of, and whether these are the last of a complete prompt."""
    num_tokens_of: Mapping[str, int]
    """Tokens that it computes, by request id."""


@dataclass(kw_only=True, eq=False)
class StepsInFlight:
    """Notes what each step computes when it is scheduled, and what is known of that when it has ended."""

    scheduler: Scheduler
    clock: HostClock
    estimates: Estimates
    host_memory: HostMemory | None
    start_s: float = 0.0
    """Time at which the last step was planned."""
    _steps: deque[StepInFlight] = field(default_factory=deque)
    _last_output_s: float = 0.0

    @property
    def has_prefills(self) -> bool:
        """Whether any of them computes tokens of prompts."""
        return any(step.prefills for step in self._steps)

    def num_tokens_of(self, request_id: str) -> int:
        """Tokens that they compute for requests of this id."""
        return sum(step.num_tokens_of.get(request_id, 0) for step in self._steps)

    def start(self) -> None:
        self.start_s = self.clock.monotonic()

    @contextmanager
    def scheduled(self, scheduler_output: SchedulerOutput) -> Iterator[None]:
        """Note what a step computes. Within the context, vLLM counts its tokens as computed."""
        requests = self.scheduler.requests
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
        self._steps.append(StepInFlight(self.start_s, num_pairs, prefills, scheduler_output.num_scheduled_tokens))
        yield
        self.scheduler._inflight_prefills.update(r for r, _ in prefills if r.is_complete and r.is_prefill_chunk)
        for request in partial:
            # The prompt is not at its end, whatever the numbers say: no token comes from this step.
            request.is_prefill_chunk = True
            request.num_output_placeholders = 0
            request.spec_token_ids = []
            request.next_decode_eligible_step = 0

    def end_first(self, scheduler_output: SchedulerOutput, output: "ModelRunnerOutput") -> StepInFlight:
        """Learn from the step that has ended, and return it. vLLM takes its output in afterwards."""
        now_s, step = self.clock.monotonic(), self._steps.popleft()
        duration_s = now_s - max(step.start_s, self._last_output_s)
        self._last_output_s = now_s
        self.estimates.on_step(scheduler_output.total_num_scheduled_tokens, step.num_pairs, duration_s)
        if self.host_memory is not None:
            self.host_memory.on_step_end(scheduler_output, output.kv_connector_output, duration_s)
        for request, is_complete in step.prefills:
            request.log.on_step_end(now_s, is_complete=is_complete)
        return step

    def _record_prefill(self, request: StreamRequest, num_tokens: int) -> bool:
        """Return whether the prompt is complete, and all of it computed with this step."""
        num_prompt_tokens = request.num_prompt_tokens
        start = min(request.num_computed_tokens, num_prompt_tokens)
        end = min(request.num_computed_tokens + num_tokens, num_prompt_tokens)
        request.log.on_step(start, end, self.start_s, request.num_loaded_tokens)
        request.num_loaded_tokens = 0
        return end == num_prompt_tokens  # never of a partial one, whose last token is hidden
