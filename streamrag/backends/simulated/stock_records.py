"""Records of requests under a scheduler that keeps none: vLLM's own."""

from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput

from streamrag.backends.vllm.scheduler.host_memory.step_parts import parts_of
from streamrag.backends.vllm.scheduler.request_log import RequestLog
from streamrag.engine.swapping import DROPPED
from streamrag.records import Outcome, RequestRecord


@dataclass
class _Request:
    log: RequestLog
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_held: int = 0
    """Number of leading tokens whose KV is there, or being computed."""


@dataclass
class StockRecords:
    """Follows requests from the outside: what goes in, each step, what comes out."""

    _requests: dict[str, _Request] = field(default_factory=dict)

    def add(self, request_id: str, num_tokens: int, arrival_s: float, now_s: float) -> None:
        """Note a request, or the next chunk of a session."""
        known = self._requests.get(request_id)
        if known:
            known.num_prompt_tokens += num_tokens
        else:
            log = RequestLog(request_id, False, arrival_s, now_s)
            self._requests[request_id] = _Request(log, num_tokens)

    def add_step(self, step: SchedulerOutput, start_s: float, end_s: float) -> None:
        """Note a step that computes. Requests that were preempted for it lost their KV at its start."""
        for request_id in step.preempted_req_ids or ():
            if known := self._requests.get(request_id):
                known.log.on_loss(known.num_held, DROPPED, start_s)
                known.num_held = 0
        for request_id, (num_new, num_context) in parts_of(step):
            known = self._requests.get(request_id)
            if known is None:
                continue
            start, end = (min(n, known.num_prompt_tokens) for n in (num_context, num_context + num_new))
            known.num_held = num_context + num_new
            if start < end:
                known.log.on_step(start, end, start_s)
                known.log.on_step_end(end_s, is_complete=end == known.num_prompt_tokens)

    def add_output(self, request_id: str, num_output_tokens: int) -> None:
        """Note tokens of an answer."""
        if known := self._requests.get(request_id):
            known.num_output_tokens += num_output_tokens

    def end(self, request_id: str, outcome: Outcome, now_s: float) -> RequestRecord | None:
        """Return the record of a request that has ended; None of an unknown one."""
        known = self._requests.pop(request_id, None)
        if known is None:
            return None
        return known.log.end(outcome, now_s, known.num_prompt_tokens, known.num_output_tokens)
