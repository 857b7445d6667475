"""Chooses the replica of a stream, with a router of `streamrag.routing`, and tracks the state that the router needs.

The code that opens a stream gives it a ticket. The code that sends the stream, in any thread, asks the ticket.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, TypeVar

from streamrag.core import Prompt
from streamrag.routing import Opening, ReplicaTracker, Report, Router
from streamrag.routing.replica_tracker import REPORTED
from streamrag.support.clock import Clock

log = logging.getLogger("streamrag.ray")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaCandidate:
    """A replica that may be chosen, and its last stats."""

    id: str
    max_open: int  # most concurrent streams that it accepts
    stats: Mapping[str, Any]  # empty before its first report
    arrived_s: float | None = None  # time at which the stats arrived, on the caller's clock; None if just now
    has_room: bool = True  # whether other limits than `max_open` allow this stream


class ReplicaChooser:
    """A router, and the state of its replicas. Thread-safe."""

    def __init__(self, router: Router, *, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._tracker = ReplicaTracker()
        self._replica_of: dict[str, str | None] = {}  # the replica of each open stream; None until it is routed
        self._reported_s: dict[str, Any] = {}  # time of each known replica's last stats, on the replica's clock
        self._dead: set[str] = set()  # replicas that still exist, but whose engine has died
        self._lock = threading.Lock()

    def ticket(self, stream_id: str, first: Prompt) -> "Ticket":
        """Create a ticket. The stream counts as open until `record_ended`."""
        with self._lock:
            self._replica_of[stream_id] = None
        return Ticket(self, stream_id, Opening(first.token_ids, first.source_name, first.conversation_id or None))

    def rank(self, stream_id: str, opening: Opening, candidates: Sequence[ReplicaCandidate]) -> list[str]:
        """Return the ids of the replicas that have room for the stream, best first; empty while all are full. Take in
        the candidates' new stats, and count an open stream at the best."""
        with self._lock:
            self._update_candidates(candidates)
            states = self._tracker.states(each.id for each in candidates if each.id not in self._dead)
            full = {each.id for each in candidates if not each.has_room}
            free = [state for state in states if state.num_open < state.max_open and state.id not in full]
            ranked = self._router.rank(opening, free, self._clock())
            if ranked and stream_id in self._replica_of:  # count it now: others are routed before the replica answers
                self._route(stream_id, opening, ranked[0])
            return ranked

    def record_opened(self, stream_id: str, opening: Opening, replica_id: str) -> None:
        """Count the stream, if it is open, at the replica that accepted it, which may not be the best one."""
        with self._lock:
            if self._replica_of.get(stream_id, replica_id) != replica_id:  # the stream may have ended
                self._route(stream_id, opening, replica_id)

    def record_computed(
        self, stream_id: str, token_ids: Sequence[int], replica_id: str, *, is_complete: bool = True
    ) -> None:
        """Record that a prompt is computed: the stream is no longer queued, and a known replica has the prompt's KV.

        The router records the KV as that of a complete prompt or, without `is_complete`, as prefilled.
        """
        with self._lock:
            self._tracker.first_token(stream_id)
            if replica_id in self._reported_s:
                record = self._router.completed if is_complete else self._router.prefilled
                self._call_router(record, token_ids, replica_id)

    @property
    def num_replicas(self) -> int:
        """Number of replicas when a stream was last routed; 0 before the first."""
        with self._lock:
            return len(self._reported_s)

    def in_use(self) -> set[str]:
        """Return the replicas that have streams of this caller."""
        with self._lock:
            return {replica_id for replica_id in self._replica_of.values() if replica_id is not None}

    def record_ended(self, stream_id: str) -> None:
        """Record that the stream was answered, failed or was cancelled."""
        with self._lock:
            self._replica_of.pop(stream_id, None)
            self._tracker.ended(stream_id)

    def record_dead(self, replica_id: str) -> None:
        """Record that the replica does not answer any more."""
        with self._lock:
            self._dead.add(replica_id)
            self._forget([replica_id])

    def _route(self, stream_id: str, opening: Opening, replica_id: str) -> None:
        self._replica_of[stream_id] = replica_id
        self._tracker.routed(stream_id, replica_id, self._call_router(self._router.routed, opening, replica_id) or 0)

    def _call_router(self, method: Callable[..., T], *args: Any) -> T | None:
        """Return what a method of the router returns; if the method raises, log the error and return None."""
        try:
            return method(*args)
        except Exception:  # a router may be third-party code
            log.exception("the router failed to process an event of a query or a replica")
            return None

    def _update_candidates(self, candidates: Sequence[ReplicaCandidate]) -> None:
        """Forget replicas that are no candidates, and give the tracker the stats that are new by their `reported_s`."""
        ids = {each.id for each in candidates}
        self._forget([replica_id for replica_id in self._reported_s if replica_id not in ids])
        self._dead &= ids
        for each in candidates:
            reported_s = each.stats.get("reported_s")
            if each.id not in self._reported_s or reported_s != self._reported_s[each.id]:
                self._reported_s[each.id] = reported_s
                known = {name: each.stats[name] for name in REPORTED if name in each.stats}  # versions may differ
                report = Report(**{"max_open": each.max_open, **known})
                arrived_s = self._clock() if each.arrived_s is None else each.arrived_s
                self._tracker.reported(each.id, report, -inf if reported_s is None else arrived_s)

    def _forget(self, replica_ids: Iterable[str]) -> None:
        """Remove replicas from the tracker, with the queries that it counts there, and from the router."""
        for replica_id in replica_ids:
            self._reported_s.pop(replica_id, None)
            self._tracker.lost(replica_id)
            self._call_router(self._router.lost, replica_id)


@dataclass(frozen=True, slots=True)
class Ticket:
    """A stream's part of a `ReplicaChooser`, for the code that sends the stream."""

    chooser: ReplicaChooser
    stream_id: str
    opening: Opening

    def rank(self, candidates: Sequence[ReplicaCandidate]) -> list[str]:
        return self.chooser.rank(self.stream_id, self.opening, candidates)

    def record_opened(self, replica_id: str) -> None:
        self.chooser.record_opened(self.stream_id, self.opening, replica_id)


@dataclass(frozen=True, slots=True)
class DraftTicket:
    """A draft's ticket to the replica of its query, whose KV the draft shares. The router never hears of drafts."""

    replica_id: str

    def rank(self, candidates: Sequence[ReplicaCandidate]) -> list[str]:
        return [each.id for each in candidates if each.id == self.replica_id]

    def record_opened(self, replica_id: str) -> None:
        """Record nothing, as the router does not count drafts."""
