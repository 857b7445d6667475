"""Answer a growing prompt through a stream into an engine that runs our scheduler.

    prompts    ──P1────P2──P3──────────────P4 (complete)
    engine       [one request: prefill P1, P2, P3 ... as they arrive, answer P4 ─────────────▶ AnswerChunk, ...

`streamrag.backends.warming` is the counterpart for engines that accept whole requests only.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import replace

from streamrag.backends.vllm.client.token_streams import TokenStream, TokenStreams
from streamrag.core import AnswerChunk, BackendEvent, Prefilled, Prompt, SamplingParams
from streamrag.errors import BackendError
from streamrag.support.tasks import cancel_and_wait

NO_COMPLETE_PROMPT = "the prompts ended without a complete one"


async def stream_then_generate(
    prompts: AsyncIterator[Prompt],
    streams: TokenStreams,
    params: SamplingParams,
    generate: Callable[[TokenStream], AsyncGenerator[AnswerChunk, None]] | None = None,
) -> AsyncGenerator[BackendEvent, None]:
    """Push each prompt that is not empty when it arrives. Yield how far the newest is prefilled, then the answer.

    With `generate`, for an answer that no stream can give, the stream's own answer is discarded: it ends the prefill.
    `generate` is called with the ended stream, and finds the KV of the complete prompt in the prefix cache, or fetches
    it by the stream's `kv_transfer`.

    Closing the generator aborts the request. Errors of `prompts` are raised here. The caller closes `prompts`.

    :raises BackendError: the prompts end without a complete one, or the engine fails.
    """
    async for first in prompts:
        if first.token_ids or first.is_complete:  # an empty prompt has nothing to prefill
            break
    else:
        raise BackendError(NO_COMPLETE_PROMPT)
    async with streams.open(first, params) as stream:
        pushing = asyncio.create_task(_push(prompts, stream), name="push prompts")
        try:
            async for event in stream:
                if generate is None or isinstance(event, Prefilled):
                    yield event
        finally:
            await cancel_and_wait([pushing])
    if generate is not None:
        async with aclosing(generate(stream)) as chunks:
            async for chunk in chunks:
                yield replace(chunk, record=stream.record) if chunk.finish_reason else chunk


async def _push(prompts: AsyncIterator[Prompt], stream: TokenStream) -> None:
    """Push the further prompts. An error, or the lack of a complete prompt, is raised and also fails the stream."""
    try:
        if not stream.is_complete:
            async for prompt in prompts:
                if prompt.token_ids or prompt.is_complete:
                    await stream.update(prompt)
                if prompt.is_complete:
                    return
            raise BackendError(NO_COMPLETE_PROMPT)
    except BaseException as error:
        stream.fail(error)
        raise
