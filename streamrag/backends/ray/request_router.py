"""What Ray Serve asks where a call goes: the ticket that a stream brings along, or the replica that it is in already.

Ray sends this module by value, so it holds nothing that must be one for all.
"""

import logging
from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from streamrag.backends.ray.choosing import Candidate
from streamrag.backends.ray.wire import Open
from streamrag.clock import monotonic

log = logging.getLogger("streamrag.ray")

CALLS_PER_STREAM = 2
"""Most calls that a stream has with its replica at once: itself, and one update."""


def named(candidate_replicas: list[RunningReplica], pending_request: PendingRequest) -> list[list[RunningReplica]]:
    """The replica that a call names. None if it is gone: any other one says so to an update."""
    name = next(iter(pending_request.args), None)
    found = [replica for replica in candidate_replicas if replica.replica_id.unique_id == name]
    return [found] if found else []


class StreamRouter(RequestRouter):  # type: ignore[misc]
    """Opens streams where their tickets say, and sends updates to the replica that is named in them."""

    def initialize_state(self) -> None:
        """Called by Ray Serve, before it says which replicas there are."""
        self._told: dict[str, tuple[Any, float]] = {}
        """By replica: when it told its newest stats, on its own clock, and when they came, on ours."""

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray Serve when there are other replicas, or one has told something; stats are dated here."""
        now_s, before, self._told = monotonic(), self._told, {}
        for replica in replicas:
            name, told_s = replica.replica_id.unique_id, replica.routing_stats.get("told_s")
            known = before.get(name)
            self._told[name] = known if known is not None and known[0] == told_s else (told_s, now_s)
        super().update_replicas(replicas)

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
                try:
                    candidates = [self._candidate(name, replica) for name, replica in by_id.items()]
                    return [[by_id[name]] for name in ticket.rank(candidates)]
                except Exception:  # Ray would log it too, and the query wait for ever
                    log.exception("the router failed: a query goes to any replica")
        return named(candidate_replicas, pending_request) or [candidate_replicas]

    def _candidate(self, name: str, replica: RunningReplica) -> Candidate:
        stats = replica.routing_stats
        told_s, came_s = self._told.get(name, (None, None))
        came_s = came_s if told_s == stats.get("told_s") else None
        return Candidate(name, replica.max_ongoing_requests // CALLS_PER_STREAM, stats, came_s)


class OfStreams(RequestRouter):  # type: ignore[misc]
    """What comes first in the bases of a router of Ray's: only calls that open a stream are its own to send.

    Updates go to the replica that they name, and so does what tells a replica that its caller lives. Ray's router for
    prefixes raises on a call that has no prompt, and Serve then never answers it.
    """

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """As the router of Ray's for a stream that is opened."""
        if pending_request is None:
            return [candidate_replicas]
        pending_request.routing_context.should_backoff = True  # else a full replica is asked again without a pause
        if isinstance(next(iter(pending_request.args), None), Open):
            chosen: list[list[RunningReplica]] = await super().choose_replicas(candidate_replicas, pending_request)
            return chosen
        return named(candidate_replicas, pending_request) or [candidate_replicas]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: Any, result: Any) -> None:
        """Tells the router of Ray's where a stream went, and nothing of its further calls."""
        if isinstance(next(iter(pending_request.args), None), Open):
            super().on_request_routed(pending_request, replica_id, result)
