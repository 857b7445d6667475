"""How chunks come into vLLM's scheduler and answers leave it.

    first chunk ─▶ Scheduler.add_request ─▶ waiting ..
    next chunk  ─▶ prompt replaced in place ─▶ waiting, or idle if it leaves nothing to compute
    last chunk  ─▶ the same, and its last token is not hidden any more: the answer is sampled

vLLM's client expects one finish per chunk. Those of chunks that are not the last carry no token: acknowledgements.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import msgspec
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.request import Request, RequestStatus

from streamrag.backends.vllm.chunk_wire import KEY, EndOfInput, MalformedMessageError, PromptMessage, decode
from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory, host_memory_of
from streamrag.backends.vllm.scheduler.kv.replacement import drop_output_in_flight, replace_prompt
from streamrag.backends.vllm.scheduler.record_file import RecordFile
from streamrag.backends.vllm.scheduler.request import StreamRequest, has_prompt_logprobs
from streamrag.engine.forecast import ChunkForecast
from streamrag.engine.pace import Pace
from streamrag.engine.step_size import StepSizes
from streamrag.records import ChunkRecord

if TYPE_CHECKING:
    from vllm.v1.outputs import ModelRunnerOutput

    class _Base(Scheduler): ...
else:
    _Base = object

NUM_GONE = 1_000
"""Requests that were not finished, of which it is remembered that chunks may still come."""


class StreamIntakeMixin(_Base):
    """What a scheduler must do with chunks, whoever decides what runs."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.running: list[Request]
        self.idle: dict[str, StreamRequest] = {}
        """Streams that wait for their next chunk, outside of vLLM's queues."""
        self.clock: Callable[[], float] = time.monotonic
        """In seconds; of all records. `time.monotonic` is, on Linux, the same for all processes of a host."""
        self.wall_clock: Callable[[], float] = time.time
        """In seconds; of `Request.arrival_time`, which is all that vLLM says about when a plain request was sent."""
        self.record_file: RecordFile | None = None
        self.forecast = ChunkForecast()
        self.step_sizes = StepSizes()
        self.pace: Pace
        self.host_memory: HostMemory | None = host_memory_of(self.connector)
        self._outbox: list[tuple[int, EngineCoreOutput]] = []
        # Ids of the last that failed or were aborted. Their clients know, and may use them again.
        self._gone: deque[str] = deque(maxlen=NUM_GONE)
        # For each step whose output is still to come: the requests whose prompts it computes tokens of, and whether
        # these are the last of a complete prompt. vLLM calls `update_from_output` once per step, in order.
        self._prefills_in_flight: deque[list[tuple[StreamRequest, bool]]] = deque()
        self._counts_in_flight: deque[dict[str, int]] = deque()  # likewise, of all requests, the tokens computed

    # ------------------------------------------------------------------------------------------------ what comes in

    def add_request(self, request: Request) -> None:
        """A plain request, the first chunk of a stream, a further one, or the end of its input.

        Whatever is wrong with it fails that request alone: nothing may be raised here, where it would end the engine.
        """
        try:
            message = decode(request.sampling_params.extra_args if request.sampling_params else None)
        except MalformedMessageError as error:
            self._refuse(request, str(error))
            return
        if isinstance(message, EndOfInput):
            self._end_input(request.request_id)
            return
        existing = self.requests.get(request.request_id)
        if message is not None and isinstance(existing, StreamRequest) and existing.takes_chunks:
            self._add_chunk(existing, request, message)
        elif message is not None and message.index > 0 and self._is_late(request):
            pass  # its client knows how its stream ended
        elif existing is None:
            self._open(request, message)
        else:  # one that has ended lives on until a KV connector lets go of its blocks
            self._refuse(request, f"there is a request {request.request_id!r} already", message)

    def _is_late(self, request: Request) -> bool:
        """Whether it is a chunk that was on its way when its stream ended. Its error would reach who has the id now."""
        return request.resumable and request.request_id in self._gone

    def _refuse(self, request: Request, problem: str, message: PromptMessage | None = None) -> None:
        """Fail a request that has not been taken in, or the stream that it is a chunk of."""
        existing = self.requests.get(request.request_id)
        if request.resumable and isinstance(existing, StreamRequest) and not existing.is_finished():
            self._fail(existing, problem)
            return
        stream = self._adopt(request, message)
        stream.status = RequestStatus.FINISHED_ERROR
        self._record_end(stream)
        self._send_error(stream, problem)

    def _adopt(self, request: Request, message: PromptMessage | None) -> StreamRequest:
        now_s = self.clock()
        return StreamRequest.adopt(request, message, now_s - (self.wall_clock() - request.arrival_time), now_s)

    def _open(self, request: Request, message: PromptMessage | None) -> None:
        problem = self._problem(request, message)
        if problem is None and message is not None and message.index > 0:
            problem = f"chunk {message.index} came, but no chunk 0: it was lost, or the stream has ended"
        if problem is not None:
            self._refuse(request, problem, message if request.resumable else None)
            return
        stream = self._adopt(request, message)
        # Another request may have had its id, of which steps in flight and the outbox still bring something.
        self._outbox = [(client, output) for client, output in self._outbox if output.request_id != stream.request_id]
        stream.num_in_flight_tokens = sum(counts.get(stream.request_id, 0) for counts in self._counts_in_flight)
        drop_output_in_flight(stream)
        if message is not None:
            stream.log.on_chunk(ChunkRecord(stream.arrival_s, stream.num_prompt_tokens, 0, 0), num_left=0)
            self._forecast(stream)
        super().add_request(stream)
        if stream.is_complete:
            self.step_sizes.observe_complete(self.clock())
        self._settle(stream)

    def _add_chunk(self, stream: StreamRequest, request: Request, message: PromptMessage) -> None:
        now_s = self.clock()
        if problem := self._misfit(stream, request, message) or self._problem(request, message):
            self._fail(stream, problem)
            return
        self._acknowledge(stream, num_messages=stream.num_messages)
        stream.num_messages += 1
        num_held = len(stream._all_token_ids)
        num_computed = stream.num_computed_tokens
        stream.is_complete = message.is_complete  # first: a complete prompt has one token more to hash
        num_shared = replace_prompt(self, stream, message.num_kept, request)
        # When it arrived, not when the step under way let it in: short steps follow from short gaps.
        arrival_s = now_s if message.arrival_s is None else min(message.arrival_s, now_s)
        gap_s = max(arrival_s - stream.last_chunk_s, 0.0)  # clients say when their chunks arrived, and may be wrong
        self.forecast.observe(message.source_name, gap_s, num_shared / num_held)
        self._forecast(stream)
        stream.num_kept_tokens = min(stream.num_kept_tokens, num_shared)
        if self.host_memory is not None:
            self.host_memory.on_chunk(stream, num_computed, num_shared)
        stream.sampling_params = request.sampling_params
        stream.max_tokens = request.max_tokens
        stream.last_chunk_s = arrival_s
        if stream.request_id in self.idle:
            stream.since_s = stream.last_chunk_s
        stream.expected_complete_s = message.expected_complete_s
        stream.view = None
        chunk = ChunkRecord(stream.last_chunk_s, stream.num_prompt_tokens, num_shared, num_computed)
        stream.log.on_chunk(chunk, num_left=stream.num_computed_tokens)
        self._requeue(stream)
        if stream.is_complete:
            self.step_sizes.observe_complete(now_s)
        self._settle(stream)

    def _forecast(self, stream: StreamRequest) -> None:
        """Note how soon the prompt is likely to be replaced, and how much of it a step may compute until then."""
        replaced_every_s = self.forecast.replaced_every_s(stream.source_name)
        stream.is_replaced = replaced_every_s < math.inf
        size = self.step_sizes.at(self.clock())
        stream.num_step_tokens = self.pace.num_before_replaced(replaced_every_s, size.overhead if size else None)

    def _requeue(self, stream: StreamRequest) -> None:
        """Have the model runner be sent the new prompt: only a request that waits is sent as a whole."""
        if self.idle.pop(stream.request_id, None):
            self.waiting.add_request(stream)
        elif stream.status == RequestStatus.RUNNING:
            self._leave_running(stream)
            self.waiting.add_request(stream)
        # PREEMPTED would be resumed with the prompt that the runner remembers.
        stream.status = RequestStatus.WAITING

    def _leave_running(self, request: StreamRequest) -> None:
        self.running.remove(request)
        # The second model runner gives up the slots of these only; the first takes no notice.
        self.reset_preempted_req_ids.add(request.request_id)

    def _settle(self, stream: StreamRequest) -> None:
        """If all that can be computed is computed, wait for the next chunk outside of all queues."""
        if stream.is_complete or stream.num_remaining_tokens > 0 or stream.request_id in self.idle:
            return
        if stream.num_in_flight_tokens > stream.num_stale_output_tokens:
            return
        if stream.status == RequestStatus.RUNNING:
            self._leave_running(stream)
        else:
            self.waiting.remove_request(stream)
        stream.status = RequestStatus.WAITING
        stream.view = None
        self.idle[stream.request_id] = stream
        self._acknowledge(stream, num_messages=stream.num_messages)

    def _misfit(self, stream: StreamRequest, request: Request, message: PromptMessage) -> str | None:
        """Why the chunk cannot be the next of the stream. What it keeps is meant of the one before."""
        if message.index != stream.num_messages:
            return f"message {message.index} came instead of message {stream.num_messages}: one was lost, or came twice"
        if stream.is_complete:
            return f"chunk {message.index} came after the last one"
        num_held = len(stream._all_token_ids)
        if message.num_kept > num_held:
            return f"chunk {message.index} keeps {message.num_kept} tokens of a prompt of {num_held}"
        if _cache_key(request) != _cache_key(stream):
            return f"chunk {message.index} has another LoRA adapter, or another cache salt, than its stream"
        return None

    def _problem(self, request: Request, message: PromptMessage | None) -> str | None:
        if request.kv_transfer_params is not None and not isinstance(request.kv_transfer_params, dict):
            return "extra_args['kv_transfer_params'] must be a mapping"
        num_tokens = request.num_prompt_tokens + (message.num_kept if message else 0)
        if num_tokens < 1:
            return "a prompt needs at least one token"
        if message is None:
            return "vLLM's own streaming sessions need vLLM's own scheduler" if request.resumable else None
        if not request.resumable:
            return "a chunk must come as one of vLLM's streamed inputs, or nobody could ever send the next"
        if message.index == 0 and message.num_kept > 0:
            return f"the first chunk of a stream keeps {message.num_kept} tokens, of nothing"
        if num_tokens >= self.max_model_len:
            return f"a prompt of {num_tokens} tokens does not fit the model's length of {self.max_model_len}"
        unsupported = {
            "structured output": request.use_structured_output,
            "multimodal input": request.has_encoder_inputs,
            "prompt embeddings": request.prompt_embeds is not None,
            "log-probabilities of the prompt": has_prompt_logprobs(request),
        }
        found = [name for name, is_used in unsupported.items() if is_used]
        return f"a streamed prompt does not work with {', '.join(found)}" if found else None

    def _end_input(self, request_id: str) -> None:
        stream = self.requests.get(request_id)
        # A complete one is answered. vLLM's client sends no end of a stream that it has aborted.
        if isinstance(stream, StreamRequest) and not stream.is_complete and not stream.is_finished():
            self._fail(stream, f"its input ended after chunk {stream.num_messages - 1}, which is not the last one")

    # ------------------------------------------------------------------------------------------------- what goes out

    def _acknowledge(self, stream: StreamRequest, num_messages: int, *, is_waiting: bool = False) -> None:
        """Send the client the finishes that it expects for its first `num_messages` chunks."""
        for index in range(stream.num_acknowledged, num_messages):
            ours: dict[str, Any] = {"chunk": index, "num_computed": stream.num_computed_tokens}
            if is_waiting:
                ours["is_waiting"] = True
            self._send(stream, FinishReason.STOP, {KEY: ours})
        stream.num_acknowledged = num_messages

    def _on_waiting_for_memory(self, stream: StreamRequest) -> None:
        """For how long is not known: a client that sends its next chunk only after this one must not wait for that."""
        if stream.num_in_flight_tokens <= stream.num_stale_output_tokens:
            self._acknowledge(stream, num_messages=stream.num_messages, is_waiting=True)

    def _fail(self, stream: StreamRequest, problem: str) -> None:
        self.finish_requests(stream.request_id, RequestStatus.FINISHED_ERROR)
        self._send_error(stream, problem)

    def _send_error(self, stream: StreamRequest, problem: str) -> None:
        params = {KEY: {"error": problem, "record": msgspec.to_builtins(stream.record)}}
        self._send(stream, FinishReason.ERROR, params)

    def _send(self, request: Request, reason: FinishReason, params: dict[str, Any]) -> None:
        output = EngineCoreOutput(request.request_id, [], finish_reason=reason, kv_transfer_params=params)
        self._outbox.append((request.client_index, output))

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: "ModelRunnerOutput"
    ) -> dict[int, EngineCoreOutputs]:
        self._counts_in_flight.popleft()
        prefills = self._prefills_in_flight.popleft()
        if prefills:
            now_s = self.clock()
            for request, is_complete in prefills:
                request.log.on_step_end(now_s, is_complete=is_complete)
        outputs = super().update_from_output(scheduler_output, model_runner_output)
        for request, _ in prefills:
            if self.requests.get(request.request_id) is request:
                self._settle(request)
        outbox, self._outbox = self._outbox, []
        by_client: dict[int, list[EngineCoreOutput]] = {}
        for client_index, output in outbox:
            by_client.setdefault(client_index, []).append(output)
        for client_index, sent in by_client.items():
            of_client = outputs.setdefault(client_index, EngineCoreOutputs())
            # Before the tokens: what ended a chunk came before what the next one brings.
            of_client.outputs = sent + of_client.outputs
        return outputs

    def _free_request(
        self, request: Request, delay_free_blocks: bool = False
    ) -> tuple[dict[str, Any] | None, dict[str, Any] | None]:
        assert isinstance(request, StreamRequest)
        self._record_end(request)
        kv_params, ec_params = super()._free_request(request, delay_free_blocks)
        # Beside what a KV connector says.
        return {**(kv_params or {}), KEY: {"record": msgspec.to_builtins(request.record)}}, ec_params

    def _record_end(self, request: StreamRequest) -> None:
        record = request.end(self.clock())
        if record.outcome != "finished":
            self._gone.append(request.request_id)
        if self.record_file is not None:
            self.record_file.write(record)

    def shutdown(self) -> None:
        super().shutdown()
        if self.record_file is not None:
            self.record_file.close()

    # ---------------------------------------------------------------------------------------------- life and death

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus) -> list[Request]:
        if request_ids is None:
            ids = list(self.requests)
        else:
            ids = [request_ids] if isinstance(request_ids, str) else list(request_ids)
        for request_id in ids:
            self.idle.pop(request_id, None)
        return super().finish_requests(ids, finished_status)

    def has_requests(self) -> bool:
        return bool(self._outbox) or super().has_requests()

    def has_finished_requests(self) -> bool:
        # With a KV connector, vLLM takes what is in no queue for finished, and would never sleep beside an idle stream.
        if self.finished_req_ids or self.connector is None:
            return bool(self.finished_req_ids)
        return len(self.requests) > sum(self.get_request_counts()) + len(self.idle)


def _cache_key(request: Request) -> tuple[Any, str | None]:
    """What its KV depends on beside its tokens."""
    return msgspec.to_builtins(request.lora_request), request.cache_salt
