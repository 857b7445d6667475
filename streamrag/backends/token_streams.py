"""Prompts pushed into a running vLLM engine piece by piece, for programs that bring their own retrieval. Imports vLLM.

    async with streams.open(question_ids, params) as stream:
        await stream.append(page_ids)              # or update(whole_prompt_ids); at any time, also in mid-prefill
        await stream.finish(end_ids)               # nothing is sampled before
        async for event in stream:                 # Prefilled, then StreamedTokens
            ...

The engine must have been started with `scheduler_cls="streamrag.backends.scheduler.streaming_scheduler"`.
"""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

import anyio
from vllm.engine.protocol import StreamingInput
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError

from streamrag.backends.wire import KEY, ChunkMessage, EndOfInput
from streamrag.core import Hint, Prefilled, Prompt, common_prefix_len
from streamrag.errors import BackendError, ConfigurationError, EngineDeadError, PromptTooLongError

__all__ = ["StreamedTokens", "TokenStream", "TokenStreams", "stream_then_generate"]

NO_COMPLETE_PROMPT = "the prompts ended without a complete one"

MOST_WAITING_CHUNKS = 64
"""Chunks that may wait to be handed to vLLM. It takes them as fast as they come."""


@dataclass(frozen=True, slots=True)
class StreamedTokens:
    """New tokens of the answer; `finish_reason` is set on the last ones only, which may be none."""

    token_ids: tuple[int, ...]
    logprobs: Any = None
    """As vLLM has them, one entry per token, if the sampling parameters ask for them."""
    finish_reason: str | None = None


class TokenStream:
    """One prompt that is still growing, and its answer. Made by `TokenStreams.open`."""

    def __init__(self, params: SamplingParams, max_model_len: int, clock: Callable[[], float]) -> None:
        self.log: dict[str, Any] | None = None
        """What happened to the request inside the engine; there when the answer is complete."""
        self._params = params
        self._max_model_len = max_model_len
        self._clock = clock
        self._token_ids: list[int] = []
        self._num_chunks = 0
        self._num_answered = 0
        self.is_complete = False
        """Whether the last chunk has been sent."""
        self._inputs: asyncio.Queue[StreamingInput | None] = asyncio.Queue(MOST_WAITING_CHUNKS)
        self._outputs: Any = None

    @property
    def num_tokens(self) -> int:
        """Length of the prompt so far."""
        return len(self._token_ids)

    async def append(self, token_ids: Sequence[int], *, hint: Hint | None = None) -> None:
        """Let the prompt grow by these tokens.

        :raises PromptTooLongError: it would leave no room for an answer; the stream stays as it was.
        """
        await self._send(self._token_ids + list(token_ids), len(self._token_ids), hint=hint)

    async def update(self, token_ids: Sequence[int], *, is_last: bool = False, hint: Hint | None = None) -> None:
        """Replace the prompt by this one, of which KV is kept up to the longest common prefix.

        If it `is_last`, have the answer sampled, as `finish` does.
        :raises PromptTooLongError: it would leave no room for an answer; the stream stays as it was.
        """
        new = list(token_ids)
        await self._send(new, common_prefix_len(self._token_ids, new), is_final=is_last, hint=hint)

    async def finish(self, token_ids: Sequence[int] = (), params: SamplingParams | None = None) -> None:
        """Append these tokens, if any, and have the answer sampled.

        `params` replace those given at the start, except what vLLM fixes there: `logprobs`.
        :raises PromptTooLongError: it would leave no room for an answer; the stream stays as it was.
        """
        if params is not None:
            self._params = prepared(params)
        await self._send(self._token_ids + list(token_ids), len(self._token_ids), is_final=True)

    async def _send(self, new: list[int], num_kept: int, *, is_final: bool = False, hint: Hint | None = None) -> None:
        if self.is_complete:
            raise BackendError("the stream's prompt is complete: open another stream")
        if not new:
            raise ConfigurationError("a prompt needs at least one token")
        if len(new) >= self._max_model_len:
            raise PromptTooLongError(
                f"a prompt of {len(new)} tokens leaves no room for an answer: max_model_len is {self._max_model_len}"
            )
        num_kept = min(num_kept, len(new) - 1)  # vLLM takes no empty input
        now_s = self._clock()
        expected_s = now_s + hint.end_s if hint is not None and hint.end_s is not None else None
        message = ChunkMessage(self._num_chunks, num_kept, is_final, now_s, expected_s)
        params = self._params.clone()
        params.extra_args = {**(params.extra_args or {}), **message.extra_args()}
        self._token_ids = new
        self._num_chunks += 1
        self.is_complete = is_final
        await self._inputs.put(StreamingInput(tokens_input(new[num_kept:]), params))
        if is_final:
            await self._inputs.put(None)

    def fail(self, error: Exception) -> None:
        """Have the iteration raise `error`, which says why there will be no answer."""
        self._outputs.put(error)

    async def inputs(self) -> AsyncGenerator[StreamingInput, None]:
        """For vLLM: the chunks, until the last."""
        while (chunk := await self._inputs.get()) is not None:
            yield chunk

    def __aiter__(self) -> AsyncGenerator[Prefilled | StreamedTokens, None]:
        return self.events()

    async def events(self) -> AsyncGenerator[Prefilled | StreamedTokens, None]:
        """How far the newest prompt is prefilled, then the answer. To be iterated once.

        :raises BackendError: the engine refused the stream, or failed.
        """
        is_last = False
        while not is_last:
            try:
                output = self._outputs.get_nowait() or await self._outputs.get()
            except VllmEngineDeadError as error:
                raise EngineDeadError("the engine's process is gone") from error
            is_last = output.finished
            if output.outputs:  # vLLM's own last word has none
                event = self._event(output)
                if event is not None:
                    yield event

    def _event(self, output: Any) -> Prefilled | StreamedTokens | None:
        (part,) = output.outputs
        ours = (output.kv_transfer_params or {}).get(KEY, {})
        if "error" in ours or part.finish_reason in ("error", "abort"):
            raise BackendError(f"the engine gave the stream up: {ours.get('error', part.finish_reason)}")
        if "chunk" in ours:  # the end of a chunk, not of the answer; of an older prompt it says nothing
            is_newest = ours["chunk"] == self._num_chunks - 1
            return Prefilled(ours["num_computed"]) if is_newest else None
        self.log = ours.get("log", self.log)
        start, self._num_answered = self._num_answered, len(part.token_ids)
        logprobs = part.logprobs[start:] if part.logprobs else None
        return StreamedTokens(tuple(part.token_ids[start:]), logprobs, part.finish_reason)


class TokenStreams:
    """Opens streams into one engine."""

    def __init__(self, engine: AsyncLLM, clock: Callable[[], float] = time.monotonic) -> None:
        self._engine = engine
        self._clock = clock

    @asynccontextmanager
    async def open(
        self, token_ids: Sequence[int], params: SamplingParams, *, is_complete: bool = False
    ) -> AsyncIterator[TokenStream]:
        """A stream whose prompt begins with these tokens, or is these. Leaving the context aborts what is not finished.

        :raises PromptTooLongError: the prompt leaves no room for an answer.
        :raises ConfigurationError: `params` have what vLLM cannot stream.
        """
        stream = TokenStream(prepared(params), self._engine.model_config.max_model_len, self._clock)
        await stream.update(token_ids, is_last=is_complete)
        end = stream._params.clone()
        end.extra_args = EndOfInput().extra_args()
        stream._outputs = outputs = await self._engine.add_request(uuid.uuid4().hex, stream.inputs(), end)
        try:
            yield stream
        finally:
            with anyio.CancelScope(shield=True), suppress(VllmEngineDeadError):
                outputs.close()
                await self._engine.abort(outputs.request_id, internal=True)


async def stream_then_generate(
    prompts: AsyncIterator[Prompt], streams: TokenStreams, params: SamplingParams
) -> AsyncGenerator[Prefilled | StreamedTokens, None]:
    """Push each prompt as it comes, and yield how far the newest is prefilled, then the answer to the last.

    Closing the generator aborts the request. What `prompts` raises is raised here. The caller closes `prompts`.

    :raises BackendError: the prompts end without a complete one, or the engine fails.
    """
    first = await anext(prompts, None)
    if first is None:
        raise BackendError(NO_COMPLETE_PROMPT)
    async with streams.open(first.token_ids, params, is_complete=first.is_complete) as stream:
        pushing = asyncio.create_task(_push(prompts, stream), name="push prompts")
        try:
            async with aclosing(stream.events()) as events:
                async for event in events:
                    yield event
        finally:
            pushing.cancel()
            await asyncio.wait([pushing])


async def _push(prompts: AsyncIterator[Prompt], stream: TokenStream) -> None:
    try:
        async for prompt in prompts:
            await stream.update(prompt.token_ids, is_last=prompt.is_complete)
        if not stream.is_complete:
            raise BackendError(NO_COMPLETE_PROMPT)
    except Exception as error:
        stream.fail(error)


def prepared(params: SamplingParams) -> SamplingParams:
    """A copy that streams tokens; text is the business of whoever knows the whole prompt.

    :raises ConfigurationError: `params` have what vLLM cannot stream.
    """
    refused = {"stop": params.stop, "n": params.n != 1, "prompt_logprobs": params.prompt_logprobs is not None}
    if found := [name for name, is_given in refused.items() if is_given]:
        raise ConfigurationError(f"SamplingParams: {', '.join(found)} cannot be used with a streamed prompt")
    copy = params.clone()
    # Not DELTA: there vLLM merges what ends a chunk with the first tokens, and repeats their log-probabilities.
    copy.output_kind = RequestOutputKind.CUMULATIVE
    copy.detokenize = False
    return copy
