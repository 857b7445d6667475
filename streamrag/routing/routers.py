"""The routers by name."""

from collections.abc import Callable, Mapping
from typing import Any

from streamrag.errors import ConfigurationError
from streamrag.routing.affinity import PrefixAffinity
from streamrag.routing.flowguard import FlowGuard, MendedFlowGuard
from streamrag.routing.router import Router
from streamrag.routing.simple import ConsistentHash, PowerOfTwo, RoundRobin, ShortestQueue
from streamrag.routing.soonest import Soonest
from streamrag.support.messages import short

ROUTERS: Mapping[str, Callable[..., Router]] = {
    "soonest": Soonest,
    "round_robin": RoundRobin,
    "power_of_two": PowerOfTwo,
    "shortest_queue": ShortestQueue,
    "consistent_hash": ConsistentHash,
    "prefix_affinity": PrefixAffinity,
    "flowguard": FlowGuard,
    "flowguard_mended": MendedFlowGuard,
}


def make_router(name: str, **options: Any) -> Router:
    """A new router of that name, with nothing in its memory. `options` are those of its class.

    :raises ConfigurationError: there is none of that name, or it has no such option.
    """
    if name not in ROUTERS:
        raise ConfigurationError(f"there is no router {short(name)}; there are {', '.join(ROUTERS)}")
    try:
        return ROUTERS[name](**options)
    except TypeError as error:
        raise ConfigurationError(f"router {name}: {error}") from None
