"""Calls and replicas as Ray Serve's routers see them."""

from types import SimpleNamespace
from typing import Any


def replica_of_ray(name: str, **stats: float) -> SimpleNamespace:
    return SimpleNamespace(replica_id=SimpleNamespace(unique_id=name), max_ongoing_requests=6, routing_stats=stats)


def call_of(*args: object) -> SimpleNamespace:
    return SimpleNamespace(args=args, routing_context=SimpleNamespace())


def router_of(kind: type) -> Any:
    """As Ray makes it, but for what that needs of a cluster."""
    router = object.__new__(kind)
    router.initialize_state()
    return router
