"""How much the scheduler and all that is ours in it remember, to be compared when all requests are gone."""

from collections import deque
from collections.abc import Iterator, Sized
from typing import Any

from streamrag.backends.scheduler import StreamingSchedulerMixin

__all__ = ["KEPT", "sizes"]

KEPT: dict[str, str] = {
    "forecast._habits": "of sources, not of requests; bounded",
    "connector.host_memory.pool._free": "fewer, if there is less than was promised; that none is in use is checked",
    "streaming_policy._places": "views of requests; dropped when a hundred too many are there",
}
"""What may grow, and why."""


def sizes(scheduler: StreamingSchedulerMixin) -> dict[str, int]:
    """The length of every container without a bound, by where it is."""
    return dict(_sizes("", scheduler, set()))


def _sizes(path: str, part: Any, seen: set[int]) -> Iterator[tuple[str, int]]:
    """Of a part of the scheduler: its own, and those of our objects that it refers to."""
    if id(part) in seen:
        return
    seen.add(id(part))
    for name, value in _attributes(part):
        if isinstance(value, deque) and value.maxlen is not None:
            continue  # the last few observations
        if isinstance(value, Sized) and not isinstance(value, str | bytes | tuple):
            yield path + name, len(value)
        elif type(value).__module__.startswith("streamrag."):
            yield from _sizes(f"{path}{name}.", value, seen)


def _attributes(part: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(part, "__dict__", {}).items()
    for kind in type(part).__mro__:
        slots = getattr(kind, "__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(part, name):
                yield name, getattr(part, name)
