"""Ending tasks and waiting for their end, for code that cleans up."""

import asyncio
import warnings
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

import anyio

CANCEL_AGAIN_S = 2.0
"""Foreign code may swallow a cancellation, and is cancelled again after this; a clean-up within it is left in peace."""

LET_GO_S = 10.0
"""Most seconds that a query may take to stop. What it stops is quick, so it is foreign code that does not let go."""

T = TypeVar("T")


class Broadcast:
    """Wakes all tasks that wait for it at a moment."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Wake all that wait now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next `wake`."""
        await self._event.wait()


def is_cancelled() -> bool:
    """Whether the current task was told to stop. A CancelledError in one that was not is somebody's mistake."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def run_regardless(work: Coroutine[Any, Any, T], name: str) -> T:
    """Return or raise what `work` does; it runs to its end in a task, however often this one is cancelled meanwhile."""
    task = asyncio.create_task(work, name=name)
    await wait_regardless([task])
    return task.result()


async def wait_regardless(tasks: Collection["asyncio.Future[Any]"], *, at_most_s: float | None = None) -> None:
    """Wait until `tasks` are done, whoever is cancelled meanwhile, and only then let that cancellation go on.

    Without `at_most_s` the tasks must be sure to end soon. Their errors count as retrieved.
    """
    was_cancelled = False
    now = asyncio.get_running_loop().time
    end_s = None if at_most_s is None else now() + at_most_s
    with anyio.CancelScope(shield=True):  # a cancelled anyio scope would cancel us again at every step
        while (pending := [task for task in tasks if not task.done()]) and (end_s is None or now() < end_s):
            try:
                await asyncio.wait(pending, timeout=None if end_s is None else end_s - now())
            except asyncio.CancelledError:
                was_cancelled = True
    for task in tasks:
        if task.done() and not task.cancelled():
            task.exception()
    if was_cancelled:
        raise asyncio.CancelledError


async def cancel_regardless(tasks: Collection["asyncio.Future[Any]"], *, at_most_s: float | None = None) -> None:
    """Cancel `tasks`, again and again since they run foreign code, and wait for them as `wait_regardless` does."""
    loop = asyncio.get_running_loop()
    again: asyncio.TimerHandle

    def cancel() -> None:
        nonlocal again
        for task in tasks:
            task.cancel()
        again = loop.call_later(CANCEL_AGAIN_S, cancel)

    cancel()
    try:
        await wait_regardless(tasks, at_most_s=at_most_s)
    finally:
        again.cancel()


async def end_or_leave(task: "asyncio.Future[Any]", what: str, *, at_most_s: float | None = None) -> None:
    """Cancel a task that runs foreign code; one that does not end in time is left behind with a warning.

    what: names the task, for the warning.
    at_most_s: seconds to wait, `LET_GO_S` if None.
    """
    at_most_s = LET_GO_S if at_most_s is None else at_most_s
    try:
        await cancel_regardless([task], at_most_s=at_most_s)
    finally:
        if not task.done():
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # nobody else asks for it
            warnings.warn(
                f"{what} has not ended within {at_most_s:g} s and is left behind: something swallows CancelledError, "
                "or waits where it cannot be cancelled",
                ResourceWarning,
                stacklevel=1,
                source=task,
            )
