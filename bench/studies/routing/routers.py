"""All routers by name: those that users can choose, and those to compare with."""

from collections.abc import Callable, Mapping

from streamrag.routing import ROUTERS, Router

from .prefix_affinity import PrefixAffinity
from .queue_routers import PowerOfTwo, ShortestQueue

ALL_ROUTERS: Mapping[str, Callable[..., Router]] = {
    **ROUTERS,
    "power_of_two": PowerOfTwo,
    "shortest_queue": ShortestQueue,
    "prefix_affinity": PrefixAffinity,
}
