"""Run tokenizers in threads, one call per tokenizer at a time, even if several pipelines share it."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import anyio.to_thread

from streamrag.core import Tokenizer
from streamrag.support.tasks import wait_shielded

T = TypeVar("T")

_Limiters: TypeAlias = tuple[anyio.CapacityLimiter, anyio.CapacityLimiter]
"""Limiters of the threads that use a tokenizer, and of the background calls that queue for it. Each admits one."""

_limiters = anyio.lowlevel.RunVar[WeakKeyDictionary[object, _Limiters]]("streamrag tokenizers")


async def in_thread(tokenizer: Tokenizer, function: Callable[[], T], *, is_background: bool = False) -> T:
    """Run `function`, which uses `tokenizer`, in a thread, and return its result.

    Background calls queue for the tokenizer one at a time, so that any other call waits for at most one of them.

    A cancelled caller waits for the end of its thread, which cannot be stopped. If the thread waits for the event loop,
    as a server's tokenizer does, that wait is cancelled. In virtual time, `function` runs at once without a thread.
    """
    if getattr(asyncio.get_running_loop(), "is_virtual", False):
        return function()
    scope = anyio.CancelScope()
    work = asyncio.create_task(
        _run(function, _limiters_of(tokenizer), is_background, scope), name="streamrag tokenising"
    )
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        scope.cancel()
        await wait_shielded([work])
        raise


async def _run(function: Callable[[], T], limiters: _Limiters, is_background: bool, scope: anyio.CancelScope) -> T:
    """Return `function()`, run in a thread under one limiter, in background both; raise if `scope` is cancelled."""
    use, queue = limiters
    with scope:
        async with queue if is_background else nullcontext():
            return await anyio.to_thread.run_sync(function, limiter=use)
    raise asyncio.CancelledError


def _limiters_of(tokenizer: Tokenizer) -> _Limiters:
    """Return this loop's limiters of `tokenizer`, made on first use; tokenizers without a hash share one pair."""
    try:
        limiters = _limiters.get()
    except LookupError:
        _limiters.set(limiters := WeakKeyDictionary())
    new = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
    try:
        return limiters.setdefault(tokenizer, new)
    except TypeError:  # without a hash or weak references; all such tokenizers share one place
        return limiters.setdefault(Tokenizer, new)
