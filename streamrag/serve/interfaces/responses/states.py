"""What is kept of responses, for `previous_response_id` and for whoever asks for one again."""

import sys
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass

from streamrag.core import Turn
from streamrag.serve.failures import RequestError
from streamrag.serve.limits import Limits

TURN_BYTES = 200
"""Memory of a turn without its text: the object, and the entry that counts it."""


@dataclass(frozen=True, slots=True, eq=False)
class State:
    """A response, and the conversation up to its end, without its instructions."""

    id: str
    """As clients know it."""
    response: bytes
    """As JSON: what a client puts into its fields takes up to thirty times as much as objects."""
    turns: tuple[Turn, ...]
    brings_context: bool
    """Whether some of the conversation was prepared; its answers need no retrieval then."""

    @property
    def own_bytes(self) -> int:
        """Memory that it takes besides its turns."""
        return sys.getsizeof(self.response) + sys.getsizeof(self.turns)


class StateStore:
    """Keeps as many states as the limits allow. An owner has no way to another one's.

    What was not used for longest goes first, of the client that has most: nobody can push out everybody else's.
    An owner is a client, by name, or a connection of one, for what that does not want to be stored.

    clock: seconds; of `time.monotonic` unless a test says otherwise.
    """

    def __init__(self, limits: Limits, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._limits = limits
        self._clock = clock
        self._of_clients: dict[Hashable, _Kept] = {}

    @property
    def num_states(self) -> int:
        """Those that are kept."""
        return sum(len(kept.states) for kept in self._of_clients.values())

    @property
    def num_bytes(self) -> int:
        """Memory that they take."""
        return sum(kept.num_bytes for kept in self._of_clients.values())

    def add(self, owner: Hashable, state: State, *, client: Hashable) -> None:
        """Keep a state of an owner of `client`'s, and let others go if they are too old or too many."""
        now_s = self._clock()
        self._of_clients.setdefault(owner, _Kept(client)).add(state, now_s)
        for each in list(self._of_clients):
            self._drop_old(each, now_s)
        while self.num_states > self._limits.max_states:
            self._drop_first(self._greediest(lambda kept: len(kept.states)))
        while self.num_bytes > self._limits.max_state_bytes:
            self._drop_first(self._greediest(lambda kept: kept.num_bytes))

    def get(self, key: str, *owners: Hashable) -> State:
        """The state of this id that one of `owners` has.

        :raises RequestError: there is none, or none any more.
        """
        now_s = self._clock()
        for owner in owners:
            self._drop_old(owner, now_s)
            if owner in self._of_clients and (state := self._of_clients[owner].use(key, now_s)) is not None:
                return state
        raise RequestError(
            f"there is no response {key!r:.80} here, or not any more", status=404, code="response_not_found"
        )

    def previous(self, key: str | None, *owners: Hashable) -> State | None:
        """The state to go on from, if there is to be one.

        :raises RequestError: there is none of this id.
        """
        try:
            return None if key is None else self.get(key, *owners)
        except RequestError as error:
            code, param = "previous_response_not_found", "previous_response_id"
            raise RequestError(str(error), status=404, code=code, param=param) from None

    def delete(self, key: str, owner: Hashable) -> None:
        """Forget a state. Responses that went on from it keep their conversation.

        :raises RequestError: there is none.
        """
        self.get(key, owner)
        self._of_clients[owner].remove(key)
        self._tidy(owner)

    def forget(self, owner: Hashable) -> None:
        """Forget all that this owner has."""
        self._of_clients.pop(owner, None)

    def _greediest(self, size: "Callable[[_Kept], int]") -> Hashable:
        """The owner that has most, of those of the client that has most: of all its connections together."""
        of_client: Counter[Hashable] = Counter()
        for kept in self._of_clients.values():
            of_client[kept.client] += size(kept)
        return max(self._of_clients, key=lambda each: (of_client[(kept := self._of_clients[each]).client], size(kept)))

    def _drop_old(self, owner: Hashable, now_s: float) -> None:
        kept = self._of_clients.get(owner)
        while kept is not None and kept.states and kept.oldest_s <= now_s - self._limits.state_s:
            self._drop_first(owner)

    def _drop_first(self, owner: Hashable) -> None:
        kept = self._of_clients[owner]
        kept.remove(next(iter(kept.states)))
        self._tidy(owner)

    def _tidy(self, owner: Hashable) -> None:
        if not self._of_clients[owner].states:
            del self._of_clients[owner]


class _Kept:
    """The states of one owner, least recently used first, and what they take."""

    def __init__(self, client: Hashable) -> None:
        self.client = client
        self.states: OrderedDict[str, tuple[State, float]] = OrderedDict()
        """With the time at which each was used last."""
        self.num_bytes = 0
        self._turns: Counter[int] = Counter()  # by identity, since the states of a chain share them

    @property
    def oldest_s(self) -> float:
        return next(iter(self.states.values()))[1]

    def add(self, state: State, now_s: float) -> None:
        self.states[state.id] = state, now_s
        for turn in state.turns:
            if not self._turns[id(turn)]:
                self.num_bytes += _size(turn)
            self._turns[id(turn)] += 1
        self.num_bytes += state.own_bytes

    def use(self, key: str, now_s: float) -> State | None:
        if key not in self.states:
            return None
        state, _ = self.states.pop(key)
        self.states[key] = state, now_s
        return state

    def remove(self, key: str) -> None:
        state, _ = self.states.pop(key)
        for turn in state.turns:
            self._turns[id(turn)] -= 1
            if not self._turns[id(turn)]:
                del self._turns[id(turn)]
                self.num_bytes -= _size(turn)
        self.num_bytes -= state.own_bytes


def _size(turn: Turn) -> int:
    return TURN_BYTES + sys.getsizeof(turn.text)
