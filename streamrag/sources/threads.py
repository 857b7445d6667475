"""Threads for calls that may never return, such as resolving a name.

Such calls would exhaust the event loop's executor, and the program waits for that at exit. These threads are daemons,
and their number is bounded.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class Threads:
    """A limiter that runs at most `size` concurrent calls of an event loop, each in its own daemon thread.

    With `within`, a call also needs a place there: crawls share those threads, and no crawl can take them all. A
    cancelled call continues, and keeps its places until it returns.
    """

    def __init__(self, size: int, name: str, *, within: "Threads | None" = None) -> None:
        self._size = size
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._name = name
        self._within = within

    async def run(self, call: Callable[[], T]) -> T:
        """Run `call` in a new thread, once a place is free, with the caller's context variables; return its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        held = await self._acquire()

        def finish(set_outcome: Callable[[], None]) -> None:
            for places in held:
                places.release()
            if not future.done():
                set_outcome()

        def work() -> None:
            try:
                set_outcome = partial(future.set_result, context.run(call))
            except (StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt) as error:  # a future rejects these
                set_outcome = partial(future.set_exception, RuntimeError(repr(error)))
            except BaseException as error:  # raised again by `run`
                set_outcome = partial(future.set_exception, error)
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(finish, set_outcome)

        context = contextvars.copy_context()
        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except BaseException as error:  # the system has too many threads
            finish(partial(future.set_exception, error))
        return await future

    async def _acquire(self) -> list[asyncio.Semaphore]:
        """Acquire a place of this limiter and of each around it, or none; return the semaphores of the event loop."""
        loop = asyncio.get_running_loop()
        held: list[asyncio.Semaphore] = []
        async with AsyncExitStack() as undo:
            limiter: Threads | None = self
            while limiter:
                places = limiter._places.setdefault(loop, asyncio.Semaphore(limiter._size))
                await undo.enter_async_context(places)
                held.append(places)
                limiter = limiter._within
            undo.pop_all()
        return held
