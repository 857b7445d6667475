"""Engines in replicas that Ray Serve starts, restarts and scales. Retrieval, sessions and HTTP stay with the caller.

    pipeline ──▶ backend ──▶ replica_streams ──▶ connection, request_router ── Ray ──▶ replica ──▶ an engine
                                 │ ticket
                           replica_chooser ──▶ streamrag.routing

`replica_streams`, `replica_chooser`, `replica` and `wire` do not depend on Ray.
"""

from typing import TYPE_CHECKING

from streamrag.support.lazy_imports import public_names

if TYPE_CHECKING:
    from streamrag.backends.ray.backend import RayBackend as RayBackend

if not TYPE_CHECKING:  # Ray takes a second to import, and may not be installed
    __all__, __getattr__ = public_names(__name__)
