"""Chooses a lane for a query, with a router of `streamrag.routing`, and tracks which lanes have room."""

import asyncio
import logging
import sys
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from streamrag.backends.replicas.replica_chooser import ReplicaCandidate, ReplicaChooser
from streamrag.core import Prompt
from streamrag.errors import BackendError, ConfigurationError, EngineDeadError
from streamrag.routing import Router
from streamrag.routing.prefix_index import PrefixIndex
from streamrag.support.clock import monotonic
from streamrag.support.tasks import Broadcast

log = logging.getLogger("streamrag.lanes")

Block: TypeAlias = tuple[int, str]
"""The key of a full block, and the id of the query that reserved it first."""


@dataclass(frozen=True, slots=True)
class LaneReservation:
    """Room in a lane for a query, until `Lanes.release`."""

    lane: str
    backend: Any
    query_id: str


class Lanes:
    """The lanes of one kind.

    lanes: the backends of the lanes by name, which have started.
    max_open: most queries in a lane at a time, or in each of its replicas, up to `max_num_seqs` of the engine. With
        None, neither the number of queries nor their KV is limited.
    """

    def __init__(self, lanes: Mapping[str, Any], router: Router, *, max_open: int | None) -> None:
        self._lanes = dict(lanes)
        facts = {name: lane.lane_facts for name, lane in lanes.items()}
        self._max_open = {name: min(max_open, f.max_num_seqs) if max_open else sys.maxsize for name, f in facts.items()}
        self._blocks = {name: ReservedBlocks(f.num_blocks if max_open else sys.maxsize) for name, f in facts.items()}
        self._block_keys = PrefixIndex(next(iter(facts.values())).block_size).keys
        self._chooser = ReplicaChooser(router, clock=monotonic)
        self._deaths: dict[str, BackendError] = {}  # why lanes died; asking an engine again would read its log again
        self._queue = asyncio.Lock()  # first in, first out
        self._num_waiting = 0
        self._room_change = Broadcast()

    def try_reserve(self, prompt: Prompt, num_answers: int = 1) -> LaneReservation | None:
        """Reserve room in a lane for a query with this prompt; return None if no lane has room, or other queries wait.

        :raises BackendError: no lane is alive.
        """
        return None if self._num_waiting else self._reserve(prompt, num_answers)

    async def reserve(self, prompt: Prompt, num_answers: int = 1) -> LaneReservation:
        """Wait until a lane has room and all queries that wait already have theirs, and reserve it.

        :raises BackendError: no lane is alive.
        """
        self._num_waiting += 1
        try:
            async with self._queue:
                while (reservation := self._reserve(prompt, num_answers)) is None:
                    await self._room_change.wait()
                return reservation
        finally:
            self._num_waiting -= 1

    def release(self, reservation: LaneReservation) -> None:
        """Release the room, and wake the queries that wait. Further calls do nothing."""
        self._chooser.record_ended(reservation.query_id)
        self._blocks[reservation.lane].release(reservation.query_id)
        self._room_change.wake()

    def record_computed(self, reservation: LaneReservation, prompt: Prompt) -> None:
        """Record that the lane has computed or fetched this prompt, for the router and for prompts that begin alike."""
        query_id, lane = reservation.query_id, reservation.lane
        self._chooser.record_computed(query_id, prompt.token_ids, lane, is_complete=prompt.is_complete)
        self._blocks[lane].share(query_id)
        self._room_change.wake()  # others may share its blocks, and find replicas that were added

    def find_alive(self) -> list[str]:
        """Return the names of the lanes whose engine runs. Log each lane that has died, once.

        :raises EngineDeadError: no engine runs.
        """
        for name, backend in self._lanes.items():
            if name not in self._deaths and (error := _why_dead(backend)) is not None:
                self._deaths[name] = error
                log.error("%s has died: %s", name, error)
        if len(self._deaths) == len(self._lanes):
            raise EngineDeadError("; ".join(f"{name}: {self._deaths[name]}" for name in self._lanes))
        return [name for name in self._lanes if name not in self._deaths]

    def _reserve(self, prompt: Prompt, num_answers: int) -> LaneReservation | None:
        """Reserve room in the best lane that has room. The router forgets lanes that are dead."""
        query_id, keys = uuid.uuid4().hex, self._block_keys(prompt.token_ids)
        try:
            candidates = [self._candidate(name, keys, num_answers) for name in self.find_alive()]
        except EngineDeadError as error:
            raise BackendError(f"no lane is left: {error}") from None
        ranked = self._chooser.ticket(query_id, prompt).rank(candidates)
        if not ranked:
            self._chooser.record_ended(query_id)
            return None
        self._blocks[ranked[0]].reserve(query_id, keys, num_answers)
        return LaneReservation(ranked[0], self._lanes[ranked[0]], query_id)

    def _candidate(self, name: str, keys: Sequence[int], num_answers: int) -> ReplicaCandidate:
        """Return the lane as a candidate for the answers to a prompt of full blocks with these keys."""
        has_room = self._blocks[name].has_room(keys, num_answers)
        num_replicas = getattr(self._lanes[name], "num_replicas", None)  # of a lane on Ray
        # The chooser takes in `max_open` only with a new report, which it recognizes by its time.
        stats: dict[str, Any] = {} if num_replicas is None else {"reported_s": num_replicas}
        return ReplicaCandidate(name, self._max_open[name] * (num_replicas or 1), stats, has_room=has_room)


def _why_dead(backend: Any) -> BackendError | None:
    """Return why the engine does not run; None if it does."""
    try:
        backend.check_health()
    except BackendError as error:
        return error
    return None


def check_common(facts: Mapping[str, Mapping[str, str]]) -> None:
    """Raise ConfigurationError if lanes differ in `LaneFacts.common`, which `facts` has by the names of lanes."""
    first, expected = next(iter(facts.items()))
    for lane, found in facts.items():
        for name in found:
            if found[name] != expected[name]:
                raise ConfigurationError(
                    f"lanes differ in {name}: {expected[name]} in {first}, {found[name]} in {lane}"
                )


class ReservedBlocks:
    """The reserved KV blocks of one lane, which has `num_blocks`.

    vLLM reports the use of its blocks only after a step, and knows a query only once its prompt is computed elsewhere.
    So we count. A query shares blocks with those that answered when it reserved its own: vLLM caches blocks that it
    loads only once all of a query's have come, so queries that load the same beginning at the same time each have a
    copy.

    The prompt of a query is given as the keys of its full blocks. For the rest, each answer needs a block of its own.
    """

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._num_queries_with: Counter[Block] = Counter()
        self._blocks_of: dict[str, list[Block]] = {}  # by open query
        self._num_answers_of: dict[str, int] = {}  # by open query
        self._shareable: dict[int, Block] = {}  # by key, of queries that answer

    def has_room(self, keys: Sequence[int], num_answers: int) -> bool:
        """Whether a query's blocks fit beside the reserved ones. Without open queries, every prompt fits."""
        num_new = sum(key not in self._shareable for key in keys) + num_answers
        num_reserved = len(self._num_queries_with) + sum(self._num_answers_of.values())
        return not self._blocks_of or num_reserved + num_new <= self._num_blocks

    def reserve(self, query_id: str, keys: Sequence[int], num_answers: int) -> None:
        """Reserve the blocks of a query."""
        self._blocks_of[query_id] = [self._shareable.get(key, (key, query_id)) for key in keys]
        self._num_queries_with.update(self._blocks_of[query_id])
        self._num_answers_of[query_id] = num_answers

    def share(self, query_id: str) -> None:
        """Let later queries share the blocks of a query, which now answers. Do nothing if none are reserved for it."""
        for block in self._blocks_of.get(query_id, ()):
            self._shareable.setdefault(block[0], block)

    def release(self, query_id: str) -> None:
        """Release the blocks of a query. Do nothing if none are reserved for it."""
        self._num_answers_of.pop(query_id, None)
        for block in self._blocks_of.pop(query_id, ()):
            self._num_queries_with[block] -= 1
            if not self._num_queries_with[block]:
                del self._num_queries_with[block]
                if self._shareable.get(block[0]) == block:
                    del self._shareable[block[0]]
