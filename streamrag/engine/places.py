"""A cache of sort keys: most requests do not change from step to step, and hundreds of them wait."""

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from streamrag.engine.request import RequestView

QueuePosition: TypeAlias = tuple[Any, ...]
"""A sort key that ends with its request. The parts before it are unique to that request."""


class Places:
    """A cache of `place(request, now_s)` by the identity of the view, for views of which `is_fixed` holds."""

    def __init__(
        self, place: Callable[[RequestView, float], QueuePosition], is_fixed: Callable[[RequestView], bool]
    ) -> None:
        self._place = place
        self._is_fixed = is_fixed
        self._cached: dict[int, QueuePosition] = {}  # by id(view); the place keeps the view alive, so ids stay unique

    def look_up(self, requests: Iterable[RequestView], now_s: float) -> list[QueuePosition]:
        """Return the place of each request, in the given order."""
        cached, compute = self._cached.get, self._compute
        return [place if (place := cached(id(r))) is not None else compute(r, now_s) for r in requests]

    def clear(self) -> None:
        self._cached.clear()

    def trim(self, num_requests: int) -> None:
        """Clear the cache if it holds many more places than the `num_requests` that exist now."""
        if len(self._cached) > 2 * num_requests + 100:
            self._cached.clear()

    def _compute(self, request: RequestView, now_s: float) -> QueuePosition:
        """Return the place of a request, and cache the place if it is fixed."""
        place = self._place(request, now_s)
        if self._is_fixed(request):
            self._cached[id(request)] = place
        return place
