"""Engines in replicas that Ray Serve starts, restarts and scales. Retrieval, sessions and HTTP stay with the caller.

    pipeline ──▶ backend ──▶ replica_streams ──▶ request_router ── Ray ──▶ replica ──▶ an engine

`replica_streams` and `replica` are those of `backends.replicas`.
"""

from typing import TYPE_CHECKING

from streamrag.support.lazy_imports import attributes

if TYPE_CHECKING:
    from streamrag.backends.ray.backend import RayBackend as RayBackend
else:  # imported on first use: Ray takes a second to import, and may be missing
    __getattr__ = attributes(__name__, {"RayBackend": "streamrag.backends.ray.backend"})
