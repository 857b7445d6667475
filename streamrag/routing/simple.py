"""Routers that know nothing of what lies where."""

import random
from collections.abc import Sequence
from functools import lru_cache
from hashlib import blake2b

from streamrag.routing.router import Opening, ReplicaState

NUM_KEY_TOKENS = 256
"""Leading tokens that stand for a query that names no session."""
_ALL = (1 << 64) - 1


class Forgetful:
    """What those routers have in common that need not hear what becomes of a query."""

    def routed(self, opening: Opening, replica_id: str) -> int:
        return len(opening.token_ids)

    def completed(self, token_ids: Sequence[int], replica_id: str) -> None:
        """Nothing is remembered."""

    def prefilled(self, token_ids: Sequence[int], replica_id: str) -> None:
        """Nothing is remembered."""

    def lost(self, replica_id: str) -> None:
        """Nothing is remembered."""


class RoundRobin(Forgetful):
    """Each in turn."""

    def __init__(self) -> None:
        self._num_ranked = 0

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        ids = [replica.id for replica in replicas]
        first = self._num_ranked % max(len(ids), 1)
        self._num_ranked += 1
        return ids[first:] + ids[:first]


class ShortestQueue(Forgetful):
    """The replica with the fewest open queries; of equals one drawn at random."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        drawn = self._rng.sample(replicas, len(replicas))
        return [replica.id for replica in sorted(drawn, key=lambda replica: replica.num_open)]


class PowerOfTwo(Forgetful):
    """Ray Serve's default: of two drawn at random the one with fewer open queries. The others follow at random."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        drawn = self._rng.sample(replicas, len(replicas))
        drawn[:2] = sorted(drawn[:2], key=lambda replica: replica.num_open)
        return [replica.id for replica in drawn]


class ConsistentHash(Forgetful):
    """By session, or else by the prompt's first tokens; a replica that comes or goes moves only its own queries.

    Weighs each pair of key and replica by a hash (rendezvous hashing), where Ray's ConsistentHashRouter has a ring.
    """

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        session = opening.session
        key = hash(opening.token_ids[:NUM_KEY_TOKENS]) if session is None else _number(session)
        return sorted((replica.id for replica in replicas), key=lambda name: _mixed(key ^ _number(name)))


@lru_cache(maxsize=4_096)
def _number(name: str) -> int:
    """The same in every process, which Python's own hash of a text is not."""
    return int.from_bytes(blake2b(name.encode(), digest_size=8).digest())


def _mixed(bits: int) -> int:
    """64 bits of which each depends on all 64: the end of splitmix64. Python's hash of two numbers mixes too little."""
    bits &= _ALL
    bits = (bits ^ bits >> 30) * 0xBF58476D1CE4E5B9 & _ALL
    bits = (bits ^ bits >> 27) * 0x94D049BB133111EB & _ALL
    return bits ^ bits >> 31
