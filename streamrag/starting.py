"""Starting sources and backends, each of which has one owner: the code that starts it and closes it."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import wraps
from typing import Any, TypeVar, cast

from streamrag.core import Progress, Startable, part_name
from streamrag.errors import AlreadyStartedError
from streamrag.support.tasks import cancel_regardless

Start = TypeVar("Start", bound=Callable[..., Any])


async def start_all(parts: Iterable[object], progress: Progress) -> AsyncExitStack:
    """Start the parts that are `Startable`, all at once, and return what closes them.

    If one cannot be started, the others are closed. The one itself is not: another owner may be using it.
    """

    async def start(part: Startable) -> None:
        await part.start(progress)
        started.push_async_callback(part.aclose)

    async with AsyncExitStack() as started:
        starts = [asyncio.create_task(start(part)) for part in parts if isinstance(part, Startable)]
        try:
            await asyncio.gather(*starts)
        finally:
            await cancel_regardless(starts)
        return started.pop_all()
    raise AssertionError  # for mypy: a stack may swallow exceptions


def started_once(start: Start) -> Start:
    """Refuse to `start` an object that is started; its `aclose` sets `is_started` to False again."""

    @wraps(start)
    async def starts(self: Any, progress: Progress) -> Any:
        if getattr(self, "is_started", False):
            raise AlreadyStartedError(
                f"{part_name(self)} is started already, and has one owner, which closes it. Make another one, or share "
                "it: start it yourself, and give each Pipeline owns_backend=False or owns_source=False"
            )
        self.is_started = True
        try:
            return await start(self, progress)
        except BaseException:
            self.is_started = False
            raise

    return cast(Start, starts)
