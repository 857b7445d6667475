"""Tokenizers in threads: one call of each at a time, whichever pipelines share it."""

import asyncio
from collections.abc import Callable
from typing import TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import anyio.to_thread

from streamrag.core import Tokenizer
from streamrag.tasks import wait_regardless

T = TypeVar("T")

_limiters = anyio.lowlevel.RunVar[WeakKeyDictionary[object, anyio.CapacityLimiter]]("streamrag tokenizers")


async def in_thread(tokenizer: Tokenizer, function: Callable[[], T]) -> T:
    """What `function` returns, which uses `tokenizer` and runs in a thread: a page takes milliseconds.

    A thread cannot be stopped: a caller that is cancelled waits for its own, which keeps the tokenizer's place until it
    ends. But what the thread waits for on the event loop, as a server's tokenizer does, is cancelled.

    In virtual time there are no threads, and it runs at once.
    """
    if getattr(asyncio.get_running_loop(), "is_virtual", False):
        return function()
    scope = anyio.CancelScope()
    work = asyncio.create_task(_run(function, _limiter(tokenizer), scope), name="streamrag tokenising")
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        scope.cancel()
        await wait_regardless([work])
        raise


async def _run(function: Callable[[], T], limiter: anyio.CapacityLimiter, scope: anyio.CancelScope) -> T:
    with scope:
        return await anyio.to_thread.run_sync(function, limiter=limiter)
    raise asyncio.CancelledError


def _limiter(tokenizer: Tokenizer) -> anyio.CapacityLimiter:
    """The tokenizer's own, of this event loop."""
    try:
        limiters = _limiters.get()
    except LookupError:
        _limiters.set(limiters := WeakKeyDictionary())
    try:
        return limiters.setdefault(tokenizer, anyio.CapacityLimiter(1))
    except TypeError:  # no hash, or no room for a weak reference: all such have one place together
        return limiters.setdefault(Tokenizer, anyio.CapacityLimiter(1))
