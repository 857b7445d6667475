"""What Ray Serve asks where a call goes: the ticket that a stream brings along, or the replica that it is in already.

Ray sends this module by value, so it holds nothing that must be one for all.
"""

import logging

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from streamrag.backends.ray.choosing import Candidate
from streamrag.backends.ray.wire import Open

log = logging.getLogger("streamrag.ray")

CALLS_PER_STREAM = 2
"""Most calls that a stream has with its replica at once: itself, and one update."""


class StreamRouter(RequestRouter):  # type: ignore[misc]
    """Opens streams where their tickets say, and sends updates to the replica that is named in them."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """One replica in each rank: Serve takes the shortest queue of a rank, whatever we would rather have."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else a full replica is asked again without a pause
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        match pending_request.args:
            case [Open(ticket=ticket), *_] if ticket is not None:
                candidates = [
                    Candidate(name, replica.max_ongoing_requests // CALLS_PER_STREAM, replica.routing_stats)
                    for name, replica in by_id.items()
                ]
                try:
                    return [[by_id[name]] for name in ticket.rank(candidates)]
                except Exception:  # Ray would log it too, and the query wait for ever
                    log.exception("the router failed: a query goes to any replica")
            case [str(name), *_] if name in by_id:
                return [[by_id[name]]]
        return [candidate_replicas]  # of an update to a replica that is gone, any other one says so
