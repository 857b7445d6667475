"""The tasks in a portal's event loop: start and end of the resource, iterations for other threads, a loop thread."""

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
"""Time limit for a task to stop. It exceeds the limits after which tasks abandon foreign code."""

EXIT_S = 10.0  # maximum seconds that an exiting program waits for a loop that was never closed

CLOSED = (
    "it has been closed, or the event loop that it was started in has ended or is blocked: create a new one, or keep "
    "that loop running"
)

T = TypeVar("T")
END: Any = object()
"""A sentinel for the end of an iteration."""


class PortalResource:
    """A pipeline or a source in the loop: started once, on first use, and ended after all of its iterations."""

    def __init__(self, start: Callable[[], Awaitable[None]], aclose: Callable[[], Awaitable[None]]) -> None:
        self._start = start
        self._aclose = aclose
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.reads: set[asyncio.Task[None]] = set()
        self.on_ended: Callable[[], None] = lambda: None
        self.is_ending = False

    def submit(self, loop: asyncio.AbstractEventLoop, work: Callable[[], Coroutine[Any, Any, T]]) -> "Future[T]":
        """Begin `work()` as a task of `loop`, from any thread; return the future of its outcome.

        The future can be cancelled until the task begins, and raises PipelineClosedError if the task is cancelled.

        :raises PipelineClosedError: the loop has been closed.
        """
        outcome: Future[T] = Future()

        def begin() -> None:
            if outcome.set_running_or_notify_cancel():  # False if the caller has cancelled it
                task = asyncio.create_task(work())
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
                task.add_done_callback(partial(_copy_outcome, outcome))

        try:
            loop.call_soon_threadsafe(begin)
        except RuntimeError:  # the loop has ended
            raise PipelineClosedError(CLOSED) from None
        return outcome

    async def started(self) -> None:
        """Wait for the start, which all callers share and no caller cancels. Begin a new one if it has failed."""
        if self._starting is None or (self._starting.done() and _failed(self._starting)):
            self._starting = asyncio.ensure_future(self._begin())
            self._starting.add_done_callback(_failed)  # marks its exception as retrieved
        await asyncio.shield(self._starting)

    async def end(self) -> None:
        """Stop all iterations, then a start in progress, and close the resource, even if it has not been started.

        Iterations or a start that do not stop in time are abandoned. Last, call `on_ended`, even after an error.
        """
        self.is_ending = True
        try:
            await self.end_reads()
            if self._starting is not None:
                await end_or_leave(self._starting, "streamrag start", at_most_s=END_S)
            await self._aclose()
        finally:
            self.on_ended()

    async def end_reads(self) -> None:
        """Stop all iterations, and abandon those that do not end in time."""
        await asyncio.gather(*(end_or_leave(task, "streamrag read", at_most_s=END_S) for task in self.reads))

    async def _begin(self) -> None:
        await self._start()


class Reading(Generic[T]):
    """An iteration of an async generator for a caller elsewhere. One task drives it, as cancel scopes require.

    The generator resumes when the next item is requested. If its task is cancelled, also by the end of the loop,
    `next` raises instead of returning `END`.
    """

    def __init__(self, resource: PortalResource, make: Callable[[], AsyncGenerator[T, None]]) -> None:
        self._resource = resource
        self._make = make
        self._task: asyncio.Task[None] | None = None
        self._is_requested = asyncio.Event()

    async def next(self) -> T:
        """Return the next item, or `END` after the last one, or raise the generator's error. One call at a time.

        :raises PipelineClosedError: the iteration has ended or failed before, or its task is cancelled.
        """
        if self._task is not None and self._task.done():
            raise PipelineClosedError(CLOSED)
        self._answer = answer = asyncio.get_running_loop().create_future()
        self._is_requested.set()
        if self._task is None:
            self._task = asyncio.create_task(self._drive(), name="streamrag read")
            self._resource.reads.add(self._task)
            self._task.add_done_callback(self._resource.reads.discard)
            self._task.add_done_callback(lambda task: _copy_outcome(self._answer, task, END))
        return cast(T, await answer)

    async def aclose(self) -> None:
        """Stop the generator, even in the middle of an item."""
        if self._task is not None:
            await end_or_leave(self._task, "streamrag read", at_most_s=END_S)

    async def _drive(self) -> None:
        """Start the resource; give each item to the call of `next` that waits, or drop it if that call is cancelled."""
        await self._resource.started()
        async with aclosing(self._make()) as items:
            async for item in items:
                self._is_requested.clear()
                if not self._answer.done():  # cancelled
                    self._answer.set_result(item)
                await self._is_requested.wait()


def _failed(task: "asyncio.Future[None]") -> bool:
    """Whether the task was cancelled or raised, which marks its exception as retrieved."""
    return task.cancelled() or task.exception() is not None


def _copy_outcome(outcome: "Future[Any] | asyncio.Future[Any]", task: "asyncio.Task[Any]", result: Any = None) -> None:
    """Set an open outcome to the task's error (PipelineClosedError if cancelled) or `result`, by default the task's."""
    error = PipelineClosedError(CLOSED) if task.cancelled() else task.exception()
    if outcome.done():
        return
    if error is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result() if result is None else result)


def start_loop_thread() -> tuple[asyncio.AbstractEventLoop, Callable[[], None]]:
    """Start a daemon thread with an event loop. Return the loop, and a function that ends both; call it in the loop."""
    ready: Future[tuple[asyncio.AbstractEventLoop, Callable[[], None]]] = Future()

    async def live() -> None:
        stopping = asyncio.Event()
        ready.set_result((asyncio.get_running_loop(), stopping.set))
        await stopping.wait()

    threading.Thread(target=lambda: asyncio.run(live()), name="streamrag loop", daemon=True).start()
    return ready.result()


def end_dropped(resource: PortalResource, loop: asyncio.AbstractEventLoop, process_id: int) -> None:
    """End the resource and its loop's thread, unless the resource is ending already, or this is a forked process.

    Wait for the end, at most `EXIT_S`, except in a thread that runs an event loop.
    """
    if process_id == os.getpid() and not resource.is_ending:  # a second end might not begin before the loop has stopped
        with suppress(PipelineClosedError, TimeoutError):  # closed before, or too slow
            ended = resource.submit(loop, resource.end)
            if current_loop() is None:
                ended.exception(EXIT_S)


def current_loop() -> asyncio.AbstractEventLoop | None:
    """Return the running event loop of this thread; None without one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
