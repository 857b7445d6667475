"""A source whose updates are sent when its end is near."""

from collections.abc import Iterable
from dataclasses import replace
from math import inf

from streamrag.core import Skipped, Source, SourceEvent, Update
from streamrag.sources.emission.held_updates import HoldingSource
from streamrag.support.clock import Clock, monotonic
from streamrag.support.validation import SecondsOrZero, validated


class NearEnd(HoldingSource):
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

    @validated
    def __init__(self, source: Source, lead_s: SecondsOrZero, *, clock: Clock = monotonic) -> None:
        super().__init__(source)
        self._lead_s = lead_s
        self._clock = clock

    def _new_updates(self) -> "_UntilNearEnd":
        return _UntilNearEnd(self._lead_s, self._clock)


class _UntilNearEnd:
    """The newest update of one retrieval, until the end is near."""

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

    def reconsider(self) -> Iterable[SourceEvent]:
        return self.rest()

    def rest(self) -> Iterable[SourceEvent]:
        update, self._held = self._held, None
        if update is None:
            return ()
        assert update.hint is not None
        end_s = max(self._due_s + self._lead_s - self._clock(), 0.0)
        return (replace(update, hint=replace(update.hint, end_s=end_s)),)
