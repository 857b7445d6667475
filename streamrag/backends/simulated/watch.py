"""What happens to requests under a scheduler that keeps no records: vLLM's own."""

from dataclasses import dataclass, field

from vllm.v1.core.sched.output import SchedulerOutput

from streamrag.backends.vllm.scheduler.host_memory.step_parts import parts_of
from streamrag.backends.vllm.scheduler.request_log import RequestLog
from streamrag.engine.swapping import DROPPED
from streamrag.records import Outcome, RequestRecord


@dataclass
class _Watched:
    log: RequestLog
    num_prompt_tokens: int
    num_output_tokens: int = 0
    num_held: int = 0
    """Leading tokens whose KV is there, or being computed."""


@dataclass
class Watch:
    """Follows requests from the outside: what goes in, each step, what comes out."""

    _requests: dict[str, _Watched] = field(default_factory=dict)

    def adds(self, request_id: str, num_tokens: int, arrival_s: float, now_s: float) -> None:
        """A request, or the next chunk of a session."""
        known = self._requests.get(request_id)
        if known:
            known.num_prompt_tokens += num_tokens
        else:
            log = RequestLog(request_id, False, arrival_s, now_s)
            self._requests[request_id] = _Watched(log, num_tokens)

    def runs(self, step: SchedulerOutput, start_s: float, end_s: float) -> None:
        """A step that computes. Who was preempted for it lost its KV at its start."""
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

    def brings(self, request_id: str, num_output_tokens: int) -> None:
        """Tokens of its answer."""
        if known := self._requests.get(request_id):
            known.num_output_tokens += num_output_tokens

    def ends(self, request_id: str, outcome: Outcome, now_s: float) -> RequestRecord | None:
        known = self._requests.pop(request_id, None)
        if known is None:
            return None
        return known.log.end(outcome, now_s, known.num_prompt_tokens, known.num_output_tokens)
