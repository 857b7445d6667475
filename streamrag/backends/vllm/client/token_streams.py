"""Prompts that are pushed into a running vLLM engine piece by piece, for programs with their own retrieval.

    async with backend.streams.open(question_ids, SamplingParams(max_tokens=64)) as stream:
        await stream.append(page_ids)              # or update(whole_prompt_ids); at any time, also in mid-prefill
        await stream.finish(end_ids)               # nothing is sampled before
        async for event in stream:                 # Prefilled, then StreamedTokens
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
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamrag.backends.vllm.chunk_wire import KEY, EndOfInput, PromptMessage
from streamrag.backends.vllm.client.answer_text import AnswerText
from streamrag.backends.vllm.client.calls import abort_surely, ask_engine
from streamrag.backends.vllm.client.sampling import for_stream, to_vllm
from streamrag.backends.vllm.client.vllm_errors import vllm_errors_translated
from streamrag.core import Hint, Prefilled, RequestClass, SamplingParams, common_prefix_len
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


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """New tokens of the answer. Only the last event has a `finish_reason`; it may have no tokens."""

    text: str
    """Text of these tokens. It may lag behind them, as in `AnswerChunk`."""
    token_ids: tuple[int, ...]
    logprobs: Any = None
    """vLLM's log-probabilities, one entry per token, if the sampling parameters request them."""
    finish_reason: str | None = None


class _Failed(Exception):
    """Carries an error to the iteration over the answer."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class TokenStream:
    """A prompt that is still growing, and its answer. Created by `TokenStreams.open`.

    A push (`append`, `update`, `finish`) that raises leaves the stream unchanged.

    :raises PromptTooLongError: a pushed prompt would leave no room for an answer.
    :raises ConfigurationError: `params` of a push have what a streamed prompt cannot have.
    :raises EngineDeadError: the engine's processes are gone.
    :raises BackendError: the prompt is complete already, or the stream has ended.
    """

    def __init__(
        self,
        engine: "AsyncLLM",
        params: SamplingParams,
        clock: Callable[[], float],
        why_dead: Callable[[], str],
        source_name: str,
        request_class: RequestClass,
    ) -> None:
        self.record: RequestRecord | None = None
        """The engine's record of the request. Set at the end of the answer, unless a stop text ended it."""
        self.kv_transfer: dict[str, Any] = {}
        """Parameters of the engine's KV connector for another engine that fetches the KV. Set at the answer's end."""
        self.is_complete = False
        """Whether the last chunk has been sent."""
        self._engine = engine
        self._clock = clock
        self._why_dead = why_dead
        self._source_name = source_name
        self._request_class = request_class
        self._answer_params = to_vllm(params, engine.vllm_config)
        self._max_model_len: int = engine.model_config.max_model_len
        self._token_ids: list[int] = []
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
        return len(self._token_ids)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The prompt so far."""
        return tuple(self._token_ids)

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
        added = list(token_ids)
        await self._let_others_run()
        self._push(self._token_ids + added, len(self._token_ids), hint=hint)

    async def update(
        self,
        token_ids: Sequence[int],
        *,
        is_complete: bool = False,
        hint: Hint | None = None,
        num_shared: int = 0,
        draft: Sequence[int] = (),
    ) -> None:
        """Replace the prompt with `token_ids`, keeping the KV of the longest common prefix.

        With `is_complete`, have the answer sampled, as `finish` does; an engine with `answer_ahead` verifies the tokens
        of `draft` where the answer follows it. The first `num_shared` tokens are known to equal those of the current
        prompt, so only later tokens are compared.
        """
        new = list(token_ids)
        await self._let_others_run()
        num_shared = common_prefix_len(self._token_ids, new, num_shared)
        self._push(new, num_shared, is_complete=is_complete, hint=hint, draft=draft)

    async def finish(self, token_ids: Sequence[int] = (), *, params: SamplingParams | None = None) -> None:
        """Append tokens, if any, and have the answer sampled.

        `params` replace the initial ones, except those that vLLM fixes at the start: the seed and `logprobs`.
        """
        added = list(token_ids)
        await self._let_others_run()
        self._push(self._token_ids + added, len(self._token_ids), is_complete=True, params=params)

    async def _let_others_run(self) -> None:
        """Yield to other tasks. A push can only be cancelled here, before it changes anything."""
        await asyncio.sleep(0)

    def _push(
        self,
        new: list[int],
        num_shared: int,
        *,
        is_complete: bool = False,
        hint: Hint | None = None,
        params: SamplingParams | None = None,
        draft: Sequence[int] = (),
    ) -> None:
        """Queue a chunk that makes `new` the prompt, with only the tokens after the shared ones; never waits.

        `params`, if given, replace the answer's parameters. Raises as the class does, or ConfigurationError if `new` is
        empty; nothing has changed then.
        """
        from vllm.engine.protocol import StreamingInput
        from vllm.inputs import tokens_input

        self._check_goes_on()
        if self.is_complete:
            raise BackendError("the stream's prompt is complete: open another stream")
        if not new:
            raise ConfigurationError("a prompt needs at least one token")
        check_prompt_len(len(new), self._max_model_len)
        index, now_s, origin = self._num_messages, self._clock(), (self._source_name, self._request_class)
        message = PromptMessage.of(index, len(new), num_shared, is_complete, now_s, hint, *origin, draft)
        answer_params = self._answer_params if params is None else to_vllm(params, self._engine.vllm_config)
        # The last chunk's grammar constrains the answer; the first one's is compiled, and cached, in the meantime.
        chunk_params = for_stream(answer_params, has_grammar=is_complete or index == 0)
        chunk_params.extra_args = {**(chunk_params.extra_args or {}), **message.extra_args()}
        chunk = StreamingInput(tokens_input(new[message.num_kept :]), chunk_params)
        text = AnswerText(self._engine.tokenizer, new, answer_params) if is_complete else None
        # Nothing below can fail or be cancelled: the chunk is sent and the state updated, or neither.
        self._token_ids, self._answer_params, self._text = new, answer_params, text
        self._num_messages += 1
        self.is_complete = is_complete
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

    def __aiter__(self) -> AsyncGenerator[Prefilled | StreamedTokens, None]:
        return self.events()

    async def events(self) -> AsyncGenerator[Prefilled | StreamedTokens, None]:
        """Yield how far the newest prompt is prefilled, then the answer.

        Each prompt has at most one `Prefilled`. If memory is short, it comes early, with the tokens computed by then,
        and does not come again when the rest is computed.

        A further iteration continues where the last one ended. Of concurrent iterations, each event goes to one.

        :raises EngineDeadError: the engine's processes are gone.
        :raises BackendError: the engine refused the stream, or failed, or the stream was aborted.
        """
        while (event := await self._next_event()) is not None:
            yield event

    async def _next_event(self) -> Prefilled | StreamedTokens | None:
        """Return the next event; None at each call after the answer. After an error, each call raises that error.

        A stop text in the answer ends it, and begins to abort the engine's request.
        """
        async with self._reading:
            event = None
            try:
                while event is None and not self._is_answered and not self._error:
                    output = await self._next_output()
                    event = self._event(output) if output.outputs else None  # vLLM's final output has none
                    self._is_answered = output.finished
                    if isinstance(event, StreamedTokens) and event.finish_reason and not output.finished:
                        self._is_answered = True  # a stop text ended the answer, which the engine does not know
                        self._begin_abort()
            except _Failed as failed:
                self._error = failed.error
            except Exception as error:  # any error: it is raised below, and by further iterations
                self._error = error
            if self._error:
                raise self._error
            return event

    async def _next_output(self) -> Any:
        with vllm_errors_translated(self._why_dead):
            return self._outputs.get_nowait() or await self._outputs.get()

    def _event(self, output: Any) -> Prefilled | StreamedTokens | None:
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
        return StreamedTokens(
            piece.text,
            tuple(new[: piece.num_tokens]),
            logprobs and logprobs[: piece.num_tokens],
            "stop" if piece.has_stop_text else part.finish_reason,
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
    async def open(
        self,
        token_ids: Sequence[int],
        params: SamplingParams,
        *,
        is_complete: bool = False,
        hint: Hint | None = None,
        source_name: str = "",
        request_class: RequestClass = "pool",
        draft: Sequence[int] = (),
    ) -> AsyncIterator[TokenStream]:
        """Open a stream whose prompt begins with these tokens. Leaving the context aborts an unfinished request, and
        waits for the abort.

        `source_name` names the retriever that the chunks come from: the engine learns how often its chunks come.
        `request_class` is the kind of caller that waits for the answer, for the engine's policy. For `draft`, see
        `TokenStream.update`.

        :raises PromptTooLongError: the prompt leaves no room for an answer.
        :raises ConfigurationError: `params` have what vLLM refuses, or what a streamed prompt cannot have.
        :raises EngineDeadError: the engine's processes are gone.
        """
        stream = TokenStream(self._engine, params, self._clock, self._why_dead, source_name, request_class)
        self._open.add(stream)
        try:
            await stream.update(token_ids, is_complete=is_complete, hint=hint, draft=draft)
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
