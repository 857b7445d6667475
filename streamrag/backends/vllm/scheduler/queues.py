"""The queues of requests: vLLM's `waiting` and `running`, and our `idle`.

waiting ─grant─▶ running ─prompt complete─▶ tokens ─▶ finished
   ▲                │ all of a partial prompt is computed
   │                ▼
   └── new chunk ─ idle      keeps its KV until the memory is needed, but holds no sequence slot
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from streamrag.backends.vllm.scheduler.kv.eviction import Evictions
from streamrag.backends.vllm.scheduler.outbox import Outbox
from streamrag.backends.vllm.scheduler.request import StreamRequest, has_prompt_logprobs
from streamrag.engine import RequestView


@dataclass(eq=False)
class Queues:
    """Moves requests between vLLM's queues and `idle`, and acknowledges chunks when a stream becomes idle."""

    scheduler: Scheduler
    evictions: Evictions
    outbox: Outbox
    idle: dict[str, StreamRequest] = field(default_factory=dict)
    """Streams that wait for their next chunk, outside vLLM's queues."""

    def requeue(self, stream: StreamRequest) -> None:
        """Move a stream from idle or running to waiting, as WAITING: its prompt has changed, and vLLM must send all of
        it. A stream that waits already keeps its place, as WAITING. One that was idle waits since its chunk came."""
        if self.idle.pop(stream.request_id, None):
            stream.since_s = stream.last_chunk_s
            self.scheduler.waiting.add_request(stream)
        elif stream.status == RequestStatus.RUNNING:
            self._leave_running(stream)
            self.scheduler.waiting.add_request(stream)
        # The model runner would resume a PREEMPTED request with the prompt that it remembers.
        stream.status = RequestStatus.WAITING

    def resubmit(self, request: StreamRequest) -> None:
        """Make a running request wait, in no queue until `hide_others`: its blocks changed, and vLLM sends it whole."""
        if request.status == RequestStatus.RUNNING:
            self._leave_running(request)
            request.status = RequestStatus.WAITING

    def make_idle_if_done(self, stream: StreamRequest) -> None:
        """Move a partial prompt that is computed, with no step in flight but stale ones, to `idle`; acknowledge it."""
        if stream.is_complete or stream.num_remaining_tokens > 0 or stream.request_id in self.idle:
            return
        if stream.num_in_flight_tokens > stream.num_stale_output_tokens:
            return
        if stream.status == RequestStatus.RUNNING:
            self._leave_running(stream)
        else:
            self.scheduler.waiting.remove_request(stream)
        stream.status = RequestStatus.WAITING
        stream.view = None
        self.idle[stream.request_id] = stream
        self.outbox.acknowledge(stream)

    def make_done_idle(self, requests: Iterable[StreamRequest]) -> None:
        """Call `make_idle_if_done` for each request that has not ended meanwhile."""
        for request in requests:
            if self.scheduler.requests.get(request.request_id) is request:
                self.make_idle_if_done(request)

    def forget_idle(self, request_ids: Iterable[str]) -> None:
        for request_id in request_ids:
            self.idle.pop(request_id, None)

    def take_loaded(self) -> None:
        """Have requests whose KV a third-party connector has loaded wait like all others, so that they are planned."""
        for request in list(self.scheduler.kv_holding_waiting):
            if request.request_id in self.scheduler.finished_recving_kv_req_ids:
                self.scheduler.kv_holding_waiting.remove_request(request)
                self.scheduler.waiting.add_request(request)
                request.view = None

    def is_blocked_in_vllm(self, request: StreamRequest) -> bool:
        """Whether vLLM would skip the request: its grammar is being compiled, or it has stale output in flight.

        Has vLLM check the grammar now. vLLM itself checks only when the request's turn comes: perhaps never, if others
        are always granted first.
        """
        if not self.scheduler._handle_blocked_waiting_request(request):
            return True
        self.scheduler.deferred_waiting.discard(request)
        return request.num_stale_output_tokens > 0 and not request.drop_stale_output

    def hide_others(
        self,
        decoding: Sequence[StreamRequest],
        granted: Sequence[StreamRequest],
        order: Iterable[RequestView],
        blocked: Sequence[StreamRequest],
    ) -> tuple[list[StreamRequest], list[StreamRequest]]:
        """Leave only what may run in vLLM's queues: `decoding` and the granted requests.

        Return the running and the waiting requests that were removed: the rest of `order`, and `blocked`. If slots are
        short, some of the running ones are made waiting.
        """
        scheduler, running_status = self.scheduler, RequestStatus.RUNNING  # locals: hundreds of requests may wait
        running, starting, waiting = [*decoding], list[StreamRequest](), [*blocked]
        for request in granted:
            (running if request.status is running_status else starting).append(request)
        granted_ids, requests = {request.request_id for request in granted}, scheduler.requests
        rest: list[StreamRequest] = []
        for view in order:
            if view.request_id not in granted_ids:
                request = requests[view.request_id]
                (rest if request.status is running_status else waiting).append(request)
        scheduler.running = running
        num_wanted = len(running) + len(starting) + len(rest) - scheduler.max_num_active_reqs
        for request in self._give_up_slots(rest, num_wanted):
            rest.remove(request)
            waiting.append(request)
        scheduler.waiting.clear()
        scheduler.waiting.extend(starting)
        # vLLM's count of sequences that hold a slot without being in `running`: the case of `rest`.
        scheduler.num_waiting_for_streaming_input = len(rest)
        return rest, waiting

    def put_back(self, running: Iterable[StreamRequest], waiting: Iterable[StreamRequest]) -> None:
        self.scheduler.running.extend(running)
        self.scheduler.waiting.extend(waiting)
        self.scheduler.num_waiting_for_streaming_input = 0

    def _give_up_slots(self, rest: list[StreamRequest], num_wanted: int) -> list[StreamRequest]:
        """Set up to `num_wanted` of `rest` to WAITING: drafts first, then from the end. Return them, in no queue.

        A draft is preempted. Others with output keep their slots, or they would lose the output. Those without output
        keep their KV, except if they collect log-probabilities of the prompt.
        """
        if num_wanted <= 0:
            return []
        leaving = [r for r in reversed(rest) if not r.has_output or r.request_class == "draft"]
        leaving = sorted(leaving, key=lambda r: r.request_class != "draft")[:num_wanted]
        for request in leaving:
            if request.has_output:
                self.evictions.preempt(request)
                continue  # vLLM resumes it with its output
            if has_prompt_logprobs(request):
                # Without a slot, the second model runner forgets the log-probabilities collected so far.
                self.evictions.preempt(request)
            self.scheduler.reset_preempted_req_ids.add(request.request_id)
            request.status = RequestStatus.WAITING
            request.view = None
        return leaving

    def _leave_running(self, request: StreamRequest) -> None:
        self.scheduler.running.remove(request)
        # The second model runner frees the slots of exactly these; the first one ignores the set.
        self.scheduler.reset_preempted_req_ids.add(request.request_id)
