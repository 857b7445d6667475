"""What goes on in the event loop of a home: what lives there is started, read from elsewhere, and ended."""

import asyncio
import warnings
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine
from concurrent.futures import Future
from contextlib import aclosing
from functools import partial
from typing import Any, Generic, TypeVar

from streamrag.errors import PipelineClosedError
from streamrag.support.tasks import CANCEL_AGAIN_S, LET_GO_S, cancel_regardless

CLOSED = (
    "it has been closed, or the event loop that it was started in has ended or stands still: make a new one, or keep "
    "that loop running"
)

END_S = LET_GO_S + CANCEL_AGAIN_S
"""Most seconds that anything here may take to stop: what is read there lets go of foreign code of its own before."""

T = TypeVar("T")


class End:
    """Stands for the end of what is read."""


class Life:
    """Started once, when it is needed; ended after everything that is read of it."""

    def __init__(self, start: Callable[[], Awaitable[None]], aclose: Callable[[], Awaitable[None]]) -> None:
        self._start = start
        self._aclose = aclose
        self._starting: asyncio.Task[None] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self.reads: set[asyncio.Task[None]] = set()

    async def started(self) -> None:
        """A start goes on when the one who waits for it is cancelled: others may wait for it too."""
        if self._starting is None or (self._starting.done() and not _succeeded(self._starting)):
            self._starting = asyncio.create_task(self._begin(), name="streamrag start")
            self._starting.add_done_callback(_succeeded)  # asks for its error, if nobody else does
        await asyncio.shield(self._starting)

    async def ended(self) -> None:
        """What is being started is stopped first, so that it finds nothing closed under it."""
        await self.stopped()
        if self._starting is not None:
            await _stopped(self._starting)
        await self._aclose()

    async def stopped(self) -> None:
        """Only what is read of it has been stopped."""
        await asyncio.gather(*map(_stopped, self.reads))

    def do(self, work: Callable[[], Coroutine[Any, Any, T]], done: "Future[T]") -> None:
        """Tell `done` how `work()` has ended; called in the loop, unlike `run_coroutine_threadsafe`, which leaves a
        coroutine to nobody if the loop ends before.
        """
        if done.set_running_or_notify_cancel():  # else nobody waits for it any more
            task = asyncio.create_task(work())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            task.add_done_callback(partial(tell, done))

    async def _begin(self) -> None:
        await self._start()


class Reading(Generic[T]):
    """An async generator that is read from elsewhere, in a task in the loop that goes on when the next item is asked
    for. Only that task touches the generator: if it is stopped, by its loop's end too, that is no end of the items.
    """

    def __init__(self, life: Life, make: Callable[[], AsyncGenerator[T, None]]) -> None:
        self._life = life
        self._make = make
        self._task: asyncio.Task[None] | None = None
        self._is_asked = asyncio.Event()
        self._answer: Future[T | End] | asyncio.Future[T | End] = Future()

    def ask(self, answer: "Future[T | End]") -> None:
        """Tell `answer` the next item; called in the loop."""
        if answer.set_running_or_notify_cancel():  # else nobody waits for it any more
            self._tell_next(answer)

    async def next(self) -> T | End:
        """The next item, for a reader in the loop itself."""
        answer: asyncio.Future[T | End] = asyncio.get_running_loop().create_future()
        self._tell_next(answer)
        return await answer

    def _tell_next(self, answer: "Future[T | End] | asyncio.Future[T | End]") -> None:
        self._answer = answer
        if self._task is None:
            self._task = asyncio.create_task(self._read(), name="streamrag read")
            self._life.reads.add(self._task)
            self._task.add_done_callback(self._over)
        elif self._task.done():
            answer.set_exception(PipelineClosedError(CLOSED))
        self._is_asked.set()

    async def aclose(self) -> None:
        """Stop it, in the midst of an item too."""
        if self._task is not None:
            await _stopped(self._task)

    async def _read(self) -> None:
        await self._life.started()
        async with aclosing(self._make()) as items:
            async for item in items:
                self._is_asked.clear()
                if not self._answer.done():  # by being cancelled
                    self._answer.set_result(item)
                await self._is_asked.wait()

    def _over(self, task: "asyncio.Task[None]") -> None:
        self._life.reads.discard(task)
        tell(self._answer, task, End())


def tell(waiting: "Future[Any] | asyncio.Future[Any]", task: "asyncio.Task[Any]", result: Any = None) -> None:
    """How `task` has ended, unless it has been told something already."""
    error = PipelineClosedError(CLOSED) if task.cancelled() else task.exception()
    if waiting.done():
        return
    if error is not None:
        waiting.set_exception(error)
    else:
        waiting.set_result(result)


async def _stopped(task: "asyncio.Task[None]") -> None:
    try:
        await cancel_regardless([task], at_most_s=END_S)
    finally:
        if not task.done():
            warnings.warn(
                f"{task.get_name()} has not ended within {END_S:g} s and is left behind: foreign code in it swallows "
                "CancelledError, or waits where it cannot be cancelled",
                ResourceWarning,
                stacklevel=1,
                source=task,
            )


def _succeeded(task: "asyncio.Task[None]") -> bool:
    return not task.cancelled() and task.exception() is None
