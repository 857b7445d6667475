"""The base of sources that hold back updates, and one that sends its updates shortly before it ends."""

from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable
from contextlib import aclosing
from dataclasses import replace
from math import inf

from streamrag.core import Skipped, Source, SourceEvent, Update
from streamrag.query.retrieval import Retrieval, with_timeouts
from streamrag.sources.emission.wrapper import SourceWrapper
from streamrag.support.clock import Clock, monotonic
from streamrag.support.validation import SecondsOrZero, validated


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
                async with aclosing(with_timeouts(events, updates.timeout_s)) as arrivals:
                    async for event in arrivals:
                        for each in updates.reconsider() if event is None else updates.take(event):
                            yield each
            except Exception:  # what the source sent before it failed still counts
                for each in updates.rest():
                    yield each
                raise
            for each in updates.rest():
                yield each


class DelayedUpdates(HoldingSource):
    """Holds back the updates of `source` until it expects to end in `lead_s` seconds, and then sends the newest.

    Prefilling needs no more time than that before the end. Prefilling earlier gains nothing: a later update may
    invalidate it, and if the model shares its processors with the search, it slows the search down. Unlike
    `SelectiveUpdates`, this needs neither a calibration nor a profile.

    The source's hints say when it expects to end (`Hint.end_s`). An update without this hint is sent at once, such as
    those of the first query to a source that has not measured its duration yet. The held update is also sent when
    another kind of event comes, and when the source ends or fails. The final context is the same as without
    `DelayedUpdates` in the default mode, `UpdateMode()`.

    lead_s: about as long as prefilling the whole context takes: `ttft_after_retrieval_s` with `overlap=False`.

    :raises ConfigurationError: `lead_s` is not a number of seconds.
    """

    @validated
    def __init__(self, source: Source, lead_s: SecondsOrZero, *, clock: Clock = monotonic) -> None:
        super().__init__(source)
        self._lead_s = lead_s
        self._clock = clock

    def _new_updates(self) -> "_NewestUpdate":
        return _NewestUpdate(self._lead_s, self._clock)


class _NewestUpdate(HeldUpdates):
    """The newest update of one retrieval, held back until the end is near."""

    def __init__(self, lead_s: float, clock: Clock) -> None:
        self._lead_s, self._clock = lead_s, clock
        self._held: Update | None = None
        self._due_s = 0.0

    def take(self, event: SourceEvent) -> Iterable[SourceEvent]:
        if isinstance(event, Update):
            self._held = None
            end_s = event.hint.end_s if event.hint else None
            if end_s is not None and self._lead_s < end_s < inf:
                self._held, self._due_s = event, self._clock() + end_s - self._lead_s
                return ()
        return (event,) if isinstance(event, Skipped) else (*self.rest(), event)

    def timeout_s(self) -> float | None:
        return None if self._held is None else max(self._due_s - self._clock(), 0.0)

    def rest(self) -> Iterable[SourceEvent]:
        update, self._held = self._held, None
        if update is None:
            return ()
        assert update.hint is not None
        end_s = max(self._due_s + self._lead_s - self._clock(), 0.0)
        return (replace(update, hint=replace(update.hint, end_s=end_s)),)
