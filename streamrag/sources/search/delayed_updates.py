"""A source that sends the updates of another one shortly before it ends."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from math import isfinite

from streamrag.core import Progress, Skipped, Source, SourceEvent, Startable, Update, part_name
from streamrag.core.retrieval import Retrieval, with_timeouts
from streamrag.support.clock import Clock, monotonic
from streamrag.support.validation import SecondsOrZero, validated


class DelayedUpdates:
    """A source that holds back the updates of `source` until it expects to end in `lead_s`, and then sends the newest.

    Prefilling needs no more time than that before the end. Prefilling earlier gains nothing: a later update may
    invalidate it, and if the model shares its processors with the search, it slows the search down. A pipeline with
    `overlap="auto"` learns by itself whether to do so; this is for those who know it.

    The source's hints say when it expects to end (`Hint.end_s`). An update without this hint is sent at once, such as
    those of the first query to a source that has not measured its duration yet. The held update is also sent before
    an `Append` or a `CutShort`, and when the source ends or fails. The final context is the same as without
    `DelayedUpdates` in the default mode, `UpdateMode()`.

    lead_s: about as long as prefilling the whole context takes: `ttft_after_retrieval_s` with `overlap=False`.

    :raises ConfigurationError: `lead_s` is not a number of seconds.
    """

    @validated
    def __init__(self, source: Source, lead_s: SecondsOrZero, *, clock: Clock = monotonic) -> None:
        self._source = source
        self._lead_s = lead_s
        self._clock = clock

    @property
    def name(self) -> str:
        """This class's name with the source's: schedulers learn the timing of each separately."""
        return f"{type(self).__name__}({part_name(self._source)})"

    async def start(self, progress: Progress) -> None:
        """Start the source if it is `Startable`."""
        if isinstance(self._source, Startable):
            await self._source.start(progress)

    async def aclose(self) -> None:
        """Close the source if it is `Startable`."""
        if isinstance(self._source, Startable):
            await self._source.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Yield the source's events, some of its updates later or never. Closing this closes the source's stream."""
        async with aclosing(Retrieval(self._source, query).events()) as events:
            held = _HeldUpdate(self._lead_s, self._clock)
            try:
                async with aclosing(with_timeouts(events, held.timeout_s)) as arrivals:
                    async for event in arrivals:
                        if isinstance(event, Update) and held.holds(event):
                            continue
                        if not isinstance(event, Update | Skipped) and (update := held.release()):
                            yield update
                        if event is not None:
                            yield event
            except Exception:  # what the source sent before it failed still counts
                if update := held.release():
                    yield update
                raise
            if update := held.release():
                yield update


class _HeldUpdate:
    """The newest update of one retrieval, held back until the end is near."""

    def __init__(self, lead_s: float, clock: Clock) -> None:
        self._lead_s, self._clock = lead_s, clock
        self._update: Update | None = None
        self._due_s = 0.0

    def holds(self, update: Update) -> bool:
        """Hold this update in place of the last one, or none if it is due or has no forecast. Return whether it is."""
        end_s = update.hint.end_s if update.hint else None
        is_early = end_s is not None and isfinite(end_s) and end_s > self._lead_s
        self._update = update if is_early else None
        self._due_s = self._clock() + (end_s or 0.0) - self._lead_s
        return is_early

    def timeout_s(self) -> float | None:
        """Return the seconds until the held update is due; None if there is none."""
        return None if self._update is None else max(self._due_s - self._clock(), 0.0)

    def release(self) -> Update | None:
        """Return the held update with its forecast as of now, and hold none; return None if none is held."""
        update, self._update = self._update, None
        if update is None:
            return None
        assert update.hint is not None
        end_s = max(self._due_s + self._lead_s - self._clock(), 0.0)
        return replace(update, hint=replace(update.hint, end_s=end_s))
