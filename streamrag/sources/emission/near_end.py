"""A source whose updates are sent when its end is near."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from math import inf

from streamrag.clock import Clock, monotonic
from streamrag.core import Skipped, Source, SourceEvent, Update
from streamrag.errors import ConfigurationError
from streamrag.retrieving import Retrieval
from streamrag.sources.emission.silence import with_silences
from streamrag.sources.wrapped import WrappedSource
from streamrag.support.messages import is_number, short


class NearEnd(WrappedSource):
    """Holds back the updates of `source` until it expects to end in `lead_s` seconds, and then sends the newest.

    Prefilling needs no more time than that before the end. What is prefilled sooner gains nothing: a later update may
    make it useless, and where the model computes on the same processors as the search, it makes that slower. It asks
    for less than `WorthSending`: no calibration and no profile.

    The source's hints say when it expects to end (`Hint.end_s`). An update without one is sent at once, as are those
    of the first query to a source that has yet to learn how long it takes; and so is all that is held back before
    anything but an update comes, or the source ends or fails. The final context is the same as without it, in the mode
    `UpdateMode()`, which is the default.

    lead_s: about as long as prefilling the whole context takes: `ttft_after_retrieval_s` with `overlap=False`.

    :raises ConfigurationError: a lead that is no number of seconds.
    """

    def __init__(self, source: Source, lead_s: float, *, clock: Clock = monotonic) -> None:
        super().__init__(source)
        if not is_number(lead_s) or not 0 <= lead_s < inf:
            raise ConfigurationError(f"NearEnd: lead_s={short(lead_s)} must be a number of seconds, at least 0")
        self._lead_s = lead_s
        self._clock = clock

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """The source's events, some of its updates later or never; close it if it is not read to its end."""
        held: Update | None = None
        due_s = 0.0

        def patience_s() -> float | None:
            return None if held is None else max(due_s - self._clock(), 0.0)

        def released() -> Update:
            nonlocal held
            update, held = held, None
            assert update is not None
            assert update.hint is not None
            end_s = max(due_s + self._lead_s - self._clock(), 0.0)
            return replace(update, hint=replace(update.hint, end_s=end_s))

        async with aclosing(Retrieval(self._source, query).events()) as events:
            try:
                async with aclosing(with_silences(events, patience_s)) as coming:
                    async for event in coming:
                        if isinstance(event, Update):
                            held = None
                            end_s = event.hint.end_s if event.hint else None
                            if end_s is not None and self._lead_s < end_s < inf:
                                held, due_s = event, self._clock() + end_s - self._lead_s
                                continue
                        elif held is not None and not isinstance(event, Skipped):
                            yield released()
                        if event is not None:
                            yield event
            except Exception:  # whatever a source of anybody's raises: what it had sent before counts
                if held is not None:
                    yield released()
                raise
            if held is not None:
                yield released()
