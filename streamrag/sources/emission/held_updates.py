"""A base of sources that hold back updates of another source."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing
from typing import Protocol

from streamrag.core import SourceEvent
from streamrag.query.retrieval import Retrieval
from streamrag.sources.wrapper import SourceWrapper
from streamrag.support.tasks import cancel_regardless

_END = object()


class HeldUpdates(Protocol):
    """The state of one retrieval: what was sent of it, and what is held back."""

    def take(self, event: SourceEvent) -> Iterable[SourceEvent]:
        """Take an event of the source, and return the events to send now."""

    def timeout_s(self) -> float | None:
        """Return how long to wait for the source's next event; None if nothing is held back."""

    def reconsider(self) -> Iterable[SourceEvent]:
        """Return the events to send after `timeout_s` without an event."""

    def rest(self) -> Iterable[SourceEvent]:
        """Return all that is held back, when the source has ended or failed."""


class HoldingSource(SourceWrapper, ABC):
    """A base of sources that hold back updates of `source`."""

    @abstractmethod
    def _new_updates(self) -> HeldUpdates:
        """Return the state of a retrieval that begins."""

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the source's events, some of its updates later or never; close it if it is not read to its end."""
        async with aclosing(Retrieval(self._source, query).events()) as events:
            updates = self._new_updates()
            try:
                async with aclosing(_with_timeouts(events, updates.timeout_s)) as arrivals:
                    async for event in arrivals:
                        for each in updates.reconsider() if event is None else updates.take(event):
                            yield each
            except Exception:  # any source may raise anything: what it had sent before counts
                for each in updates.rest():
                    yield each
                raise
            for each in updates.rest():
                yield each


async def _with_timeouts(
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
