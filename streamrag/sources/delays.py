"""A source slowed down, for demonstrations and replays."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Annotated, TypeAlias

from pydantic import Field

from streamrag.core import Append, CutShort, Skipped, Source, SourceEvent, Update
from streamrag.errors import ConfigurationError
from streamrag.query.retrieval import Retrieval
from streamrag.sources.wrapper import SourceWrapper
from streamrag.support.clock import Clock, monotonic
from streamrag.support.tasks import cancel_regardless
from streamrag.support.validation import Number, SecondsOrZero, validated

MAX_WAITING = 1024
"""Events held back at most; with more, the source waits."""

_Arrival: TypeAlias = "tuple[float, SourceEvent | Exception | None]"
"""A time, and the event, error or end (None) that arrived then."""


class StretchedSource(SourceWrapper):
    """Holds back the events of `source`, which works at its own speed, until they are due.

    The first event is due at once. With `gaps_s`, each further one is due so many seconds after the one before was (the
    last gap goes on for ever), and the end `end_gap_s` after the last event. With `factor`, everything, the end
    included, is due that many times as long after the first event as it really came. What comes later than it is due is
    not held back.

    Starting and closing it starts and closes `source`. Hints of an end in seconds are multiplied too, or left out.

    :raises ConfigurationError: not one of `gaps_s` and `factor`, or values that cannot work.
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
        """Yield the source's events and its error, later. Closing it before its end stops the source."""
        arrivals: asyncio.Queue[_Arrival] = asyncio.Queue(MAX_WAITING)
        reading = asyncio.create_task(self._read(query, arrivals), name="stretched source")
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
            await cancel_regardless([reading])

    async def _read(self, query: str, arrivals: "asyncio.Queue[_Arrival]") -> None:
        end: Exception | None = None
        events = Retrieval(self._source, query).events()
        try:
            async with aclosing(events):
                async for event in events:
                    await arrivals.put((self._clock(), event))
        except Exception as error:  # raised again where the events are read
            end = error
        await arrivals.put((self._clock(), end))

    def _with_hint(self, event: SourceEvent) -> SourceEvent:
        if isinstance(event, Skipped | CutShort) or not event.hint or event.hint.end_s is None:
            return event
        end_s = None if self._factor is None else event.hint.end_s * self._factor
        return replace(event, hint=replace(event.hint, end_s=end_s))
