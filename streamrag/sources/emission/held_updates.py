"""The base of sources that hold back updates of another source."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import aclosing

from streamrag.core import SourceEvent
from streamrag.query.retrieval import Retrieval
from streamrag.sources.wrapper import SourceWrapper
from streamrag.support.tasks import cancel_regardless

_END = object()


class HeldUpdates(ABC):
    """The state of one retrieval: the sent events and the ones held back."""

    @abstractmethod
    def take(self, event: SourceEvent) -> Iterable[SourceEvent]:
        """Handle an event of the source, and return the events to send now."""

    @abstractmethod
    def timeout_s(self) -> float | None:
        """Return how long to wait for the next event of the source; None if nothing is held back."""

    @abstractmethod
    def rest(self) -> Iterable[SourceEvent]:
        """Return all events that are held back. Called when the source ends or fails."""

    def reconsider(self) -> Iterable[SourceEvent]:
        """Return the events to send after `timeout_s` without an event; by default the rest."""
        return self.rest()


class HoldingSource(SourceWrapper, ABC):
    """A source that holds back updates of `source`."""

    @abstractmethod
    def _new_updates(self) -> HeldUpdates:
        """Return the state of a new retrieval."""

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the source's events, some of its updates later or never. Closing this closes the source's stream."""
        async with aclosing(Retrieval(self._source, query).events()) as events:
            updates = self._new_updates()
            try:
                async with aclosing(_with_timeouts(events, updates.timeout_s)) as arrivals:
                    async for event in arrivals:
                        for each in updates.reconsider() if event is None else updates.take(event):
                            yield each
            except Exception:  # what the source sent before it failed still counts
                for each in updates.rest():
                    yield each
                raise
            for each in updates.rest():
                yield each


async def _with_timeouts(
    events: AsyncGenerator[SourceEvent, None], timeout_s: Callable[[], float | None]
) -> AsyncGenerator[SourceEvent | None, None]:
    """Yield each event, and None whenever `timeout_s()` seconds pass without one. Close this before `events`."""
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
