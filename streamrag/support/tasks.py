"""Cancel tasks and wait for their end, for code that cleans up."""

import asyncio
import warnings
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

import anyio

CANCEL_AGAIN_S = 2.0
"""Seconds after which a task is cancelled again: foreign code may swallow a cancellation, but may clean up first."""

LET_GO_S = 10.0
"""Seconds that stopping a query may take. Our own code stops quickly, so only foreign code takes longer."""

T = TypeVar("T")


class Broadcast:
    """A notification that wakes all tasks waiting for it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def wake(self) -> None:
        """Wake all tasks that are waiting now."""
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next `wake`."""
        await self._event.wait()


def is_cancelled() -> bool:
    """Whether the current task was cancelled. Otherwise, a CancelledError in it comes from faulty code."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def run_shielded(work: Coroutine[Any, Any, T], name: str) -> T:
    """Run `work` to its end in a task, even if the caller is cancelled meanwhile, and return its result."""
    task = asyncio.create_task(work, name=name)
    await wait_shielded([task])
    return task.result()


async def wait_shielded(tasks: Collection["asyncio.Future[Any]"], *, at_most_s: float | None = None) -> None:
    """Wait until all `tasks` are done, or for `at_most_s`, deferring the caller's cancellation until then.

    Without `at_most_s`, the tasks must be certain to end soon. Their exceptions are marked as retrieved.
    """
    was_cancelled = False
    now = asyncio.get_running_loop().time
    end_s = None if at_most_s is None else now() + at_most_s
    with anyio.CancelScope(shield=True):  # a cancelled anyio scope would cancel this task again at every step
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


async def cancel_and_wait(tasks: Collection["asyncio.Future[Any]"], *, at_most_s: float | None = None) -> None:
    """Cancel `tasks`, again every `CANCEL_AGAIN_S` as they run foreign code, and wait as `wait_shielded` does."""
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle

    def cancel() -> None:
        nonlocal timer
        for task in tasks:
            task.cancel()
        timer = loop.call_later(CANCEL_AGAIN_S, cancel)

    cancel()
    try:
        await wait_shielded(tasks, at_most_s=at_most_s)
    finally:
        timer.cancel()


async def end_or_leave(
    task: "asyncio.Future[Any]", what: str, culprit: str = "something", *, at_most_s: float | None = None
) -> None:
    """Cancel a task of foreign code; leave it, with a ResourceWarning about `what`, after `at_most_s` (`LET_GO_S`)."""
    at_most_s = LET_GO_S if at_most_s is None else at_most_s
    try:
        await cancel_and_wait([task], at_most_s=at_most_s)
    finally:
        if not task.done():
            task.add_done_callback(lambda ended: ended.cancelled() or ended.exception())  # marks it as retrieved
            warnings.warn(
                f"{what} has not ended within {at_most_s:g} s and is left behind: {culprit} swallows CancelledError, "
                "or waits, or tokenises, where it cannot be cancelled",
                ResourceWarning,
                stacklevel=1,
                source=task,
            )
