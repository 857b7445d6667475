"""Who is where: the counts that must be fresh, kept by whoever routes, and what replicas last reported.

routed ─▶ (waits, counted in num_queued) ─first_token─▶ (answers, counted in num_open only) ─ended─▶
"""

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from streamrag.routing.router import ReplicaState


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself every half second or so. Fields as in `ReplicaState`."""

    max_open: int = 1
    kv_usage: float = 0.0
    cache_hit_rate: float = 0.0
    queued_tokens: int = 0
    num_kv_tokens: int = 0
    tokens_per_s: float = 0.0


@dataclass(slots=True)
class _Replica:
    report: Report
    measured_s: float = -inf
    num_queued: int = 0
    num_open: int = 0
    num_new_tokens: int = 0
    state: ReplicaState | None = None
    """What `states` has said of it, until it changes: making a thousand anew takes two milliseconds."""


@dataclass(slots=True)
class _Query:
    replica_id: str
    num_new_tokens: int
    is_queued: bool = True


class Books:
    """Holds an entry for each open query, and one for each replica that is not `lost`.

    Hooks for queries that it does not know, or no longer, do nothing: answers may come in after their replica was lost.
    """

    def __init__(self) -> None:
        self._replicas: dict[str, _Replica] = {}
        self._queries: dict[str, _Query] = {}

    def routed(self, query_id: str, replica_id: str, num_new_tokens: int = 0) -> None:
        """The query went there, where that many tokens are expected to be computed; it leaves where it was before."""
        self.ended(query_id)
        self._queries[query_id] = _Query(replica_id, num_new_tokens)
        replica = self._changing(replica_id)
        replica.num_open += 1
        replica.num_queued += 1
        replica.num_new_tokens += num_new_tokens

    def first_token(self, query_id: str) -> None:
        """The query has shown a token: its prompt is computed. Further calls do nothing."""
        query = self._queries.get(query_id)
        if query is not None and query.is_queued:
            query.is_queued = False
            replica = self._changing(query.replica_id)
            replica.num_queued -= 1
            replica.num_new_tokens -= query.num_new_tokens

    def ended(self, query_id: str) -> None:
        """The query has its answer, failed, or was given up."""
        self.first_token(query_id)
        query = self._queries.pop(query_id, None)
        if query is not None:
            self._changing(query.replica_id).num_open -= 1

    def reported(self, replica_id: str, report: Report, now_s: float) -> None:
        replica = self._changing(replica_id)
        replica.report, replica.measured_s = report, now_s

    def lost(self, replica_id: str) -> tuple[list[str], list[str]]:
        """Forget a replica that is gone. Returns its queries: those that had shown no token, and those that had."""
        there = {name: query for name, query in self._queries.items() if query.replica_id == replica_id}
        for name in there:
            del self._queries[name]
        self._replicas.pop(replica_id, None)
        queued = [name for name, query in there.items() if query.is_queued]
        return queued, [name for name, query in there.items() if not query.is_queued]

    def states(self, replica_ids: Iterable[str]) -> list[ReplicaState]:
        """Those replicas as a router wants them, in that order; one that has never reported is as good as empty."""
        return [self._state(replica_id) for replica_id in replica_ids]

    def _state(self, replica_id: str) -> ReplicaState:
        replica = self._replica(replica_id)
        if replica.state is None:
            replica.state = _state_of(replica_id, replica)
        return replica.state

    def _changing(self, replica_id: str) -> _Replica:
        replica = self._replica(replica_id)
        replica.state = None
        return replica

    def _replica(self, replica_id: str) -> _Replica:
        if replica_id not in self._replicas:
            self._replicas[replica_id] = _Replica(Report())
        return self._replicas[replica_id]


def _state_of(replica_id: str, replica: _Replica) -> ReplicaState:
    report = replica.report
    return ReplicaState(
        replica_id,
        num_queued=replica.num_queued,
        num_open=replica.num_open,
        max_open=report.max_open,
        num_new_tokens=replica.num_new_tokens,
        kv_usage=report.kv_usage,
        cache_hit_rate=report.cache_hit_rate,
        queued_tokens=report.queued_tokens,
        num_kv_tokens=report.num_kv_tokens,
        tokens_per_s=report.tokens_per_s,
        measured_s=replica.measured_s,
    )
