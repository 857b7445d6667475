"""Ray Serve's own routers for streams, to compare with: they choose by a stream's first prompt, as for one request.

They know nothing of what `replicas.router` knows, which counts for nothing beside them. Ray sends this module by value.
"""

from typing import Any

from ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router import PrefixCacheAffinityRouter
from ray.serve._private.request_router.pow_2_router import PowerOfTwoChoicesRequestRouter
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from streamrag.backends.ray.request_router import find_named_replica
from streamrag.backends.ray.wire import Open


class StreamsOnly(RequestRouter):  # type: ignore[misc]
    """The first base of a router of Ray's: only calls that open a stream are its own to send.

    Updates go to the replica that they name, and so does what tells a replica that its caller lives. Ray's router for
    prefixes raises on a call that has no prompt, and Serve then never answers it.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ask the router of Ray's about a stream that is opened."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else a full replica is asked again without a pause
        if isinstance(next(iter(pending_request.args), None), Open):
            ranks: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
            return ranks
        return find_named_replica(candidate_replicas, pending_request) or [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Tell the router of Ray's where a stream went, and nothing of its further calls."""
        if isinstance(next(iter(pending_request.args), None), Open):
            super().on_request_routed(pending_request, replica_id, result)


class PowerOfTwo(StreamsOnly, PowerOfTwoChoicesRequestRouter):  # type: ignore[misc]
    """Ray Serve's default."""


class PrefixAffinity(StreamsOnly, PrefixCacheAffinityRouter):  # type: ignore[misc]
    """Ray Serve's for language models, as it comes: with no limit to imbalance."""

    def _extract_text_from_request(self, pending_request: PendingRequest) -> str:
        """Return the first prompt, a character a token."""
        first = pending_request.args[0].first.apply_to(())
        return "".join(chr(token_id % 0xD800) for token_id in first.token_ids)
