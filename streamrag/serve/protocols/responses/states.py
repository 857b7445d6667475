"""Stored responses, for `previous_response_id` and for clients that fetch a response again."""

import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from streamrag.core import Turn
from streamrag.serve.failures import RequestError
from streamrag.serve.limits import Limits

TURN_BYTES = 200  # memory of a turn without its text: the object, and its reference count


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A response, and the conversation up to its end, without its instructions."""

    id: str
    response: bytes  # The response as JSON. As objects, a client's fields would take up to thirty times as much memory.
    turns: tuple[Turn, ...]
    brings_context: bool  # whether part of the conversation was prepared, so that its answers need no retrieval

    @property
    def own_bytes(self) -> int:
        """Memory that the state takes besides its turns."""
        return sys.getsizeof(self.response) + sys.getsizeof(self.turns)


class StateStore:
    """An LRU cache of states, with limits. It evicts from the client with the most, so no client can evict another's.

    States are private to their client. States with `store=false` are private to their connection.

    clock: a monotonic clock, in seconds.
    """

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._clients: dict[str, _ClientStates] = {}

    @property
    def num_states(self) -> int:
        """Number of stored states."""
        return sum(len(each.states) for each in self._clients.values())

    @property
    def num_bytes(self) -> int:
        """Memory that the states take."""
        return sum(each.num_bytes for each in self._clients.values())

    def add(self, state: State, client: str, connection: object = None) -> None:
        """Store a state for a client, or for its connection only, and evict expired and excess states."""
        self._clients.setdefault(client, _ClientStates()).add((connection, state.id), state, self._clock())
        for each in list(self._clients):
            self._expire(each)
        while self.num_states > self._limits.max_states:
            self._evict_from(max(self._clients, key=lambda each: len(self._clients[each].states)))
        while self.num_bytes > self._limits.max_state_bytes:
            self._evict_from(max(self._clients, key=lambda each: self._clients[each].num_bytes))

    def get(self, id: str, client: str, connection: object = None) -> State:
        """Return a state of a client or of its connection. Raises RequestError if there is none or it has expired."""
        self._expire(client)
        if (own := self._clients.get(client)) is not None:
            for key in ((None, id), (connection, id)):
                if key in own.states:
                    return own.use(key, self._clock())
        message = f"there is no response {id!r:.80}; it may have expired"
        raise RequestError(message, status=404, code="response_not_found")

    def previous(self, id: str | None, client: str, connection: object = None) -> State | None:
        """Return the state that a request continues, if it names one. Raises RequestError if there is no such state."""
        try:
            return None if id is None else self.get(id, client, connection)
        except RequestError as error:
            code, param = "previous_response_not_found", "previous_response_id"
            raise RequestError(str(error), status=404, code=code, param=param) from None

    def delete(self, id: str, client: str) -> None:
        """Remove a state of a client. Responses that continued it keep their conversation."""
        self.get(id, client)
        self._remove(client, (None, id))

    def forget(self, client: str, connection: object) -> None:
        """Remove all states of a connection."""
        if client in self._clients:
            for key in [key for key in self._clients[client].states if key[0] is connection]:
                self._remove(client, key)

    def _expire(self, client: str) -> None:
        oldest_s = self._clock() - self._limits.state_s
        while client in self._clients and self._clients[client].first_used_s <= oldest_s:
            self._evict_from(client)

    def _evict_from(self, client: str) -> None:
        self._remove(client, next(iter(self._clients[client].states)))

    def _remove(self, client: str, key: "_Key") -> None:
        own = self._clients[client]
        own.remove(key)
        if not own.states:
            del self._clients[client]


_Key = tuple[object, str]  # a state's connection, or None, and its id


class _ClientStates:
    """The states of one client, least recently used first, and their memory."""

    def __init__(self) -> None:
        self.states: OrderedDict[_Key, tuple[State, float]] = OrderedDict()  # each state with its time of last use
        self.num_bytes = 0
        self._turns: Counter[int] = Counter()  # reference counts by identity: the states of a chain share turns

    @property
    def first_used_s(self) -> float:
        return next(iter(self.states.values()))[1]

    def add(self, key: _Key, state: State, now_s: float) -> None:
        self.states[key] = state, now_s
        for turn in state.turns:
            if not self._turns[id(turn)]:
                self.num_bytes += TURN_BYTES + sys.getsizeof(turn.text)
            self._turns[id(turn)] += 1
        self.num_bytes += state.own_bytes

    def use(self, key: _Key, now_s: float) -> State:
        state, _ = self.states.pop(key)
        self.states[key] = state, now_s
        return state

    def remove(self, key: _Key) -> None:
        state, _ = self.states.pop(key)
        for turn in state.turns:
            self._turns[id(turn)] -= 1
            if not self._turns[id(turn)]:
                del self._turns[id(turn)]
                self.num_bytes -= TURN_BYTES + sys.getsizeof(turn.text)
        self.num_bytes -= state.own_bytes
