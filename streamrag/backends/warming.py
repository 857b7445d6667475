"""Prefilling a prompt that is still growing, on an engine that knows whole requests only.

The engine keeps the KV of what it has computed, by prefix. So each partial prompt is sent as a request for one token,
which is thrown away, and the complete prompt finds its KV already computed:

    prompts    ──P1────P2──P3──────────────P4 (complete)
    engine       [prefill P1 ✗              superseded: aborted, what it computed stays cached
                       [P2 ✗
                           [prefill P3 ]    Prefilled
                                           [generate P4 ───▶ AnswerChunk, AnswerChunk, ...

Rules, all so that warming never costs more than it gives:

- Only whole KV blocks are sent, because only these are cached.
- A prompt with no whole block beyond what is computed already is not sent. One that needs just the blocks that are
  being computed leaves that request alone; any other newer prompt aborts it at once.
- At most one warming request exists; the complete prompt aborts it and never waits for it.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import TypeAlias

import anyio
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from streamrag.core import AnswerChunk, BackendEvent, Prefilled, Prompt
from streamrag.errors import BackendError
from streamrag.support.tasks import cancel_regardless

Prefill: TypeAlias = Callable[[tuple[int, ...]], Awaitable[None]]
"""Computes the KV of these tokens; cancelled when that is no longer wanted."""

Generate: TypeAlias = Callable[[tuple[int, ...]], AsyncGenerator[AnswerChunk, None]]
"""Answers the complete prompt; closed when the answer is no longer wanted."""


async def warm_then_generate(
    prompts: AsyncIterator[Prompt], *, prefill: Prefill, generate: Generate, block_size: int = 1
) -> AsyncGenerator[BackendEvent, None]:
    """Prefill each prompt as it comes, then answer the complete one. See the module's text for the rules.

    Prompts are read and the iterator is closed in a task of its own, so neither a slow engine nor a slow consumer
    delays the abort of a superseded request. Closing the generator cancels whatever is under way and waits for that.

    :raises BackendError: when the prompts end without a complete one.
    :raises Exception: what `prompts`, `prefill` or `generate` raised.
    """
    send, receive = anyio.create_memory_object_stream[BackendEvent](1)
    driver = asyncio.create_task(_drive(prompts, prefill, generate, block_size, send, receive), name="warming")
    try:
        with receive:
            async for event in receive:
                yield event
        await driver
    finally:
        await cancel_regardless([driver])


async def _drive(
    prompts: AsyncIterator[Prompt],
    prefill: Prefill,
    generate: Generate,
    block_size: int,
    send: MemoryObjectSendStream[BackendEvent],
    receive: MemoryObjectReceiveStream[BackendEvent],
) -> None:
    def report(event: Prefilled) -> None:
        if send.statistics().current_buffer_used:
            receive.receive_nowait()  # an older Prefilled that a slow consumer has not taken yet
        send.send_nowait(event)

    with send:
        complete = await _Warming(prefill, block_size, report).run(prompts)
        async with aclosing(generate(complete.token_ids)) as chunks:
            async for chunk in chunks:
                await send.send(chunk)


class _Warming:
    """What is computed of one query's newest prompt, and what is being computed."""

    def __init__(self, prefill: Prefill, block_size: int, report: Callable[[Prefilled], None]) -> None:
        assert block_size >= 1
        self._prefill = prefill
        self._block_size = block_size
        self._report = report
        self._num_computed = 0
        """Leading tokens of the newest prompt whose KV is known to be computed."""
        self._num_wanted = 0
        """Leading tokens that the request under way computes; 0 when there is none."""
        self._request = anyio.CancelScope()

    async def run(self, prompts: AsyncIterator[Prompt]) -> Prompt:
        """The complete prompt, once it has come."""
        complete: Prompt | None = None
        error: BaseException | None = None
        try:
            async with anyio.create_task_group() as tasks:
                async for prompt in prompts:
                    if prompt.is_complete:
                        complete = prompt
                        break
                    self._follow(prompt, tasks)
                tasks.cancel_scope.cancel()
        except BaseExceptionGroup as group:
            error = group.exceptions[0]  # any others came while the first one was cancelling the rest
        finally:
            if close := getattr(prompts, "aclose", None):
                await close()
        if error:
            raise error
        if complete is None:
            raise BackendError("the prompts ended without a complete one")
        return complete

    def _follow(self, prompt: Prompt, tasks: TaskGroup) -> None:
        self._num_computed = min(self._num_computed, prompt.num_shared)
        num_wanted = self._num_whole_blocks(len(prompt.token_ids))
        if num_wanted == self._num_wanted <= prompt.num_shared:
            return
        self._request.cancel()
        self._num_wanted = 0
        if num_wanted > self._num_computed:
            self._request = anyio.CancelScope()
            self._num_wanted = num_wanted
            tasks.start_soon(self._compute, prompt.token_ids[:num_wanted], self._request)

    async def _compute(self, token_ids: tuple[int, ...], request: anyio.CancelScope) -> None:
        if request.cancel_called:  # superseded before it was sent
            return
        with request:
            await self._prefill(token_ids)
        if not request.cancel_called:  # else a newer request, or none, has taken this one's place
            self._num_wanted = 0
            self._num_computed = len(token_ids)
            self._report(Prefilled(self._num_computed))

    def _num_whole_blocks(self, num_tokens: int) -> int:
        """Tokens in the whole blocks of so many tokens."""
        return num_tokens - num_tokens % self._block_size
