"""Threads for calls that may never return, such as resolving a name.

Such calls would exhaust the event loop's executor, and the program waits for that at exit. These threads are daemons,
and their number is bounded.
"""

import asyncio
import contextvars
import threading
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
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
        """Run `call` in a thread, with the caller's context variables, and return its result."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        held = await self._acquire()

        def on_done(result: T | None, error: BaseException | None) -> None:
            for places in held:
                places.release()
            if not future.done():
                if error is None:
                    future.set_result(result)  # type: ignore[arg-type]
                else:
                    future.set_exception(error)

        def work() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                result = context.run(call)
            except (StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt) as raised:  # a future rejects these
                error = RuntimeError(repr(raised))
            except BaseException as raised:  # raised again by `run`
                error = raised
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(on_done, result, error)

        context = contextvars.copy_context()
        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except BaseException as error:  # the system has too many threads
            on_done(None, error)
        return await future

    async def _acquire(self) -> list[asyncio.Semaphore]:
        """Acquire a place of each limiter. Semaphores are per event loop: those of a closed loop go with it."""
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
