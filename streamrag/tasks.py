"""Waiting for tasks to end, for code that cleans up."""

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any, TypeVar

import anyio

__all__ = ["run_regardless", "wait_regardless"]

T = TypeVar("T")


async def run_regardless(work: Coroutine[Any, Any, T], name: str) -> T:
    """What `work` returns or raises; it runs to its end in a task, however often this one is cancelled meanwhile."""
    task = asyncio.create_task(work, name=name)
    await wait_regardless([task])
    return task.result()


async def wait_regardless(tasks: Collection["asyncio.Task[Any]"]) -> None:
    """Wait until `tasks` are done, whoever is cancelled meanwhile, and only then let that cancellation go on.

    The tasks must be sure to end soon. Their errors count as retrieved.
    """
    was_cancelled = False
    with anyio.CancelScope(shield=True):  # a cancelled anyio scope would cancel us again at every step
        while pending := [task for task in tasks if not task.done()]:
            try:
                await asyncio.wait(pending)
            except asyncio.CancelledError:
                was_cancelled = True
    for task in tasks:
        if not task.cancelled():
            task.exception()
    if was_cancelled:
        raise asyncio.CancelledError
