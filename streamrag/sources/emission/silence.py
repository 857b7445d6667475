"""Events of a source, and its silences."""

import asyncio
from collections.abc import AsyncGenerator, Callable

from streamrag.core import SourceEvent
from streamrag.support.tasks import cancel_regardless

_END = object()


async def with_silences(
    events: AsyncGenerator[SourceEvent, None], patience_s: Callable[[], float | None]
) -> AsyncGenerator[SourceEvent | None, None]:
    """Each event, and None whenever `patience_s()` seconds have passed without one; it is asked anew each time.

    To be closed before `events`, which it leaves open.
    """
    pending: asyncio.Task[object] | None = None
    try:
        while True:
            pending = pending or asyncio.create_task(_next(events), name="streamrag held back")
            await asyncio.wait([pending], timeout=patience_s())
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
