"""Engines in replicas that Ray Serve starts, restarts and scales. Retrieval, sessions and HTTP stay with the caller.

    pipeline ──▶ backend ──▶ replica_streams ──▶ connection, request_router ── Ray ──▶ replica ──▶ an engine
                                 │ ticket
                           replica_chooser ──▶ streamrag.routing

`replica_streams`, `replica_chooser`, `replica` and `wire` do not depend on Ray.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from streamrag.backends.ray.backend import RayBackend as RayBackend


def __getattr__(name: str) -> Any:
    """Import the backend on first use, because Ray takes a second to import and may not be installed."""
    if name != "RayBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from streamrag.backends.ray.backend import RayBackend

    return RayBackend
