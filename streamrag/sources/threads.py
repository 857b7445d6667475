"""Threads for calls that may never return, such as looking up a name.

Calls that do not end would take all threads of the event loop's own executor, for which a program that ends waits.
These are a bounded number of daemon threads, for which nothing waits.
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
    """Runs at most `size` calls of an event loop concurrently, each in a daemon thread; further ones wait.

    With `within`, each call takes a place there too: many crawls share a number of threads, and none takes all. A call
    that was cancelled goes on, and keeps its places until it returns.
    """

    def __init__(self, size: int, name: str, *, within: "Threads | None" = None) -> None:
        self._size = size
        self._places: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()
        self._name = name
        self._within = within

    async def run(self, call: Callable[[], T]) -> T:
        """Return or raise what `call` does."""
        loop = asyncio.get_running_loop()
        result_of_call: asyncio.Future[T] = loop.create_future()
        taken = await self._take_places()

        def on_done(result: T | None, error: BaseException | None) -> None:
            for places in taken:
                places.release()
            if not result_of_call.done():
                if error is None:
                    result_of_call.set_result(result)  # type: ignore[arg-type]
                else:
                    result_of_call.set_exception(error)

        def work() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                result = context.run(call)
            except (StopIteration, GeneratorExit, SystemExit, KeyboardInterrupt) as raised:  # end more than the call
                error = RuntimeError(repr(raised))
            except BaseException as raised:  # raised again where it is awaited
                error = raised
            with suppress(RuntimeError):  # the loop is closed: nothing waits any more
                loop.call_soon_threadsafe(on_done, result, error)

        context = contextvars.copy_context()
        try:
            threading.Thread(target=work, name=self._name, daemon=True).start()
        except BaseException as error:  # there are too many threads
            on_done(None, error)
        return await result_of_call

    async def _take_places(self) -> list[asyncio.Semaphore]:
        """Take places of this event loop: those of one that ended with calls under way are gone with it."""
        loop = asyncio.get_running_loop()
        taken: list[asyncio.Semaphore] = []
        async with AsyncExitStack() as undo:
            each: Threads | None = self
            while each:
                places = each._places.setdefault(loop, asyncio.Semaphore(each._size))
                await undo.enter_async_context(places)
                taken.append(places)
                each = each._within
            undo.pop_all()
        return taken
