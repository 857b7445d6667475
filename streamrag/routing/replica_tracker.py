"""Tracks the state of all replicas: counts that must be fresh are kept by the caller, the rest is from reports.

routed ─▶ (queued: in num_queued and num_open) ─first_token─▶ (answering: in num_open only) ─ended─▶
"""

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from streamrag.routing.router import ReplicaState


@dataclass(frozen=True, slots=True)
class Report:
    """A replica's report of its own state, sent about every half second. For the fields, see `ReplicaState`."""

    max_open: int = 1
    kv_usage: float = 0.0
    cache_hit_rate: float = 0.0
    queued_tokens: int = 0
    num_kv_tokens: int = 0
    tokens_per_s: float = 0.0


REPORTED = tuple(field.name for field in fields(Report))


@dataclass(slots=True)
class _Query:
    replica_id: str
    num_new_tokens: int
    is_queued: bool = True


class ReplicaTracker:
    """Tracks the open queries, and the replicas that are not `lost`.

    Calls about an unknown query do nothing, because answers may arrive after their replica was lost.
    """

    def __init__(self) -> None:
        self._states: dict[str, ReplicaState] = {}
        self._queries: dict[str, _Query] = {}

    def routed(self, query_id: str, replica_id: str, num_new_tokens: int = 0) -> None:
        """Count the query at this replica as open and queued, with `num_new_tokens` to compute, and at no other one."""
        self.ended(query_id)
        self._queries[query_id] = _Query(replica_id, num_new_tokens)
        self._add(replica_id, num_queued=1, num_open=1, num_new_tokens=num_new_tokens)

    def first_token(self, query_id: str) -> None:
        """Record the first token of a query, which is still open, but no longer queued. Further calls do nothing."""
        query = self._queries.get(query_id)
        if query is not None and query.is_queued:
            query.is_queued = False
            self._add(query.replica_id, num_queued=-1, num_new_tokens=-query.num_new_tokens)

    def ended(self, query_id: str) -> None:
        """Remove a query that is answered, failed or cancelled from all counts of its replica."""
        self.first_token(query_id)
        query = self._queries.pop(query_id, None)
        if query is not None:
            self._add(query.replica_id, num_open=-1)

    def reported(self, replica_id: str, report: Report, now_s: float) -> None:
        """Take over a replica's report; the counts that this tracker keeps stay."""
        values = {name: getattr(report, name) for name in REPORTED}
        self._states[replica_id] = replace(self._state(replica_id), measured_s=now_s, **values)

    def lost(self, replica_id: str) -> tuple[list[str], list[str]]:
        """Remove a lost replica and its queries; return the ids of those without a first token, and of the others."""
        lost = {name: query for name, query in self._queries.items() if query.replica_id == replica_id}
        for name in lost:
            del self._queries[name]
        self._states.pop(replica_id, None)
        queued = [name for name, query in lost.items() if query.is_queued]
        return queued, [name for name, query in lost.items() if not query.is_queued]

    def states(self, replica_ids: Iterable[str]) -> list[ReplicaState]:
        """Return the states of these replicas, in order; a replica without a report counts as empty."""
        return [self._state(replica_id) for replica_id in replica_ids]

    def _state(self, replica_id: str) -> ReplicaState:
        return self._states.get(replica_id) or ReplicaState(replica_id)

    def _add(self, replica_id: str, *, num_queued: int = 0, num_open: int = 0, num_new_tokens: int = 0) -> None:
        """Add to the counts of a replica, which may be negative; a replica without a report begins as empty."""
        state = self._state(replica_id)
        self._states[replica_id] = replace(
            state,
            num_queued=state.num_queued + num_queued,
            num_open=state.num_open + num_open,
            num_new_tokens=state.num_new_tokens + num_new_tokens,
        )
