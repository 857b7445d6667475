"""Where requests stand in an order, worked out once: most have not changed since the last step, and hundreds wait."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from streamrag.engine.request import RequestView

Place: TypeAlias = tuple[Any, ...]
"""A sort key whose last part is the request. The parts before it differ from those of any other request."""


class Places:
    """A cache of each request's `place`, by the identity of its view; only of views whose place `lasts`."""

    def __init__(
        self, place: Callable[[RequestView, float], Place], lasts: Callable[[RequestView], bool] = lambda request: True
    ) -> None:
        self._place = place
        self._lasts = lasts
        # From the identity of a view, which the place keeps alive.
        self._known: dict[int, Place] = {}

    def of(self, requests: Iterable[RequestView], now_s: float) -> list[Place]:
        known, enter = self._known.get, self._enter
        return [place if (place := known(id(r))) is not None else enter(r, now_s) for r in requests]

    def forget(self) -> None:
        """Remove every cached place."""
        self._known.clear()

    def forget_unless(self, num_wanted: int) -> None:
        """Remove every cached place, unless hardly more are kept than the `num_wanted` that may be needed again."""
        if len(self._known) > 2 * num_wanted + 100:
            self.forget()

    def _enter(self, request: RequestView, now_s: float) -> Place:
        place = self._place(request, now_s)
        if self._lasts(request):
            self._known[id(request)] = place
        return place
