"""Prefill a growing prompt on an engine that accepts whole requests only, by warming its prefix cache.

Each partial prompt is sent as a request for one token, which is discarded. The complete prompt then hits the cache:

    prompts    ──P1────P2──P3──────────────P4 (complete)
    engine       [prefill P1 ✗              superseded: aborted, its computed KV stays cached
                       [P2 ✗
                           [prefill P3 ]    Prefilled
                                           [generate P4 ───▶ AnswerChunk, AnswerChunk, ...

Rules that keep warming from costing more than it saves:

- Only full KV blocks are sent, because only these are cached.
- A prompt without a full block beyond the computed ones is not sent. If it needs exactly the blocks that are being
  computed, the current request continues; any other newer prompt aborts it immediately.
- There is at most one warming request. The complete prompt aborts it and never waits for it.
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
from streamrag.support.tasks import cancel_and_wait

Prefill: TypeAlias = Callable[[tuple[int, ...]], Awaitable[None]]
"""Computes the KV of these tokens; cancelled when it is no longer needed."""

Generate: TypeAlias = Callable[[tuple[int, ...]], AsyncGenerator[AnswerChunk, None]]
"""Answers the complete prompt; closed when the answer is no longer needed."""


async def warm_then_generate(
    prompts: AsyncIterator[Prompt], *, prefill: Prefill, generate: Generate, block_size: int = 1
) -> AsyncGenerator[BackendEvent, None]:
    """Prefill each partial prompt when it arrives and yield `Prefilled`; then yield the answer to the complete one.

    A separate task reads and closes `prompts`, so neither a slow engine nor a slow consumer delays the abort of a
    superseded request. Closing the generator cancels and awaits all requests. The module docstring has the rules.

    :raises BackendError: when the prompts end without a complete one.
    :raises Exception: from `prompts`, `prefill` or `generate`.
    """
    send, receive = anyio.create_memory_object_stream[BackendEvent](1)
    driver = asyncio.create_task(_drive(prompts, prefill, generate, block_size, send, receive), name="warming")
    try:
        with receive:
            async for event in receive:
                yield event
        await driver
    finally:
        await cancel_and_wait([driver])


async def _drive(
    prompts: AsyncIterator[Prompt],
    prefill: Prefill,
    generate: Generate,
    block_size: int,
    send: MemoryObjectSendStream[BackendEvent],
    receive: MemoryObjectReceiveStream[BackendEvent],
) -> None:
    """Warm the cache until the prompt is complete, then generate. Send all events, but drop superseded `Prefilled`s."""

    def report(event: Prefilled) -> None:
        if send.statistics().current_buffer_used:
            receive.receive_nowait()  # drop an older Prefilled that a slow consumer has not received
        send.send_nowait(event)

    with send:
        complete = await _Warming(prefill, block_size, report).run(prompts)
        async with aclosing(generate(complete.token_ids)) as chunks:
            async for chunk in chunks:
                await send.send(chunk)


class _Warming:
    """State of one query's newest prompt: its computed part, and the part that is being computed."""

    def __init__(self, prefill: Prefill, block_size: int, report: Callable[[Prefilled], None]) -> None:
        assert block_size >= 1
        self._prefill = prefill
        self._block_size = block_size
        self._report = report
        self._num_computed = 0  # leading tokens of the newest prompt whose KV is known to be computed
        self._num_wanted = 0  # leading tokens that the current request computes; 0 without a request
        self._request = anyio.CancelScope()

    async def run(self, prompts: AsyncIterator[Prompt]) -> Prompt:
        """Warm the cache with each partial prompt. At the complete one, cancel the warming and return that prompt.

        Closes `prompts`. Raises BackendError without a complete prompt, and errors of `prompts` and `prefill`.
        """
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
            error = group.exceptions[0]  # further ones were raised during the cancellation
        finally:
            if close := getattr(prompts, "aclose", None):
                await close()
        if error:
            raise error
        if complete is None:
            raise BackendError("the prompts ended without a complete one")
        return complete

    def _follow(self, prompt: Prompt, tasks: TaskGroup) -> None:
        """Keep a request for exactly the prompt's full blocks; else cancel it and start one if a block is missing."""
        self._num_computed = min(self._num_computed, prompt.num_shared)
        num_wanted = len(prompt.token_ids) // self._block_size * self._block_size
        if num_wanted == self._num_wanted <= prompt.num_shared:
            return
        self._request.cancel()
        self._num_wanted = 0
        if num_wanted > self._num_computed:
            self._request = anyio.CancelScope()
            self._num_wanted = num_wanted
            tasks.start_soon(self._compute, prompt.token_ids[:num_wanted], self._request)

    async def _compute(self, token_ids: tuple[int, ...], request: anyio.CancelScope) -> None:
        """Prefill the tokens, then record and report that; neither once `request` is cancelled, so superseded."""
        if request.cancel_called:  # superseded before it was sent
            return
        with request:
            await self._prefill(token_ids)
        if not request.cancel_called:  # else the request is superseded
            self._num_wanted = 0
            self._num_computed = len(token_ids)
            self._report(Prefilled(self._num_computed))
