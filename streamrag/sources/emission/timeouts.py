"""Events of a source, and timeouts between them."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from streamrag.core import SourceEvent
from streamrag.tasks import cancel_regardless

_END = object()


async def with_timeouts(
    events: AsyncGenerator[SourceEvent, None], timeout_s: Callable[[], float | None]
) -> AsyncGenerator[SourceEvent | None, None]:
    """Yield each event, and None whenever `timeout_s()` seconds have passed without one; it is called anew each time.

    Close it before `events`, which it leaves open.
    """
    pending: asyncio.Task[object] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(events), name="streamrag held back")
            await asyncio.wait([pending], timeout=timeout_s())
            if not pending.done():
                yield None
                continue
            event, pending = pending.result(), None
            if event is _END:
                return
            yield event  # type: ignore[misc]
    finally:
        if pending is not None:
            await cancel_regardless([pending])


async def _next(events: AsyncGenerator[SourceEvent, None]) -> object:
    return await anext(events, _END)
