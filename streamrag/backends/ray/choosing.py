"""Which replica a stream goes to: a router of `streamrag.routing`, and the books that it asks for.

Whoever opens a stream gives it a ticket; the code that sends it asks the ticket, in whatever thread that runs.
"""

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from math import inf
from typing import Any, TypeVar

from streamrag.clock import Clock
from streamrag.core import Prompt
from streamrag.propagation import conversation
from streamrag.routing import Books, Opening, Report, Router

log = logging.getLogger("streamrag.ray")

T = TypeVar("T")

REPORTED = tuple(field.name for field in fields(Report))


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that may be chosen, and the stats that it last told."""

    id: str
    max_open: int
    """Most streams that it takes at once."""
    stats: Mapping[str, Any]
    """Empty until it has told."""
    came_s: float | None = None
    """When these stats came, on the clock of whoever routes; None takes them to have come just now."""


class Choosing:
    """A router and its books; everything may be called from any thread."""

    def __init__(self, router: Router, *, clock: Clock) -> None:
        self._router = router
        self._clock = clock
        self._books = Books()
        self._where: dict[str, str | None] = {}
        """The replica of each open stream; None until it has one."""
        self._told_s: dict[str, Any] = {}
        """By each replica that is there, when it told what the books have of it, on its own clock."""
        self._dead: set[str] = set()
        """Replicas that are still there, and whose engine has died."""
        self._lock = threading.Lock()

    def ticket(self, stream_id: str, first: Prompt) -> "Ticket":
        """For a stream that is about to be opened; to be made in its query's own task. It is open until `ended`."""
        with self._lock:
            self._where[stream_id] = None
        return Ticket(self, stream_id, Opening(first.token_ids, first.source_name, conversation.get()))

    def rank(self, stream_id: str, opening: Opening, candidates: Sequence[Candidate]) -> list[str]:
        """Ids of the replicas that it may go to, best first; none while all have as many streams as they take."""
        with self._lock:
            self._follow(candidates)
            states = self._books.states(each.id for each in candidates if each.id not in self._dead)
            free = [state for state in states if state.num_open < state.max_open]
            ranked = self._router.rank(opening, free, self._clock())
            if ranked and stream_id in self._where:  # counted at once: others are routed before it has arrived
                self._route(stream_id, opening, ranked[0])
            return ranked

    def went_to(self, stream_id: str, opening: Opening, replica_id: str) -> None:
        """Where it is now: not always the best, which may have had no room."""
        with self._lock:
            if self._where.get(stream_id, replica_id) != replica_id:  # it may have ended meanwhile
                self._route(stream_id, opening, replica_id)

    def computed(self, stream_id: str, token_ids: Sequence[int], replica_id: str) -> None:
        """It has shown a token, so this prompt is computed."""
        with self._lock:
            self._books.first_token(stream_id)
            if replica_id in self._told_s:
                self._tell(self._router.completed, token_ids, replica_id)

    def prefilled(self, stream_id: str, token_ids: Sequence[int], replica_id: str) -> None:
        """This prompt, which is kept there for others, is computed; the stream waits for more of it."""
        with self._lock:
            self._books.first_token(stream_id)
            if replica_id in self._told_s:
                self._tell(self._router.prefilled, token_ids, replica_id)

    def in_use(self) -> set[str]:
        """Replicas that have streams of ours."""
        with self._lock:
            return {replica_id for replica_id in self._where.values() if replica_id is not None}

    def ended(self, stream_id: str) -> None:
        """It has its answer, failed, or was given up."""
        with self._lock:
            self._where.pop(stream_id, None)
            self._books.ended(stream_id)

    def died(self, replica_id: str) -> None:
        """That replica answers no more."""
        with self._lock:
            self._dead.add(replica_id)
            self._forget([replica_id])

    def _route(self, stream_id: str, opening: Opening, replica_id: str) -> None:
        self._where[stream_id] = replica_id
        self._books.routed(stream_id, replica_id, self._tell(self._router.routed, opening, replica_id) or 0)

    def _tell(self, tell: Callable[..., T], *args: Any) -> T | None:
        """Tell the router something. If it fails, no query fails with it: it may only choose worse from then on."""
        try:
            return tell(*args)
        except Exception:
            log.exception("the router failed to hear of a query or a replica")
            return None

    def _follow(self, candidates: Sequence[Candidate]) -> None:
        there = {each.id for each in candidates}
        self._forget([replica_id for replica_id in self._told_s if replica_id not in there])
        self._dead &= there
        for each in candidates:
            told_s = each.stats.get("told_s")
            if each.id not in self._told_s or told_s != self._told_s[each.id]:
                self._told_s[each.id] = told_s
                told = {name: each.stats[name] for name in REPORTED if name in each.stats}  # versions may differ
                report = Report(**{"max_open": each.max_open, **told})
                came_s = self._clock() if each.came_s is None else each.came_s
                self._books.reported(each.id, report, -inf if told_s is None else came_s)

    def _forget(self, replica_ids: Iterable[str]) -> None:
        for replica_id in replica_ids:
            self._told_s.pop(replica_id, None)
            self._books.lost(replica_id)
            self._tell(self._router.lost, replica_id)


@dataclass(frozen=True, slots=True)
class Ticket:
    """What the code that sends a stream asks."""

    choosing: Choosing
    stream_id: str
    opening: Opening

    def rank(self, candidates: Sequence[Candidate]) -> list[str]:
        """See `Choosing.rank`."""
        return self.choosing.rank(self.stream_id, self.opening, candidates)

    def went_to(self, replica_id: str) -> None:
        """See `Choosing.went_to`."""
        self.choosing.went_to(self.stream_id, self.opening, replica_id)
