"""The interface of a router: what it is told of a query and of the replicas, and what it returns."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica, as a router knows it: the first counts are the caller's own and fresh, the rest is its last report."""

    id: str
    num_queued: int = 0
    """Queries there that have shown no token yet."""
    num_open: int = 0
    """All queries there."""
    max_open: int = 1
    """Most queries that the replica takes at once."""
    num_new_tokens: int = 0
    """Tokens that the replica is expected to compute for its queued queries."""
    kv_usage: float = 0.0
    """Share of its KV that is in use, 0 to 1."""
    cache_hit_rate: float = 0.0
    """Share of prompt tokens that the replica found computed, 0 to 1."""
    queued_tokens: int = 0
    """Tokens of prompts that wait to be computed there."""
    num_kv_tokens: int = 0
    """Tokens that its KV holds; 0 if unknown."""
    tokens_per_s: float = 0.0
    """Prompt tokens computed per second of computing; 0 if unknown."""
    measured_s: float = -inf
    """When the replica last reported, on the caller's clock."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A query as it is routed: once, when its first prompt is there."""

    token_ids: tuple[int, ...]
    """Token ids of the first prompt: system text, conversation, and what retrieval has brought by then."""
    source_name: str = ""
    session: str | None = None
    """Session or conversation of the query, if it has one."""


class Router(Protocol):
    """Ranks replicas for a query. Called by one thread; state of its own is bounded."""

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        """Return the ids of all these replicas, best first."""

    def routed(self, opening: Opening, replica_id: str) -> int:
        """Note that the query went there. Return how many tokens the replica is expected to compute for it."""

    def completed(self, token_ids: Sequence[int], replica_id: str) -> None:
        """Note that this complete prompt has been computed there, so that its KV stays for a while."""

    def prefilled(self, token_ids: Sequence[int], replica_id: str) -> None:
        """Note that this partial prompt has been computed there, and is kept for others that begin like it."""

    def lost(self, replica_id: str) -> None:
        """Note that the replica is gone, or has started afresh: none of its KV is left."""
