"""Start and close sources and backends. Each has one owner: the code that starts it also closes it."""

import asyncio
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from functools import partial, wraps
from typing import Any, TypeVar, overload

from streamrag.core import Progress, Startable, part_name
from streamrag.errors import AlreadyStartedError
from streamrag.support.tasks import cancel_and_wait

Start = TypeVar("Start", bound=Callable[..., Any])

SHARE_IT = (
    "Make another one, or share it: start it yourself, and give each Pipeline owns_backend=False or owns_source=False"
)


async def start_all(parts: Iterable[object], progress: Progress) -> AsyncExitStack:
    """Start the `Startable` parts at once, and return a stack that closes them; if one fails, close all and raise."""

    async def start(part: Startable) -> None:
        await part.start(progress)
        started.push_async_callback(part.aclose)

    async with AsyncExitStack() as started:
        starts = [asyncio.create_task(start(part)) for part in parts if isinstance(part, Startable)]
        try:
            await asyncio.gather(*starts)
        finally:
            await cancel_and_wait(starts)
        return started.pop_all()
    raise AssertionError  # for mypy: an exit stack may swallow exceptions


@overload
def started_once(start: Start) -> Start: ...
@overload
def started_once(*, remedy: str) -> Callable[[Start], Start]: ...
def started_once(start: Start | None = None, *, remedy: str = SHARE_IT) -> Any:
    """Decorate a `start` method so that it raises AlreadyStartedError while `is_started` is True.

    The decorator sets `is_started` to True, and back if `start` raises. The class's `aclose` must set it to False.

    remedy: the end of the error message, which says what to do instead.
    """
    if start is None:
        return partial(started_once, remedy=remedy)

    @wraps(start)
    async def start_if_not_started(self: Any, progress: Progress) -> Any:
        if getattr(self, "is_started", False):
            raise AlreadyStartedError(
                f"{part_name(self)} is started already, and has one owner, which closes it. {remedy}"
            )
        self.is_started = True
        try:
            return await start(self, progress)
        except BaseException:
            self.is_started = False
            raise

    return start_if_not_started
