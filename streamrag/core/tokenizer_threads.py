"""Tokenizers in threads: one call of each at a time, whichever pipelines share it."""

import asyncio
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import anyio
import anyio.lowlevel
import anyio.to_thread

from streamrag.core import Tokenizer
from streamrag.support.tasks import wait_regardless

T = TypeVar("T")

_Places: TypeAlias = tuple[anyio.CapacityLimiter, anyio.CapacityLimiter]
"""A tokenizer's own, and the only one to wait for that which all of the background has together."""

_places = anyio.lowlevel.RunVar[WeakKeyDictionary[object, _Places]]("streamrag tokenizers")


async def in_thread(tokenizer: Tokenizer, function: Callable[[], T], *, is_background: bool = False) -> T:
    """Run `function`, which uses `tokenizer`, in a thread, and return its result: a page takes milliseconds.

    With `is_background`, one call at a time enters the queue for the tokenizer: however many background calls there
    are, any other caller waits for at most one of them.

    A thread cannot be stopped: a caller that is cancelled waits for its own, which keeps the tokenizer's place until it
    ends. But what the thread waits for on the event loop, as a server's tokenizer does, is cancelled.

    In virtual time there are no threads, and it runs at once.
    """
    if getattr(asyncio.get_running_loop(), "is_virtual", False):
        return function()
    scope = anyio.CancelScope()
    work = asyncio.create_task(_run(function, _places_of(tokenizer), is_background, scope), name="streamrag tokenising")
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        scope.cancel()
        await wait_regardless([work])
        raise


async def _run(function: Callable[[], T], places: _Places, is_background: bool, scope: anyio.CancelScope) -> T:
    place, waiting = places
    with scope:
        async with waiting if is_background else nullcontext():
            return await anyio.to_thread.run_sync(function, limiter=place)
    raise asyncio.CancelledError


def _places_of(tokenizer: Tokenizer) -> _Places:
    """Return the limiters of `tokenizer` on this event loop; make them on its first call."""
    try:
        places = _places.get()
    except LookupError:
        _places.set(places := WeakKeyDictionary())
    new = anyio.CapacityLimiter(1), anyio.CapacityLimiter(1)
    try:
        return places.setdefault(tokenizer, new)
    except TypeError:  # no hash, or no room for a weak reference: all such have one place together
        return places.setdefault(Tokenizer, new)
