"""Accept requests and chunks into vLLM's scheduler.

first chunk ─▶ Scheduler.add_request ─▶ waiting ..
next chunk  ─▶ prompt replaced in place ─▶ waiting, or idle if nothing is left to compute
last chunk  ─▶ the same, and its last token is no longer hidden: the answer is sampled
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from streamrag.backends.vllm.chunk_wire import EndOfInput, MalformedMessageError, PromptMessage, decode
from streamrag.backends.vllm.scheduler.estimates import Estimates
from streamrag.backends.vllm.scheduler.host_memory.memory import HostMemory
from streamrag.backends.vllm.scheduler.kv.memory import KvMemory
from streamrag.backends.vllm.scheduler.kv.replacement import drop_output_in_flight, replace_prompt
from streamrag.backends.vllm.scheduler.outbox import Outbox
from streamrag.backends.vllm.scheduler.queues import Queues
from streamrag.backends.vllm.scheduler.records import Records
from streamrag.backends.vllm.scheduler.request import PromptUpdate, StreamRequest, has_prompt_logprobs
from streamrag.backends.vllm.scheduler.request_log import HostClock
from streamrag.backends.vllm.scheduler.steps_in_flight import StepsInFlight
from streamrag.backends.vllm.scheduler.supported import only_sends_kv
from streamrag.backends.vllm.scheduler_options import EngineOptions
from streamrag.engine.drafts import AnswerDraft
from streamrag.records import ChunkRecord


@dataclass(eq=False)
class Intake:
    """Accepts plain requests and chunks. `enqueue` is vLLM's own `add_request`; calling it runs no hook."""

    scheduler: Scheduler
    enqueue: Callable[[Request], None]
    clock: HostClock
    queues: Queues
    outbox: Outbox
    records: Records
    estimates: Estimates
    steps: StepsInFlight
    kv_memory: KvMemory
    host_memory: HostMemory | None
    options: EngineOptions

    def receive(self, request: Request) -> None:
        """Accept a plain request, the first chunk of a stream, a further chunk, or the end of its input.

        A chunk that was under way when its stream failed or was aborted is ignored. Any other problem fails only that
        request or stream, and is not raised: an exception here would end the engine.
        """
        try:
            message = decode(request.sampling_params.extra_args if request.sampling_params else None)
        except MalformedMessageError as error:
            self._refuse(request, str(error))
            return
        if isinstance(message, EndOfInput):
            self.end_input(request.request_id)
            return
        existing = self.scheduler.requests.get(request.request_id)
        if message is not None and existing is not None and existing.takes_chunks:
            self._add_chunk(existing, request, message)
        elif message is not None and message.index > 0 and self._is_late(request):
            pass  # its client has been sent the end of the stream
        elif existing is None:
            self._open(request, message)
        else:  # a finished request remains until a KV connector releases its blocks
            self._refuse(request, f"there is a request {request.request_id!r} already", message)

    def end_input(self, request_id: str) -> None:
        """Fail a stream whose input ended before its last chunk; others, also unknown ones, go on."""
        stream = self.scheduler.requests.get(request_id)
        # A complete stream gets its answer. vLLM's client sends no end of input for a stream that it has aborted.
        if stream is not None and not stream.is_complete and not stream.is_finished():
            self._fail(stream, f"its input ended after chunk {stream.num_messages - 1}, which is not the last one")

    def _is_late(self, request: Request) -> bool:
        """Whether this chunk was in flight when its stream ended. An error could reach a newer request of the id."""
        return request.resumable and request.request_id in self.records.gone_ids

    def _open(self, request: Request, message: PromptMessage | None) -> None:
        """Accept a plain request or a first chunk, or refuse it. A stream with nothing to compute becomes idle."""
        problem = _why_refused(request, message, self.scheduler)
        if problem is None and message is not None and message.index > 0:
            problem = f"chunk {message.index} came, but no chunk 0: it was lost, or the stream has ended"
        if problem is not None:
            self._refuse(request, problem, message if request.resumable else None)
            return
        stream = self._adopt(request, message)
        if not stream.is_complete:
            stream.drop_grammar()
        # An earlier request may have had this id: discard its output, in steps in flight and in the outbox.
        self.outbox.discard(stream.request_id)
        stream.num_in_flight_tokens = self.steps.num_tokens_of(stream.request_id)
        drop_output_in_flight(stream)
        if message is not None:
            record = ChunkRecord(stream.arrival_s, stream.num_prompt_tokens, 0, 0)
            self._on_chunk(stream, PromptUpdate(record, message.source_name))
        self.enqueue(stream)
        self._on_queued(stream, message)

    def _add_chunk(self, stream: StreamRequest, request: Request, message: PromptMessage) -> None:
        """Replace a stream's prompt by a further chunk's, and queue the stream. A wrong chunk only fails its stream.

        The stream may be running: `requeue` takes it out, so that the model runner gets the new prompt.
        """
        problem = _why_unfit(stream, request, message) or _why_refused(request, message, self.scheduler)
        if problem:
            self._fail(stream, problem)
            return
        self.outbox.acknowledge(stream)  # the chunks before
        arrival_s = self._arrival_s(request, message, self.clock.monotonic())
        self._on_chunk(stream, replace_prompt(self.scheduler, stream, message, request, arrival_s))
        self.queues.requeue(stream)
        stream.take_grammar(request)
        self._on_queued(stream, message)

    def _on_chunk(self, stream: StreamRequest, update: PromptUpdate) -> None:
        self.estimates.on_chunk(stream, update)
        if self.host_memory is not None:
            self.host_memory.on_chunk(stream, update)
        stream.log.on_chunk(update.record, num_left=stream.num_computed_tokens)

    def _on_queued(self, request: StreamRequest, message: PromptMessage | None) -> None:
        """Give a complete prompt its draft, and count its arrival; make a stream with nothing to compute idle."""
        if request.is_complete:
            request.draft = self._make_draft(request, message.draft if message is not None else ())
            if request.request_class != "draft":
                self.estimates.on_complete()
        self.queues.make_idle_if_done(request)

    def _make_draft(self, request: StreamRequest, tokens: Sequence[int]) -> AnswerDraft | None:
        """Return what the answer is expected to be; None if drafts are not verified, or the answer has a grammar."""
        max_depth = self.scheduler.num_spec_tokens
        if not max_depth or request.use_structured_output:
            return None
        # Placeholders of images need not be in the vocabulary.
        is_searched = self.options.prompt_lookup and not request.has_encoder_inputs
        return AnswerDraft(tokens, max_depth, (is_searched and request.prompt_token_ids) or ())

    def _refuse(self, request: Request, problem: str, message: PromptMessage | None = None) -> None:
        """Fail a request before its acceptance, with a record and an error; a chunk fails the request of its id."""
        existing = self.scheduler.requests.get(request.request_id)
        if request.resumable and existing is not None and not existing.is_finished():
            self._fail(existing, problem)
            return
        stream = self._adopt(request, message)
        stream.status = RequestStatus.FINISHED_ERROR
        self.records.end(stream)
        self.outbox.send_error(stream, problem)

    def _fail(self, stream: StreamRequest, problem: str) -> None:
        self.scheduler.finish_requests(stream.request_id, RequestStatus.FINISHED_ERROR)
        self.outbox.send_error(stream, problem)

    def _adopt(self, request: Request, message: PromptMessage | None) -> StreamRequest:
        """Convert a request in place to a `StreamRequest`, with times of this host's monotonic clock, and return it."""
        now_s = self.clock.monotonic()
        stream = StreamRequest.adopt(request, message, self._arrival_s(request, message, now_s), now_s)
        stream.prefill_unit = self.kv_memory.prefill_unit
        stream.limit_answer(stream.max_tokens, self.scheduler.max_model_len)
        return stream

    def _arrival_s(self, request: Request, message: PromptMessage | None, now_s: float) -> float:
        """Return when a plain request was sent, or a chunk arrived at its client: before it waited for a step's end."""
        sent_s = message.arrival_s if message is not None else now_s - (self.clock.wall() - request.arrival_time)
        return now_s if sent_s is None else min(sent_s, now_s)


def _why_unfit(stream: StreamRequest, request: Request, message: PromptMessage) -> str | None:
    """Return why the chunk cannot follow the stream's last one; None if it can."""
    if message.index != stream.num_messages:
        return f"message {message.index} came instead of message {stream.num_messages}: one was lost, or came twice"
    if stream.is_complete:
        return f"chunk {message.index} came after the last one"
    if message.num_kept > stream.num_all_tokens:
        return f"chunk {message.index} keeps {message.num_kept} tokens of a prompt of {stream.num_all_tokens}"
    if _cache_key(request) != _cache_key(stream):
        return f"chunk {message.index} has another LoRA adapter, or another cache salt, than its stream"
    return None


def _why_refused(request: Request, message: PromptMessage | None, scheduler: Scheduler) -> str | None:
    """Return why the request cannot be accepted, whatever came before it; None if it can."""
    if problem := _why_wrong_transfer(request, scheduler):
        return problem
    if request.num_prompt_tokens + (message.num_kept if message else 0) < 1:
        return "a prompt needs at least one token"
    if message is None:
        return "vLLM's own streaming sessions need vLLM's own scheduler" if request.resumable else None
    return _why_wrong_chunk(request, message, scheduler)


def _why_wrong_transfer(request: Request, scheduler: Scheduler) -> str | None:
    """Return why the parameters of a KV connector cannot be accepted; None if they can."""
    if request.kv_transfer_params is not None and not isinstance(request.kv_transfer_params, dict):
        return "extra_args['kv_transfer_params'] must be a mapping"
    params = request.kv_transfer_params or {}
    if (params.get("do_remote_prefill") or params.get("remote_block_ids")) and only_sends_kv(scheduler.vllm_config):
        # NIXL would load it in any engine, and our plan does not expect that.
        return "extra_args['kv_transfer_params'] name KV to load, but this engine only computes KV for others"
    return None


def _why_wrong_chunk(request: Request, message: PromptMessage, scheduler: Scheduler) -> str | None:
    """Return why a chunk is wrong in any stream of this engine; None if it is not."""
    if not request.resumable:
        return "a chunk must be sent as one of vLLM's streamed inputs, so that more chunks can follow"
    if message.index == 0 and message.num_kept > 0:
        return f"the first chunk of a stream keeps {message.num_kept} tokens, but there is no previous prompt"
    num_tokens, most = request.num_prompt_tokens + message.num_kept, scheduler.max_model_len
    if num_tokens >= most:
        return f"a prompt of {num_tokens} tokens does not fit the model's length of {most}"
    if message.draft and max(message.draft) >= scheduler.vllm_config.model_config.get_vocab_size():
        return "a draft has a token that the model does not have"
    unsupported = {
        "multimodal input": request.has_encoder_inputs,
        "prompt embeddings": request.prompt_embeds is not None,
        "log-probabilities of the prompt": has_prompt_logprobs(request),
    }
    used = [name for name, is_used in unsupported.items() if is_used]
    return f"a streamed prompt does not work with {', '.join(used)}" if used else None


def _cache_key(request: Request) -> tuple[Any, str | None]:
    """Return what the KV of a request depends on, other than its tokens."""
    return msgspec.to_builtins(request.lora_request), request.cache_salt
