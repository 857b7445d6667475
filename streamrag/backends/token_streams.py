"""Prompts pushed into a running vLLM engine piece by piece, for programs that bring their own retrieval.

    async with backend.streams.open(question_ids, SamplingParams(max_tokens=64)) as stream:
        await stream.append(page_ids)              # or update(whole_prompt_ids); at any time, also in mid-prefill
        await stream.finish(end_ids)               # nothing is sampled before
        async for event in stream:                 # Prefilled, then StreamedTokens
            ...

The engine must run our scheduler, `scheduler_cls="streamrag.backends.scheduler.streaming_scheduler"`, as that of
`VllmBackend` does.
"""

import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import anyio

from streamrag.backends.answer_text import AnswerText
from streamrag.backends.vllm_errors import vllm_errors_translated
from streamrag.backends.vllm_params import for_stream, to_vllm
from streamrag.backends.wire import KEY, ChunkMessage, EndOfInput
from streamrag.core import Hint, Prefilled, SamplingParams, common_prefix_len
from streamrag.errors import BackendError, ConfigurationError, PromptTooLongError
from streamrag.records import RequestRecord

if TYPE_CHECKING:
    from vllm.engine.protocol import StreamingInput
    from vllm.v1.engine.async_llm import AsyncLLM

__all__ = ["StreamedTokens", "TokenStream", "TokenStreams", "check_prompt_len", "record_of"]

MOST_WAITING_CHUNKS = 64
"""Chunks that may wait to be handed to vLLM. It takes them as fast as they come."""


def record_of(output: Any) -> RequestRecord | None:
    """What our scheduler recorded of a request, with vLLM's last output of it; None from other schedulers."""
    values = (output.kv_transfer_params or {}).get(KEY, {}).get("record")
    return None if values is None else RequestRecord.from_dict(values)


def check_prompt_len(num_tokens: int, max_model_len: int) -> None:
    """:raises PromptTooLongError: so many tokens leave no room for an answer."""
    if num_tokens >= max_model_len:
        raise PromptTooLongError(
            f"a prompt of {num_tokens} tokens leaves no room for an answer: max_model_len is {max_model_len}"
        )


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """New tokens of the answer; `finish_reason` is set on the last ones only, which may be none."""

    text: str
    """Of these tokens; as with `AnswerChunk`, it may lag behind them."""
    token_ids: tuple[int, ...]
    logprobs: Any = None
    """As vLLM has them, one entry per token, if the sampling parameters ask for them."""
    finish_reason: str | None = None


class _Failed(Exception):
    """Brings another error to whoever iterates over the answer."""

    def __init__(self, error: BaseException) -> None:
        super().__init__()
        self.error = error


class TokenStream:
    """One prompt that is still growing, and its answer. Made by `TokenStreams.open`."""

    def __init__(
        self,
        engine: "AsyncLLM",
        params: SamplingParams,
        clock: Callable[[], float],
        why_dead: Callable[[], str],
        source: str,
    ) -> None:
        self.record: RequestRecord | None = None
        """What the engine did with the request; there when the answer is complete, unless a stop text ended it."""
        self.is_complete = False
        """Whether the last chunk has been sent."""
        self._engine = engine
        self._clock = clock
        self._why_dead = why_dead
        self._source = source
        self._answer_params = to_vllm(params, engine.vllm_config)
        self._stream_params = for_stream(self._answer_params)
        self._max_model_len: int = engine.model_config.max_model_len
        self._token_ids: list[int] = []
        self._num_chunks = 0
        self._num_answered = 0
        self._text: AnswerText | None = None
        self._send_input, self._receive_input = anyio.create_memory_object_stream[Any](MOST_WAITING_CHUNKS)
        self._outputs: Any = None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt so far."""
        return len(self._token_ids)

    async def _start(self) -> None:
        end = self._stream_params.clone()
        end.extra_args = {**(end.extra_args or {}), **EndOfInput().extra_args()}
        with vllm_errors_translated(self._why_dead):
            self._outputs = await self._engine.add_request(uuid.uuid4().hex, self._inputs(), end)

    # ------------------------------------------------------------------------------------------------------ the prompt

    async def append(self, token_ids: Sequence[int], *, hint: Hint | None = None) -> None:
        """Let the prompt grow by these tokens.

        :raises PromptTooLongError: it would leave no room for an answer; the stream stays as it was.
        :raises BackendError: the prompt is complete, or the stream has ended.
        """
        await self._send(self._token_ids + list(token_ids), len(self._token_ids), hint=hint)

    async def update(self, token_ids: Sequence[int], *, is_last: bool = False, hint: Hint | None = None) -> None:
        """Replace the prompt by this one, of which KV is kept up to the longest common prefix.

        If it `is_last`, have the answer sampled, as `finish` does.

        :raises PromptTooLongError: it would leave no room for an answer; the stream stays as it was.
        :raises BackendError: the prompt is complete, or the stream has ended.
        """
        new = list(token_ids)
        await self._send(new, common_prefix_len(self._token_ids, new), is_final=is_last, hint=hint)

    async def finish(self, token_ids: Sequence[int] = (), *, params: SamplingParams | None = None) -> None:
        """Append these tokens, if any, and have the answer sampled.

        `params` replace those given at the start, except what vLLM fixes there: the seed, and how many `logprobs`.

        :raises PromptTooLongError: it would leave no room for an answer; the stream stays as it was.
        :raises ConfigurationError: `params` have what a streamed prompt cannot have; the stream stays as it was.
        :raises BackendError: the prompt is complete, or the stream has ended.
        """
        if params is not None:
            answer_params = to_vllm(params, self._engine.vllm_config)
            self._stream_params, self._answer_params = for_stream(answer_params), answer_params
        await self._send(self._token_ids + list(token_ids), len(self._token_ids), is_final=True)

    async def _send(self, new: list[int], num_kept: int, *, is_final: bool = False, hint: Hint | None = None) -> None:
        from vllm.engine.protocol import StreamingInput
        from vllm.inputs.engine import tokens_input

        if self.is_complete:
            raise BackendError("the stream's prompt is complete: open another stream")
        if not new:
            raise ConfigurationError("a prompt needs at least one token")
        check_prompt_len(len(new), self._max_model_len)
        num_kept = min(num_kept, len(new) - 1)  # vLLM takes no empty input
        now_s = self._clock()
        expected_s = now_s + hint.end_s if hint is not None and hint.end_s is not None else None
        message = ChunkMessage(self._num_chunks, num_kept, is_final, now_s, expected_s, self._source)
        params = self._stream_params.clone()
        params.extra_args = {**(params.extra_args or {}), **message.extra_args()}
        self._token_ids = new
        self._num_chunks += 1
        self.is_complete = is_final
        try:
            await self._send_input.send(StreamingInput(tokens_input(new[num_kept:]), params))
        except (anyio.BrokenResourceError, anyio.ClosedResourceError):
            raise BackendError("the stream has ended: it was aborted or failed; iterating over it says why") from None
        if is_final:
            self._send_input.close()
            self._answer_text()  # takes a while with a long prompt: while the engine computes

    def _answer_text(self) -> AnswerText:
        assert self.is_complete, "tokens came before the prompt was complete"
        if self._text is None:
            self._text = AnswerText(self._engine.tokenizer, self._token_ids, self._answer_params)
        return self._text

    async def _inputs(self) -> AsyncGenerator["StreamingInput", None]:
        """For vLLM: the chunks, until the last."""
        with self._receive_input:
            async for chunk in self._receive_input:
                yield chunk

    # ------------------------------------------------------------------------------------------------------ the answer

    def __aiter__(self) -> AsyncGenerator[Prefilled | StreamedTokens, None]:
        return self.events()

    async def events(self) -> AsyncGenerator[Prefilled | StreamedTokens, None]:
        """How far the newest prompt is prefilled, then the answer. To be iterated once.

        :raises BackendError: the engine refused the stream, or failed, or the stream was aborted.
        """
        is_last = False
        while not is_last:
            output = await self._next_output()
            is_last = output.finished
            event = self._event(output) if output.outputs else None  # vLLM's own last word has none
            if isinstance(event, StreamedTokens) and event.finish_reason and not is_last:
                await self.abort()  # a stop text was found, of which the engine knows nothing
                is_last = True
            if event is not None:
                yield event

    async def _next_output(self) -> Any:
        try:
            with vllm_errors_translated(self._why_dead):
                return self._outputs.get_nowait() or await self._outputs.get()
        except _Failed as failed:
            error = failed.error
        raise error

    def _event(self, output: Any) -> Prefilled | StreamedTokens | None:
        (part,) = output.outputs
        ours = (output.kv_transfer_params or {}).get(KEY, {})
        if "error" in ours:
            raise BackendError(f"the engine gave the stream up: {ours['error']}")
        if part.finish_reason in ("error", "abort"):
            raise BackendError("the engine gave the stream up; was it aborted, or the backend closed?")
        if "chunk" in ours:  # the end of a chunk, not of the answer; of an older prompt it says nothing
            is_newest = ours["chunk"] == self._num_chunks - 1
            return Prefilled(ours["num_computed"]) if is_newest else None
        self.record = record_of(output) or self.record
        new = part.token_ids[self._num_answered :]
        logprobs = part.logprobs[self._num_answered :] if part.logprobs else None
        self._num_answered += len(new)
        piece = self._answer_text().add(new, part.finish_reason)
        return StreamedTokens(
            piece.text,
            tuple(new[: piece.num_tokens]),
            logprobs and logprobs[: piece.num_tokens],
            "stop" if piece.has_stop_text else part.finish_reason,
        )

    async def abort(self) -> None:
        """End the stream and free all that it holds in the engine. Does nothing when it has ended already."""
        self._send_input.close()
        self._receive_input.close()
        if self._outputs is not None:
            self._outputs.close()
            if not self._engine.errored:
                with anyio.CancelScope(shield=True):
                    await self._engine.abort(self._outputs.request_id, internal=True)

    def fail(self, error: BaseException) -> None:
        """Have the iteration raise `error`, which says why there will be no answer, unless it fails already."""
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
        source: str = "",
    ) -> AsyncIterator[TokenStream]:
        """A stream whose prompt begins with these tokens, or is these. Leaving the context aborts what is not finished.

        `source` names what kind of retriever brings the chunks: the engine learns of each kind when to expect the next.

        :raises PromptTooLongError: the prompt leaves no room for an answer.
        :raises ConfigurationError: `params` have what vLLM refuses, or what a streamed prompt cannot have.
        :raises EngineDeadError: the engine's processes are gone.
        """
        stream = TokenStream(self._engine, params, self._clock, self._why_dead, source)
        self._open.add(stream)
        try:
            await stream.update(token_ids, is_last=is_complete, hint=hint)
            await stream._start()
            yield stream
        finally:
            self._open.discard(stream)
            await stream.abort()

    async def aclose(self) -> None:
        """Abort all streams; whoever iterates over one is told."""
        for stream in list(self._open):
            await stream.abort()
