"""The router that Ray Serve calls. A new stream goes to a replica of its ticket's choice, other calls to a named one.

Ray sends this module to its proxies by value, so it has no global state.
"""

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from streamrag.backends.replicas.replica_chooser import ReplicaCandidate
from streamrag.backends.replicas.wire import Open
from streamrag.support.clock import monotonic

log = logging.getLogger("streamrag.ray")

CALLS_PER_STREAM = 3  # most concurrent calls of a stream to its replica: the stream itself, one update, and a draft


def find_named_replica(
    candidate_replicas: list[RunningReplica], pending_request: PendingRequest
) -> list[list[RunningReplica]]:
    """Return the replica that a call names; empty if it is gone. Any other replica returns False for an update."""
    name = next(iter(pending_request.args), None)
    named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
    return [named] if named else []


class StreamRouter(RequestRouter):  # type: ignore[misc]
    """Routes new streams by their tickets, and updates to the replica that they name."""

    def initialize_state(self) -> None:
        """Start without reports, before Ray Serve passes any replicas."""
        self._reports: dict[str, tuple[Any, float]] = {}
        """When each replica's newest stats were made, on its own clock, and when they arrived, on ours."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Record when new stats of each replica arrived, and forget other replicas. Ray Serve calls this when there are
        other replicas or new stats."""
        now_s, before, self._reports = monotonic(), self._reports, {}
        for replica in replicas:
            name, reported_s = replica.replica_id.unique_id, replica.routing_stats.get("reported_s")
            known = before.get(name)
            self._reports[name] = known if known is not None and known[0] == reported_s else (reported_s, now_s)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return the ticket's ranks for a new stream, one replica each, as Serve has its own order within a rank; for
        other calls the named replica; one rank of all replicas if the ticket raises or there is no such replica."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else a full replica is retried without a pause
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        match pending_request.args:
            case [Open(ticket=ticket), *_] if ticket is not None:
                try:
                    candidates = [self._candidate(name, replica) for name, replica in by_id.items()]
                    return [[by_id[name]] for name in ticket.rank(candidates)]
                except Exception:  # Ray would only log it, and the query would wait forever
                    log.exception("the router failed: a query goes to any replica")
        return find_named_replica(candidate_replicas, pending_request) or [candidate_replicas]

    def _candidate(self, name: str, replica: RunningReplica) -> ReplicaCandidate:
        """Return a replica with its stats; `arrived_s` is None for stats that `update_replicas` has not recorded."""
        stats = replica.routing_stats
        reported_s, arrived_s = self._reports.get(name, (None, None))
        arrived_s = arrived_s if reported_s == stats.get("reported_s") else None
        return ReplicaCandidate(name, replica.max_ongoing_requests // CALLS_PER_STREAM, stats, arrived_s)
