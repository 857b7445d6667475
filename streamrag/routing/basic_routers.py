"""Routers that do not track which prompts are cached where."""

from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from streamrag.routing.router import Opening, ReplicaState

NUM_KEY_TOKENS = 256  # number of leading tokens that are hashed for a query without a session
_ALL = (1 << 64) - 1


class BasicRouter:
    """Base of routers that ignore the outcome of queries."""

    def routed(self, opening: Opening, replica_id: str) -> int:
        """Return all of the opening's tokens: nothing is known to be cached."""
        return len(opening.token_ids)

    def completed(self, token_ids: Sequence[int], replica_id: str) -> None: ...
    def prefilled(self, token_ids: Sequence[int], replica_id: str) -> None: ...
    def lost(self, replica_id: str) -> None: ...


class RoundRobin(BasicRouter):
    """Takes each replica in turn."""

    def __init__(self) -> None:
        self._num_ranked = 0

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        ids = [replica.id for replica in replicas]
        first = self._num_ranked % max(len(ids), 1)
        self._num_ranked += 1
        return ids[first:] + ids[:first]


class ConsistentHash(BasicRouter):
    """Routes by session, or by the prompt's first tokens. Adding or removing a replica moves only its own queries.

    Uses rendezvous hashing: a hash of key and replica ranks the replicas. Ray's ConsistentHashRouter uses a ring.
    """

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        session = opening.session
        key = hash(opening.token_ids[:NUM_KEY_TOKENS]) if session is None else _number(session)
        return sorted((replica.id for replica in replicas), key=lambda name: _mixed(key ^ _number(name)))


@lru_cache(maxsize=4_096)
def _number(name: str) -> int:
    """Return a hash that is the same in every process, unlike Python's own of a text."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


def _mixed(bits: int) -> int:
    """Return the low 64 bits, mixed as by splitmix64's finalizer. Python's hash of two numbers mixes too little."""
    bits &= _ALL
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _ALL
    return bits ^ bits >> 31
