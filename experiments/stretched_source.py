"""A source slowed down, for demonstrations and replays."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, TypeAlias

from pydantic import Field

from streamrag.core import Append, CutShort, Progress, Skipped, Source, SourceEvent, Startable, Update, part_name
from streamrag.core.retrieval import Retrieval
from streamrag.errors import ConfigurationError
from streamrag.support.clock import Clock, monotonic
from streamrag.support.tasks import cancel_and_wait
from streamrag.support.validation import Number, SecondsOrZero, validated

MAX_WAITING = 1024  # delayed events; the source then waits

_Arrival: TypeAlias = "tuple[float, SourceEvent | Exception | None]"
"""The arrival time of an event, of an error, or of the end (None)."""


class SourceWrapper:
    """A source that wraps `source`, and starts and closes it."""

    def __init__(self, source: Source) -> None:
        self._source = source

    @property
    def name(self) -> str:
        """The wrapper's name with the source's: schedulers learn the timing of each wrapper separately."""
        return f"{type(self).__name__}({part_name(self._source)})"

    async def start(self, progress: Progress) -> None:
        """Start the wrapped source if it is `Startable`."""
        if isinstance(self._source, Startable):
            await self._source.start(progress)

    async def aclose(self) -> None:
        """Close the wrapped source if it is `Startable`."""
        if isinstance(self._source, Startable):
            await self._source.aclose()


class StretchedSource(SourceWrapper):
    """A source that delays the events of `source`, which runs at its own speed.

    The first event is never delayed. An event that arrives after it is due is passed on at once. A hint's `end_s` is
    multiplied by `factor`, or omitted.

    source: the source to delay; it is started and closed with this one.
    gaps_s: seconds from the time at which an event is due to that of the next one. The last gap repeats.
    end_gap_s: with `gaps_s`, seconds from the last event to the end.
    factor: instead of `gaps_s`: how many times as long after the first event everything is due, the end included.

    :raises ConfigurationError: not exactly one of `gaps_s` and `factor` is given, or a value is invalid.
    """

    @validated
    def __init__(
        self,
        source: Source,
        gaps_s: Annotated[Sequence[SecondsOrZero], Field(min_length=1)] | None = None,
        *,
        end_gap_s: SecondsOrZero = 0.0,
        factor: Annotated[Number, Field(ge=1)] | None = None,
        clock: Clock = monotonic,
    ) -> None:
        if (gaps_s is None) == (factor is None):
            raise ConfigurationError("StretchedSource: give either gaps_s or factor")
        if end_gap_s and factor is not None:
            raise ConfigurationError(f"StretchedSource: end_gap_s={end_gap_s!r} goes with gaps_s")
        super().__init__(source)
        self._gaps_s = tuple(gaps_s or ())
        self._end_gap_s = end_gap_s
        self._factor = factor
        self._clock = clock

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the source's events, and raise its error, delayed. Closing the generator early stops the source."""
        arrivals: asyncio.Queue[_Arrival] = asyncio.Queue(MAX_WAITING)
        reader = asyncio.create_task(self._read(query, arrivals), name="stretched source")
        try:
            first_s, due_s, num_events = None, 0.0, 0
            while True:
                arrived_s, arrival = await arrivals.get()
                if first_s is None:
                    first_s = due_s = arrived_s
                elif self._factor is not None:
                    due_s = first_s + (arrived_s - first_s) * self._factor
                elif isinstance(arrival, Append | Update | Skipped | CutShort):
                    due_s += self._gaps_s[min(num_events, len(self._gaps_s)) - 1]
                else:
                    due_s += self._end_gap_s
                await asyncio.sleep(due_s - self._clock())
                if arrival is None:
                    return
                if isinstance(arrival, Exception):
                    raise arrival
                num_events += 1
                yield self._with_hint(arrival)
        finally:
            await cancel_and_wait([reader])

    async def _read(self, query: str, arrivals: "asyncio.Queue[_Arrival]") -> None:
        """Put each event with the time of its arrival into the queue, then the source's error, or None at the end."""
        end: Exception | None = None
        try:
            async with aclosing(Retrieval(self._source, query).events()) as events:
                async for event in events:
                    await arrivals.put((self._clock(), event))
        except Exception as error:  # raised again by `stream`
            end = error
        await arrivals.put((self._clock(), end))

    def _with_hint(self, event: SourceEvent) -> SourceEvent:
        """Return the event, whose hint has its `end_s` multiplied by `factor`, or none with `gaps_s`."""
        if isinstance(event, Skipped | CutShort) or not event.hint or event.hint.end_s is None:
            return event
        end_s = None if self._factor is None else event.hint.end_s * self._factor
        return replace(event, hint=replace(event.hint, end_s=end_s))
