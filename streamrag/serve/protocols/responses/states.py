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
        self._states: OrderedDict[_Key, tuple[State, float]] = OrderedDict()
        """Each state with its time of last use, least recently used first."""
        self._num_states: Counter[str] = Counter()  # by client
        self._num_bytes: Counter[str] = Counter()  # by client
        self._turns: Counter[tuple[str, int]] = Counter()
        """References to turns by client and identity: the states of a chain share turns."""

    @property
    def num_states(self) -> int:
        return len(self._states)

    @property
    def num_bytes(self) -> int:
        """Memory that the states take."""
        return self._num_bytes.total()

    def add(self, state: State, client: str, connection: object = None) -> None:
        """Store a state for a client, or for its connection only. Then remove expired states, and over a limit the
        least recently used ones of the client with the most."""
        self._states[client, connection, state.id] = state, self._clock()
        self._num_states[client] += 1
        self._num_bytes[client] += state.own_bytes
        for turn in state.turns:
            if not self._turns[client, id(turn)]:
                self._num_bytes[client] += TURN_BYTES + sys.getsizeof(turn.text)
            self._turns[client, id(turn)] += 1
        self._expire()
        while self.num_states > self._limits.max_states:
            self._evict_from(max(self._num_states, key=lambda each: self._num_states[each]))
        while self.num_bytes > self._limits.max_state_bytes:
            self._evict_from(max(self._num_bytes, key=lambda each: self._num_bytes[each]))

    def get(self, id: str, client: str, connection: object = None) -> State:
        """Remove expired states; return one of a client or connection, marked as used, which renews its time. Raises
        RequestError (404) if there is none."""
        self._expire()
        for key in ((client, None, id), (client, connection, id)):
            if key in self._states:
                state, _ = self._states.pop(key)
                self._states[key] = state, self._clock()
                return state
        message = f"there is no response {id!r:.80}; it may have expired"
        raise RequestError(message, status=404, code="response_not_found")

    def previous(self, id: str | None, client: str, connection: object = None) -> State | None:
        """Return the state that a request continues, as `get` does; None without an `id`. Raises RequestError (404),
        with the field, if there is none."""
        try:
            return self.get(id, client, connection) if id else None
        except RequestError as error:
            code, param = "previous_response_not_found", "previous_response_id"
            raise RequestError(str(error), status=404, code=code, param=param) from None

    def delete(self, id: str, client: str) -> None:
        """Remove a state of a client. Responses that continued it keep their conversation."""
        self.get(id, client)
        self._remove((client, None, id))

    def forget(self, client: str, connection: object) -> None:
        """Remove all states of a connection."""
        for key in [key for key in self._states if key[0] == client and key[1] is connection]:
            self._remove(key)

    def _expire(self) -> None:
        """Remove states that were not used for `state_s` seconds."""
        oldest_s = self._clock() - self._limits.state_s
        while self._states and next(iter(self._states.values()))[1] <= oldest_s:
            self._remove(next(iter(self._states)))

    def _evict_from(self, client: str) -> None:
        self._remove(next(key for key in self._states if key[0] == client))

    def _remove(self, key: "_Key") -> None:
        """Remove a state, and from the counts its size and that of turns that the client's other states lack."""
        state, _ = self._states.pop(key)
        client = key[0]
        self._num_states[client] -= 1
        self._num_bytes[client] -= state.own_bytes
        for turn in state.turns:
            self._turns[client, id(turn)] -= 1
            if not self._turns[client, id(turn)]:
                del self._turns[client, id(turn)]
                self._num_bytes[client] -= TURN_BYTES + sys.getsizeof(turn.text)
        if not self._num_states[client]:
            del self._num_states[client], self._num_bytes[client]


_Key = tuple[str, object, str]  # the client, the connection or None, and the state's id
