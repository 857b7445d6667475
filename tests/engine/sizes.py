"""How large the containers of a scheduler are: once all requests are gone, as large as at its start."""

from collections.abc import Collection, Iterator
from typing import Any

__all__ = ["container_sizes", "what_has_grown"]

BOUNDED = {
    "_places": "a cache of the policy, emptied when most of it is stale",
    "_habits": "one entry for each kind of source, a thousand at most",
    "_newest": "the last few observations",
    "sent": "copies of which no report has told how long they took",
    "gone_ids": "the last ids of which late chunks may come, a thousand at most",
}
"""What may be larger at the end, by the attribute's name, and why it does not grow for ever."""


def container_sizes(scheduler: Any) -> dict[str, int]:
    """The size of every container of `scheduler`, vLLM's included, and of what of ours it refers to."""
    sizes = dict(_sizes(scheduler, "scheduler", set()))
    for index, group in enumerate(scheduler.kv_cache_manager.coordinator.single_type_managers):
        for name in ("req_to_blocks", "num_cached_block"):
            sizes[f"KV group {index}.{name}"] = len(getattr(group, name))
    return sizes


def what_has_grown(scheduler: Any, at_start: dict[str, int]) -> dict[str, str]:
    """The containers of a scheduler without requests that are not as large as they were at its start."""
    now = container_sizes(scheduler)
    return {name: f"{at_start.get(name, 0)} -> {now[name]}" for name in now if now[name] != at_start.get(name, 0)}


def _sizes(owner: Any, path: str, seen: set[int]) -> Iterator[tuple[str, int]]:
    seen.add(id(owner))
    for name, value in _attributes(owner):
        if name in BOUNDED or id(value) in seen:
            continue
        if isinstance(value, Collection) and not isinstance(value, str | bytes | tuple):
            yield f"{path}.{name}", len(value)
        elif type(value).__module__.startswith("streamrag."):
            yield from _sizes(value, f"{path}.{name}", seen)


def _attributes(owner: Any) -> Iterator[tuple[str, Any]]:
    yield from getattr(owner, "__dict__", {}).items()
    for each in type(owner).__mro__:
        for name in getattr(each, "__slots__", ()):
            if hasattr(owner, name):
                yield name, getattr(owner, name)
