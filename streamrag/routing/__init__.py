"""Routers choose the replica of an engine for a query. They are pure: no clock, no network, no Ray."""

from collections.abc import Callable, Mapping
from typing import Any

from streamrag.errors import ConfigurationError
from streamrag.routing.replica_tracker import ReplicaTracker as ReplicaTracker
from streamrag.routing.replica_tracker import Report as Report
from streamrag.routing.router import ConsistentHash, RoundRobin
from streamrag.routing.router import Opening as Opening
from streamrag.routing.router import ReplicaState as ReplicaState
from streamrag.routing.router import Router as Router
from streamrag.routing.soonest import Soonest
from streamrag.support.messages import short_repr

ROUTERS: Mapping[str, Callable[..., Router]] = {
    "soonest": Soonest,
    "round_robin": RoundRobin,
    "consistent_hash": ConsistentHash,
}


def make_router(name: str, **options: Any) -> Router:
    """Return a new router of the class `ROUTERS[name]`. `options` are those of its class.

    :raises ConfigurationError: there is no router of this name, or it has no such option.
    """
    if name not in ROUTERS:
        raise ConfigurationError(f"there is no router {short_repr(name)}; there are {', '.join(ROUTERS)}")
    try:
        return ROUTERS[name](**options)
    except TypeError as error:
        raise ConfigurationError(f"router {name}: {error}") from None
