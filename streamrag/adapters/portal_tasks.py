"""The work in a portal's event loop: its tenant is started, read from elsewhere, and ended; a thread with a loop."""

import asyncio
import os
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing, suppress
from functools import partial
from typing import Any, Generic, TypeVar, cast

from streamrag.errors import PipelineClosedError
from streamrag.support.tasks import CANCEL_AGAIN_S, LET_GO_S, end_or_leave

END_S = LET_GO_S + CANCEL_AGAIN_S
"""Most seconds that a task may take to stop: what it runs lets go of foreign code of its own before."""

EXIT_S = 10.0
"""Most seconds that a program waits at its end for a loop that was never closed."""

CLOSED = (
    "it has been closed, or the event loop that it was started in has ended or stands still: make a new one, or keep "
    "that loop running"
)

T = TypeVar("T")
END: Any = object()
"""Stands for the end of an iteration."""


class Tenant:
    """A pipeline or a source in the loop: started once, when it is needed; ended after all that is read of it."""

    def __init__(self, start: Callable[[], Awaitable[None]], aclose: Callable[[], Awaitable[None]]) -> None:
        self._start = start
        self._aclose = aclose
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.reads: set[asyncio.Task[None]] = set()
        self.on_ended: Callable[[], None] = lambda: None

    def submit(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Run `work()` in the loop, from any thread. If the loop ends first, no coroutine is left that nobody awaits.

        :raises PipelineClosedError: the loop has ended.
        """
        outcome: Future[T] = Future()

        def begin() -> None:
            if outcome.set_running_or_notify_cancel():  # else nobody waits for it any more
                task = asyncio.create_task(work())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(partial(_copy_outcome, outcome))

        try:
            loop.call_soon_threadsafe(begin)
        except RuntimeError:  # it has ended just now
            raise PipelineClosedError(CLOSED) from None
        return outcome

    async def started(self) -> None:
        """Wait for the start, which goes on when the one who waits is cancelled: others may wait for it too."""
        if self._starting is None or (self._starting.done() and _failed(self._starting)):
            self._starting = asyncio.ensure_future(self._begin())
            self._starting.add_done_callback(_failed)  # retrieves its error, if nothing else does
        await asyncio.shield(self._starting)

    async def end(self) -> None:
        """Stop what is read, then what is being started, so that it finds nothing closed under it; and close."""
        try:
            await self.end_reads()
            if self._starting is not None:
                await end_or_leave(self._starting, "streamrag start", at_most_s=END_S)
            await self._aclose()
        finally:
            self.on_ended()

    async def end_reads(self) -> None:
        """Stop what is read, and nothing else."""
        await asyncio.gather(*(end_or_leave(task, "streamrag read", at_most_s=END_S) for task in self.reads))

    async def _begin(self) -> None:
        await self._start()


class Reading(Generic[T]):
    """An async generator that is read from elsewhere, driven by one task: cancel scopes in it are of that task.

    The generator goes on when its next item is asked for. If its task is stopped, by its loop's end too, that is an
    error and no end of the items.
    """

    def __init__(self, tenant: Tenant, make: Callable[[], AsyncGenerator[T, None]]) -> None:
        self._tenant = tenant
        self._make = make
        self._task: asyncio.Task[None] | None = None
        self._is_asked = asyncio.Event()

    async def next(self) -> T:
        """Return the next item, or `END`."""
        if self._task is not None and self._task.done():
            raise PipelineClosedError(CLOSED)
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._is_asked.set()
        if self._task is None:
            self._task = asyncio.create_task(self._drive(), name="streamrag read")
            self._tenant.reads.add(self._task)
            self._task.add_done_callback(self._tenant.reads.discard)
            self._task.add_done_callback(lambda task: _copy_outcome(self._answer, task, END))
        return cast(T, await answer)

    async def aclose(self) -> None:
        """Stop it, in the midst of an item too."""
        if self._task is not None:
            await end_or_leave(self._task, "streamrag read", at_most_s=END_S)

    async def _drive(self) -> None:
        await self._tenant.started()
        async with aclosing(self._make()) as items:
            async for item in items:
                self._is_asked.clear()
                if not self._answer.done():  # by being cancelled
                    self._answer.set_result(item)
                await self._is_asked.wait()


def _failed(task: "asyncio.Future[None]") -> bool:
    return task.cancelled() or task.exception() is not None


def _copy_outcome(outcome: "Future[Any] | asyncio.Future[Any]", task: "asyncio.Task[Any]", result: Any = None) -> None:
    """Give `outcome` the error of `task`, or its result, or `result` if that is not None."""
    error = PipelineClosedError(CLOSED) if task.cancelled() else task.exception()
    if outcome.done():
        return
    if error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result() if result is None else result)


def start_loop_thread() -> tuple[asyncio.AbstractEventLoop, Callable[[], None]]:
    """Start a daemon thread with an event loop; return the loop, and what ends both when it is called in the loop."""
    ready: Future[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = Future()

    async def live() -> None:
        stopping = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stopping.set))
        await stopping.wait()

    threading.Thread(target=lambda: asyncio.run(live()), name="streamrag loop", daemon=True).start()
    return ready.result()


def end_dropped(tenant: Tenant, loop: asyncio.AbstractEventLoop, process_id: int) -> None:
    """End a loop's thread when its portal was collected, and at the program's end, but not at that of a fork."""
    if process_id == os.getpid():
        with suppress(PipelineClosedError, TimeoutError):  # it was closed, or takes too long
            ended = tenant.submit(loop, tenant.end)
            if current_loop() is None:
                ended.exception(EXIT_S)


def current_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
