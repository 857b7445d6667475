"""The router that Ray Serve asks where a call goes: where a new stream's ticket says, or to the replica that is named.

Ray sends this module by value, so it holds nothing that must be one for all.
"""

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from streamrag.backends.ray.replica_chooser import Candidate
from streamrag.backends.ray.wire import Open
from streamrag.support.clock import monotonic

log = logging.getLogger("streamrag.ray")

CALLS_PER_STREAM = 2
"""Most calls that a stream has with its replica at once: itself, and one update."""


def named_replica(
    candidate_replicas: list[RunningReplica], pending_request: PendingRequest
) -> list[list[RunningReplica]]:
    """Return the replica that a call names; none if it is gone. Any other replica says so to an update."""
    name = next(iter(pending_request.args), None)
    named = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
    return [named] if named else []


class StreamRouter(RequestRouter):  # type: ignore[misc]
    """Opens streams where their tickets say, and sends updates to the replica that is named in them."""

    def initialize_state(self) -> None:
        """Called by Ray Serve, before it says which replicas there are."""
        self._reports: dict[str, tuple[Any, float]] = {}
        """Times of each replica's newest stats: when they were made, on its own clock, and when they came, on ours."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve when there are other replicas, or new stats of one; stats are dated here."""
        now_s, before, self._reports = monotonic(), self._reports, {}
        for replica in replicas:
            name, told_s = replica.replica_id.unique_id, replica.routing_stats.get("told_s")
            known = before.get(name)
            self._reports[name] = known if known is not None and known[0] == told_s else (told_s, now_s)
        super().update_replicas(replicas)

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return one replica in each rank: Serve takes the shortest queue of a rank, whatever we would rather have."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else a full replica is asked again without a pause
        by_id = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        match pending_request.args:
            case [Open(ticket=ticket), *_] if ticket is not None:
                try:
                    candidates = [self._candidate(name, replica) for name, replica in by_id.items()]
                    return [[by_id[name]] for name in ticket.rank(candidates)]
                except Exception:  # Ray would log it too, and the query wait for ever
                    log.exception("the router failed: a query goes to any replica")
        return named_replica(candidate_replicas, pending_request) or [candidate_replicas]

    def _candidate(self, name: str, replica: RunningReplica) -> Candidate:
        stats = replica.routing_stats
        told_s, came_s = self._reports.get(name, (None, None))
        came_s = came_s if told_s == stats.get("told_s") else None
        return Candidate(name, replica.max_ongoing_requests // CALLS_PER_STREAM, stats, came_s)
