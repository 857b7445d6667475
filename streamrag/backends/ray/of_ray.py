"""Ray Serve's own routers for streams, to compare with: they choose by a stream's first prompt, as for one request.

They know nothing of books, so `replicas.router` counts for nothing beside them. Ray sends this module by value.
"""

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter

from streamrag.backends.ray.request_router import OfStreams


class PowerOfTwo(OfStreams, PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Ray Serve's default."""


class PrefixAffinity(OfStreams, PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray Serve's for language models, as it comes: with no limit to imbalance."""
