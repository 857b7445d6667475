"""A thread that has an event loop."""

import asyncio
import os
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from streamrag.support.tasks import CANCEL_AGAIN_S, cancel_regardless

CLOSE_S = 10.0
"""Most seconds that a program waits for the end of a loop that it has dropped without closing it."""


class LoopThread:
    """A thread with an event loop that runs until it is told to stop, and what to do then. No program waits for it."""

    def __init__(self) -> None:
        self.ended: Future[None] = Future()
        self.ended.set_running_or_notify_cancel()  # so that nobody who gives up waiting for it cancels it
        self._at_end: Callable[[], Awaitable[None]] | None = None
        self._process_id = os.getpid()
        self._left: list[asyncio.Task[Any]] = []
        ready: Future[asyncio.AbstractEventLoop] = Future()
        threading.Thread(target=self._run, args=(ready,), name="streamrag loop", daemon=True).start()
        self.loop = ready.result()

    def stop(self, at_end: Callable[[], Awaitable[None]] | None = None) -> None:
        self._at_end = at_end
        with suppress(RuntimeError):  # it has ended
            self.loop.call_soon_threadsafe(self._stopping.set)

    def drop(self, at_end: Callable[[], Awaitable[None]]) -> None:
        """Stop, when nobody is there any more to close it; at the program's end, too, but not at a fork's."""
        if self._process_id != os.getpid():
            return
        self.stop(at_end)
        if current_loop() is None:
            with suppress(TimeoutError):
                self.ended.exception(CLOSE_S)

    def _run(self, ready: "Future[asyncio.AbstractEventLoop]") -> None:
        error: BaseException | None = None
        with asyncio.Runner() as runner:
            try:
                runner.run(self._live(ready))
            except BaseException as raised:  # raised where somebody waits for the end
                error = raised
            if self._left:  # which the runner waits for, if need be for ever
                self._tell(error)
        if not self._left:
            self._tell(error)

    def _tell(self, error: BaseException | None) -> None:
        if error is None:
            self.ended.set_result(None)
        else:
            self.ended.set_exception(error)

    async def _live(self, ready: "Future[asyncio.AbstractEventLoop]") -> None:
        self._stopping = asyncio.Event()
        ready.set_result(asyncio.get_running_loop())
        await self._stopping.wait()
        try:
            if self._at_end is not None:
                await self._at_end()
        finally:
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            await cancel_regardless(tasks, at_most_s=CANCEL_AGAIN_S)
            self._left = [task for task in tasks if not task.done()]


def current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
