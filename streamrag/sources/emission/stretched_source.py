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
from streamrag.sources.emission.wrapper import SourceWrapper
from streamrag.support.clock import Clock, monotonic
from streamrag.support.tasks import cancel_and_wait
from streamrag.support.validation import Number, SecondsOrZero, validated

MAX_WAITING = 1024  # delayed events; the source then waits

_Arrival: TypeAlias = "tuple[float, SourceEvent | Exception | None]"
"""The arrival time of an event, of an error, or of the end (None)."""


class StretchedSource(SourceWrapper):
    """A source that delays the events of `source`, which runs at its own speed.

    The first event is never delayed. With `gaps_s`, each later event is due the next gap after the one before it was
    due (the last gap repeats), and the end is due `end_gap_s` after the last event. With `factor`, everything,
    including the end, is due `factor` times as long after the first event as it arrived. An event that arrives after
    it is due is passed on at once.

    Starting and closing it starts and closes `source`. A hint's `end_s` is multiplied by `factor`, or omitted.

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
        end: Exception | None = None
        try:
            async with aclosing(Retrieval(self._source, query).events()) as events:
                async for event in events:
                    await arrivals.put((self._clock(), event))
        except Exception as error:  # raised again by `stream`
            end = error
        await arrivals.put((self._clock(), end))

    def _with_hint(self, event: SourceEvent) -> SourceEvent:
        if isinstance(event, Skipped | CutShort) or not event.hint or event.hint.end_s is None:
            return event
        end_s = None if self._factor is None else event.hint.end_s * self._factor
        return replace(event, hint=replace(event.hint, end_s=end_s))
