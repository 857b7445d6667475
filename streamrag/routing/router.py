"""The interface of a router, and the routers that need no reports of replicas."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b
from math import inf
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A router's view of a replica. `num_queued`, `num_open` and `num_new_tokens` are fresh; the rest is reported."""

    id: str
    num_queued: int = 0  # queries at the replica that have no first token yet
    num_open: int = 0  # all open queries at the replica
    max_open: int = 1  # most concurrent queries that the replica accepts
    num_new_tokens: int = 0  # tokens that the replica is expected to compute for its queued queries
    kv_usage: float = 0.0  # share of the replica's KV memory that is in use, 0 to 1
    cache_hit_rate: float = 0.0  # share of prompt tokens that were prefix hits, 0 to 1
    queued_tokens: int = 0  # prompt tokens that wait to be computed at the replica
    num_kv_tokens: int = 0  # capacity of the KV cache in tokens; 0 if unknown
    tokens_per_s: float = 0.0  # prompt tokens computed per second of computing; 0 if unknown
    measured_s: float = -inf  # time of the replica's last report, on the caller's clock


@dataclass(frozen=True, slots=True)
class Opening:
    """A query at the time of its routing, which is once, when its first prompt exists."""

    token_ids: tuple[int, ...]
    """Token ids of the first prompt: system text, conversation, and the chunks retrieved so far."""
    source_name: str = ""
    session: str | None = None  # session or conversation of the query, if it has one


class Router(Protocol):
    """Ranks replicas for a query. Called from one thread; its own state is bounded."""

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        """Return the ids of all these replicas, best first."""

    def routed(self, opening: Opening, replica_id: str) -> int:
        """Record that a query went to a replica. Return how many tokens the replica is expected to compute for it."""

    def completed(self, token_ids: Sequence[int], replica_id: str) -> None:
        """Record that a replica has computed this complete prompt, so its KV stays cached for a while."""

    def prefilled(self, token_ids: Sequence[int], replica_id: str) -> None:
        """Record that a replica has computed this partial prompt, which is cached for others with the same prefix."""

    def lost(self, replica_id: str) -> None:
        """Record that a replica is gone or has restarted, and holds no KV."""


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
    """Ranks the replicas in the given order, beginning one further at each call."""

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
