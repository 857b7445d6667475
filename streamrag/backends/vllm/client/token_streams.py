"""Prompts that are pushed into a running vLLM engine piece by piece, for programs with their own retrieval.

    async with backend.streams.open(Prompt(question_ids), SamplingParams(max_tokens=64)) as stream:
        await stream.append(page_ids)              # or update(whole_prompt); at any time, also in mid-prefill
        await stream.finish(end_ids)               # nothing is sampled before
        async for event in stream:                 # Prefilled, then AnswerChunk
            ...

A push that raises, or is cancelled, has changed nothing, and may be repeated. Concurrent pushes are made in the order
of their calls.

The engine must run our scheduler, as that of `VllmBackend` does:
`scheduler_cls="streamrag.backends.vllm.scheduler.hooks.streaming_scheduler"`.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Self

from streamrag.backends.vllm.chunk_wire import KEY, EndOfInput, PromptMessage
from streamrag.backends.vllm.client.answer_text import AnswerText
from streamrag.backends.vllm.client.calls import abort_surely, ask_engine, vllm_errors_translated
from streamrag.backends.vllm.client.sampling import for_stream, to_vllm
from streamrag.core import AnswerChunk, Hint, Prefilled, Prompt, SamplingParams, common_prefix_len
from streamrag.errors import BackendError, ConfigurationError, EngineDeadError, PromptTooLongError
from streamrag.records import RequestRecord
from streamrag.support.tasks import wait_shielded

if TYPE_CHECKING:
    from vllm.engine.protocol import StreamingInput
    from vllm.v1.engine.async_llm import AsyncLLM

GIVEN_UP = "the engine dropped the stream; was it aborted, or the backend closed?"


def record_of(output: Any) -> RequestRecord | None:
    """Return our scheduler's record of a request from vLLM's last output for it; None with other schedulers."""
    values = (output.kv_transfer_params or {}).get(KEY, {}).get("record")
    return None if values is None else RequestRecord.from_dict(values)


def check_prompt_len(num_tokens: int, max_model_len: int) -> None:
    """Raise PromptTooLongError if a prompt of `num_tokens` leaves no room for an answer."""
    if num_tokens >= max_model_len:
        raise PromptTooLongError(
            f"a prompt of {num_tokens} tokens leaves no room for an answer: max_model_len is {max_model_len}"
        )


class _Failed(Exception):
    """Carries an error to the iteration over the answer."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class TokenStream:
    """A prompt that is still growing, and an iterator over its answer. Created by `TokenStreams.open`.

    The iterator yields how far the newest prompt is prefilled, then the answer's chunks. Each prompt has at most one
    `Prefilled`. If memory is short, it comes early, with the tokens computed by then, and does not come again when the
    rest is computed. Several tasks may iterate: each event goes to one of them, and an error to all.

    A push (`append`, `update`, `finish`) that raises leaves the stream unchanged.

    :raises PromptTooLongError: a pushed prompt would leave no room for an answer.
    :raises ConfigurationError: `params` of a push have what a streamed prompt cannot have.
    :raises EngineDeadError: the engine's processes are gone.
    :raises BackendError: the prompt is complete already, or the stream has ended: the engine refused it, failed, or
        aborted it.
    """

    def __init__(
        self,
        engine: "AsyncLLM",
        params: SamplingParams,
        clock: Callable[[], float],
        why_dead: Callable[[], str],
    ) -> None:
        self.record: RequestRecord | None = None
        """The engine's record of the request. Set at the end of the answer, unless a stop text ended it."""
        self.kv_transfer: dict[str, Any] = {}
        """Parameters of the engine's KV connector for another engine that fetches the KV. Set at the answer's end."""
        self._engine = engine
        self._clock = clock
        self._why_dead = why_dead
        self._answer_params = to_vllm(params, engine.vllm_config)
        self._max_model_len: int = engine.model_config.max_model_len
        self._prompt = Prompt(())
        self._num_messages = 0
        self._num_answered = 0
        self._text: AnswerText | None = None
        # Unbounded, like vLLM's own queue to the engine's process: vLLM takes chunks as fast as they arrive.
        self._chunks: asyncio.Queue[StreamingInput] = asyncio.Queue()
        self._outputs: Any = None
        self._reading = asyncio.Lock()
        self._is_answered = False
        self._error: BaseException | None = None
        """The error that ended the iteration. Further iterations raise it again."""
        self._is_aborted = False
        self._aborting: asyncio.Task[None] | None = None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt so far."""
        return len(self._prompt.token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt so far."""
        return self._prompt.token_ids

    @property
    def is_complete(self) -> bool:
        """Whether the last chunk has been sent."""
        return self._prompt.is_complete

    async def _start(self) -> None:
        """Submit the request, whose inputs are the pushed chunks; raise if the engine is dead or the stream aborted."""
        end = for_stream(self._answer_params)
        end.extra_args = {**(end.extra_args or {}), **EndOfInput().extra_args()}
        # vLLM itself would ask this before the first request. Once it knows the answer, this does not wait.
        await ask_engine(self._engine, self._engine.get_supported_tasks(), self._why_dead)
        self._check_goes_on()
        with vllm_errors_translated(self._why_dead):
            self._outputs = await self._engine.add_request(uuid.uuid4().hex, self._inputs(), end)

    async def append(self, token_ids: Sequence[int], *, hint: Hint | None = None) -> None:
        """Append tokens to the prompt."""
        added = tuple(token_ids)
        await self._let_others_run()
        self._push(self._with(added, hint))

    async def update(self, prompt: Prompt) -> None:
        """Replace the prompt, keeping the KV of the longest common prefix; have the answer of a complete one sampled.

        An engine with `answer_ahead` verifies the tokens of `prompt.draft` where the answer follows it. The first
        `prompt.num_shared` tokens are known to equal those of the current prompt, so only later tokens are compared.
        """
        await self._let_others_run()
        num_shared = common_prefix_len(self._prompt.token_ids, prompt.token_ids, prompt.num_shared)
        self._push(replace(prompt, num_shared=num_shared))

    async def finish(self, token_ids: Sequence[int] = (), *, params: SamplingParams | None = None) -> None:
        """Append tokens, if any, and have the answer sampled.

        `params` replace the initial ones, except those that vLLM fixes at the start: the seed and `logprobs`.
        """
        added = tuple(token_ids)
        await self._let_others_run()
        self._push(replace(self._with(added), is_complete=True), params)

    def _with(self, added: tuple[int, ...], hint: Hint | None = None) -> Prompt:
        """Return the prompt with further tokens at its end."""
        old = self._prompt.token_ids
        return replace(self._prompt, token_ids=old + added, num_shared=len(old), hint=hint)

    async def _let_others_run(self) -> None:
        """Yield to other tasks. A push can only be cancelled here, before it changes anything."""
        await asyncio.sleep(0)

    def _push(self, new: Prompt, params: SamplingParams | None = None) -> None:
        """Queue a chunk that makes `new` the prompt, with only the tokens after the shared ones; never waits.

        `params`, if given, replace the answer's parameters. Raises as the class does, or ConfigurationError if `new` is
        empty; nothing has changed then.
        """
        from vllm.engine.protocol import StreamingInput
        from vllm.inputs import tokens_input

        self._check_goes_on()
        if self.is_complete:
            raise BackendError("the stream's prompt is complete: open another stream")
        if not new.token_ids:
            raise ConfigurationError("a prompt needs at least one token")
        check_prompt_len(len(new.token_ids), self._max_model_len)
        message = PromptMessage.of(new, self._num_messages, self._clock())
        answer_params = self._answer_params if params is None else to_vllm(params, self._engine.vllm_config)
        # The last chunk's grammar constrains the answer; the first one's is compiled, and cached, in the meantime.
        chunk_params = for_stream(answer_params, has_grammar=new.is_complete or message.index == 0)
        chunk_params.extra_args = {**(chunk_params.extra_args or {}), **message.extra_args()}
        chunk = StreamingInput(tokens_input(list(new.token_ids[message.num_kept :])), chunk_params)
        text = AnswerText(self._engine.tokenizer, new.token_ids, answer_params) if new.is_complete else None
        # Nothing below can fail or be cancelled: the chunk is sent and the state updated, or neither.
        self._prompt, self._answer_params, self._text = new, answer_params, text
        self._num_messages += 1
        self._chunks.put_nowait(chunk)

    def _check_goes_on(self) -> None:
        """Raise EngineDeadError if the engine is dead, BackendError if the stream was aborted or has failed."""
        if self._engine.errored:
            raise EngineDeadError(self._why_dead())
        if self._is_aborted or self._error or (self._outputs and isinstance(self._outputs.output, Exception)):
            raise BackendError("the stream has ended: it was aborted or failed; iterating over it says why")

    async def _inputs(self) -> AsyncGenerator["StreamingInput", None]:
        """Yield pushed chunks to vLLM as they come, and end after the complete prompt's."""
        is_last = False
        while not is_last:
            chunk = await self._chunks.get()
            is_last = self.is_complete and self._chunks.empty()
            yield chunk

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Prefilled | AnswerChunk:
        """Return the next event. After the answer, each call raises StopAsyncIteration; after an error, that error.

        A stop text in the answer ends it, and begins to abort the engine's request.
        """
        async with self._reading:
            event = None
            try:
                while event is None and not self._is_answered and not self._error:
                    output = await self._next_output()
                    event = self._event(output) if output.outputs else None  # vLLM's final output has none
                    self._is_answered = output.finished
                    if isinstance(event, AnswerChunk) and event.finish_reason and not output.finished:
                        self._is_answered = True  # a stop text ended the answer, which the engine does not know
                        self._begin_abort()
            except _Failed as failed:
                self._error = failed.error
            except Exception as error:  # any error: it is raised below, and by further iterations
                self._error = error
            if self._error:
                raise self._error
            if event is None:
                raise StopAsyncIteration
            return event

    async def _next_output(self) -> Any:
        with vllm_errors_translated(self._why_dead):
            return self._outputs.get_nowait() or await self._outputs.get()

    def _event(self, output: Any) -> Prefilled | AnswerChunk | None:
        """Return an output's new tokens with their text, up to a stop text, or `Prefilled` at the end of a chunk.

        Returns None if that chunk's prompt is not the newest. Sets `record`, if the output has one. Raises BackendError
        if the engine dropped the stream.
        """
        (part,) = output.outputs
        ours = (output.kv_transfer_params or {}).get(KEY, {})
        if "error" in ours:
            raise BackendError(f"the engine dropped the stream: {ours['error']}")
        if part.finish_reason in ("error", "abort"):
            raise BackendError(GIVEN_UP)
        if "chunk" in ours:  # the end of a chunk, not of the answer; ignored for an older prompt
            is_newest = ours["chunk"] == self._num_messages - 1
            return Prefilled(ours["num_computed"]) if is_newest else None
        self.record = record_of(output) or self.record
        if part.finish_reason:
            self.kv_transfer = {name: of for name, of in (output.kv_transfer_params or {}).items() if name != KEY}
        new = part.token_ids[self._num_answered :]
        logprobs = part.logprobs[self._num_answered :] if part.logprobs else None
        self._num_answered += len(new)
        assert self._text is not None, "tokens came before the prompt was complete"
        piece = self._text.add(new, part.finish_reason)
        finish_reason = "stop" if piece.has_stop_text else part.finish_reason
        return AnswerChunk(
            piece.text,
            tuple(new[: piece.num_tokens]),
            finish_reason,
            self.record if finish_reason else None,
            logprobs and logprobs[: piece.num_tokens],
        )

    async def abort(self) -> None:
        """Abort the stream and free all that it holds in the engine. Does nothing if it has ended already."""
        self._begin_abort()
        if self._aborting is not None:
            await wait_shielded([self._aborting])
            self._aborting.result()

    def _begin_abort(self) -> None:
        """Mark the stream as aborted; if submitted, abort it in a task, once, and fail an unanswered iteration."""
        self._is_aborted = True
        if self._outputs is None or self._aborting is not None:
            return
        self._outputs.close()
        if not self._is_answered and self._outputs.output is None:
            # vLLM does this itself, but only for a stream whose first chunk it has submitted.
            self.fail(BackendError(GIVEN_UP))
        abort = abort_surely(self._engine, self._outputs.request_id, is_internal=True)
        self._aborting = asyncio.create_task(abort, name="abort a stream")

    def fail(self, error: BaseException) -> None:
        """Make the iteration raise `error`, unless it fails already."""
        if not isinstance(self._outputs.output, Exception):
            self._outputs.put(_Failed(error))


class TokenStreams:
    """Opens streams into one engine. `clock` must be `time.monotonic`, or one that all processes of the host share."""

    def __init__(
        self,
        engine: "AsyncLLM",
        *,
        clock: Callable[[], float] = time.monotonic,
        why_dead: Callable[[], str] = lambda: "the engine's process is gone",
    ) -> None:
        self._engine = engine
        self._clock = clock
        self._why_dead = why_dead
        self._open: set[TokenStream] = set()

    @asynccontextmanager
    async def open(self, prompt: Prompt, params: SamplingParams) -> AsyncIterator[TokenStream]:
        """Open a stream with its first prompt. Leaving the context aborts an unfinished request, and waits for that.

        :raises PromptTooLongError: the prompt leaves no room for an answer.
        :raises ConfigurationError: `params` have what vLLM refuses, or what a streamed prompt cannot have.
        :raises EngineDeadError: the engine's processes are gone.
        """
        stream = TokenStream(self._engine, params, self._clock, self._why_dead)
        self._open.add(stream)
        try:
            await stream.update(prompt)
            await stream._start()
            yield stream
        finally:
            self._open.discard(stream)
            await stream.abort()

    async def aclose(self) -> None:
        """Abort all streams at once, and wait for their ends; iterating over one raises the reason."""
        streams = list(self._open)
        for stream in streams:
            stream._begin_abort()
        for stream in streams:
            await stream.abort()
