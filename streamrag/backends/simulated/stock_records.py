"""Records of requests under vLLM's own scheduler, which keeps none."""

from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput

from streamrag.backends.vllm.scheduler.host_memory.costs import parts_of
from streamrag.backends.vllm.scheduler.request_log import RequestLog
from streamrag.engine.recompute_or_swap import DROPPED
from streamrag.records import RequestOutcome, RequestRecord


@dataclass
class _Request:
    log: RequestLog
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_held: int = 0  # leading tokens whose KV is computed, or being computed


@dataclass
class StockRecords:
    """Builds records from outside the scheduler: from inputs, steps and outputs."""

    _requests: dict[str, _Request] = field(default_factory=dict)

    def add(self, request_id: str, num_tokens: int, arrival_s: float, now_s: float) -> None:
        """Add a request, or the tokens of a session's next chunk; its times are those of the first."""
        if request := self._requests.get(request_id):
            request.num_prompt_tokens += num_tokens
        else:
            self._requests[request_id] = _Request(RequestLog(request_id, False, arrival_s, now_s), num_tokens)

    def add_step(self, step: SchedulerOutput, start_s: float, end_s: float) -> None:
        """Record which prompt tokens a step computed. Requests preempted in the step lost their KV at its start."""
        for request_id in step.preempted_req_ids or ():
            if request := self._requests.get(request_id):
                request.log.on_loss(request.num_held, DROPPED, start_s)
                request.num_held = 0
        for request_id, (num_new, num_context) in parts_of(step):
            request = self._requests.get(request_id)
            if request is None:
                continue
            start, end = (min(n, request.num_prompt_tokens) for n in (num_context, num_context + num_new))
            request.num_held = num_context + num_new
            if start < end:
                request.log.on_step(start, end, start_s)
                request.log.on_step_end(end_s, is_complete=end == request.num_prompt_tokens)

    def add_output(self, request_id: str, num_output_tokens: int) -> None:
        if request := self._requests.get(request_id):
            request.num_output_tokens += num_output_tokens

    def end(self, request_id: str, outcome: RequestOutcome, now_s: float) -> RequestRecord | None:
        """Return the record of a request that has ended; None for an unknown request."""
        if (request := self._requests.pop(request_id, None)) is None:
            return None
        return request.log.end(outcome, now_s, request.num_prompt_tokens, request.num_output_tokens)
