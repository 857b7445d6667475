"""A thread that has an event loop."""

import asyncio
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress

CLOSE_S = 10.0
"""Most seconds that a program waits for the end of a loop that it has dropped without closing it."""


class LoopThread:
    """A thread with an event loop that runs until it is told to stop, and then `at_end`. No program waits for it."""

    def __init__(self, at_end: Callable[[], Awaitable[None]]) -> None:
        self.ended: Future[None] = Future()
        self._at_end = at_end
        ready: Future[asyncio.AbstractEventLoop] = Future()
        threading.Thread(target=self._run, args=(ready,), name="streamrag loop", daemon=True).start()
        self.loop = ready.result()

    def stop(self) -> None:
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._stopping.set)

    def drop(self) -> None:
        """Stop, when nobody is there any more to close it; at the program's end, too."""
        self.stop()
        if current_loop() is None:
            with suppress(TimeoutError):
                self.ended.exception(CLOSE_S)

    def _run(self, ready: "Future[asyncio.AbstractEventLoop]") -> None:
        try:
            asyncio.run(self._live(ready))
        except BaseException as error:  # raised where somebody waits for the end
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)

    async def _live(self, ready: "Future[asyncio.AbstractEventLoop]") -> None:
        self._stopping = asyncio.Event()
        ready.set_result(asyncio.get_running_loop())
        await self._stopping.wait()
        await self._at_end()


def current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
