"""Chooses a lane for a query, with a router of `streamrag.routing`, and tracks which lanes have room."""

import asyncio
import logging
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from streamrag.backends.lanes.kv_promises import KvPromises
from streamrag.backends.ray.replica_chooser import ReplicaCandidate, ReplicaChooser
from streamrag.core import Prompt
from streamrag.errors import BackendError, ConfigurationError, EngineDeadError
from streamrag.routing import Router
from streamrag.routing.prefix_index import PrefixIndex
from streamrag.support.clock import monotonic
from streamrag.support.tasks import Broadcast

log = logging.getLogger("streamrag.lanes")


@dataclass(frozen=True, slots=True)
class LaneSeat:
    """The place of a query in a lane, until `Lanes.leave`."""

    lane: str
    backend: Any
    query_id: str


class Lanes:
    """The lanes of one kind.

    lanes: the engines, which run, by name.
    max_open: most queries in a lane at a time, or in each of its replicas, up to `max_num_seqs` of the engine; None for
        lanes with any number of queries, whatever KV these need.
    """

    def __init__(self, lanes: Mapping[str, Any], router: Router, *, max_open: int | None) -> None:
        self._lanes = dict(lanes)
        facts = {name: lane.lane_facts for name, lane in lanes.items()}
        self._max_open = {name: min(max_open, f.max_num_seqs) if max_open else 1 << 30 for name, f in facts.items()}
        self._keys = PrefixIndex(next(iter(facts.values())).block_size).keys
        self._promises = {name: KvPromises(each.num_blocks if max_open else inf) for name, each in facts.items()}
        self._chooser = ReplicaChooser(router, clock=monotonic)
        self._deaths: dict[str, BackendError] = {}  # why lanes died; asking an engine again would read its log again
        self._turn = asyncio.Lock()
        self._num_waiting = 0
        self._left = Broadcast()

    def take_now(self, prompt: Prompt, num_answers: int = 1) -> LaneSeat | None:
        """Take a seat for a query with this prompt; return None while all lanes are full, or others wait.

        :raises BackendError: no lane is alive.
        """
        return None if self._num_waiting else self._take(prompt, num_answers)

    async def take(self, prompt: Prompt, num_answers: int = 1) -> LaneSeat:
        """Wait for a seat, behind those who wait already, and take it.

        :raises BackendError: no lane is alive.
        """
        self._num_waiting += 1
        try:
            async with self._turn:
                while (seat := self._take(prompt, num_answers)) is None:
                    await self._left.wait()
                return seat
        finally:
            self._num_waiting -= 1

    def leave(self, seat: LaneSeat) -> None:
        """Give up a seat, and wake the queries that wait for one. Further calls do nothing."""
        self._chooser.ended(seat.query_id)
        self._promises[seat.lane].remove(seat.query_id)
        self._left.wake()

    def computed(self, seat: LaneSeat, prompt: Prompt) -> None:
        """Record that the lane has computed or fetched this prompt, for the router and for prompts that begin alike."""
        self._chooser.computed(seat.query_id, prompt.token_ids, seat.lane, is_complete=prompt.is_complete)
        self._promises[seat.lane].begin(seat.query_id)
        self._left.wake()  # others may share its blocks, and find replicas that were added

    def alive(self) -> list[str]:
        """Return the names of the lanes whose engine runs. Log each lane that has died, once.

        :raises EngineDeadError: no engine runs.
        """
        for name, backend in self._lanes.items():
            if name not in self._deaths and (error := _death(backend)) is not None:
                self._deaths[name] = error
                log.error("%s has died: %s", name, error)
        if len(self._deaths) == len(self._lanes):
            raise EngineDeadError("; ".join(f"{name}: {self._deaths[name]}" for name in self._lanes))
        return [name for name in self._lanes if name not in self._deaths]

    def _take(self, prompt: Prompt, num_answers: int) -> LaneSeat | None:
        """Take a seat in the best lane that has room. Lanes that are not candidates are forgotten by the router."""
        query_id, keys = uuid.uuid4().hex, self._keys(prompt.token_ids)
        try:
            candidates = [self._candidate(name, keys, num_answers) for name in self.alive()]
        except EngineDeadError as error:
            raise BackendError(f"no lane is left: {error}") from None
        ranked = self._chooser.ticket(query_id, prompt).rank(candidates)
        if not ranked:
            self._chooser.ended(query_id)
            return None
        self._promises[ranked[0]].add(query_id, keys, num_answers)
        return LaneSeat(ranked[0], self._lanes[ranked[0]], query_id)

    def _candidate(self, name: str, keys: Sequence[int], num_answers: int) -> ReplicaCandidate:
        """Return the lane as a candidate for the answers to a prompt of full blocks with these keys."""
        has_room = self._promises[name].has_room(keys, num_answers)
        num_replicas = getattr(self._lanes[name], "num_replicas", None)  # of a lane on Ray
        if num_replicas is None:
            return ReplicaCandidate(name, self._max_open[name], {}, has_room=has_room)
        # A report is taken over if its time is another one.
        stats = {"told_s": num_replicas}
        return ReplicaCandidate(name, self._max_open[name] * num_replicas, stats, has_room=has_room)


def _death(backend: Any) -> BackendError | None:
    """Return why the engine does not run; None if it does."""
    try:
        backend.check_health()
    except BackendError as error:
        return error
    return None


def check_same(facts: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ConfigurationError, with the first difference, if lanes differ. `facts` are what must be equal, by name."""
    first, expected = next(iter(facts.items()))
    for lane, found in facts.items():
        for name in found:
            if found[name] != expected[name]:
                raise ConfigurationError(
                    f"lanes differ in {name}: {expected[name]} in {first}, {found[name]} in {lane}"
                )
