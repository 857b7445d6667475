"""What a router is told, and what it is asked."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf
from typing import Protocol


@dataclass(frozen=True, slots=True)
class ReplicaState:
    """A replica, as a router knows it."""

    id: str
    num_queued: int = 0
    """Queries there that have shown no token yet: fresh, from the books of whoever routes."""
    num_open: int = 0
    """All queries there: fresh as well."""
    max_open: int = 1
    """Most queries that it takes at once."""
    num_new_tokens: int = 0
    """Tokens that it is expected to compute for the queries that have shown none yet: fresh as well."""
    kv_usage: float = 0.0
    """Share of its KV that is in use, 0 to 1, as it last reported."""
    cache_hit_rate: float = 0.0
    """Share of prompt tokens that it found computed, 0 to 1, as it last reported."""
    queued_tokens: int = 0
    """Tokens of prompts that wait to be computed there, as it last reported."""
    num_kv_tokens: int = 0
    """Tokens that its KV holds; 0 if unknown."""
    tokens_per_s: float = 0.0
    """Prompt tokens that it computed a second while it computed, as it last reported; 0 if unknown."""
    measured_s: float = -inf
    """When it last reported, on the clock of whoever routes."""


@dataclass(frozen=True, slots=True)
class Opening:
    """What is known of a query when it is routed: once, when its first prompt is there."""

    token_ids: tuple[int, ...]
    """Of the first prompt: system text, conversation, and what retrieval has brought by then."""
    source_name: str = ""
    session: str | None = None
    """Queries of one session or conversation name it alike."""


class Router(Protocol):
    """Ranks replicas for a query. Called by one thread; state of its own is bounded."""

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        """Ids of the replicas that it may go to, best first; all of them in the end, none if there are none."""

    def routed(self, opening: Opening, replica_id: str) -> int:
        """It went there. Returns how many tokens that replica is expected to compute for it: what its books note."""

    def completed(self, token_ids: Sequence[int], replica_id: str) -> None:
        """This complete prompt has been computed there, so its KV lies there for a while."""

    def prefilled(self, token_ids: Sequence[int], replica_id: str) -> None:
        """This prompt has been computed there, is not complete, and is kept for others that begin like it."""

    def lost(self, replica_id: str) -> None:
        """That replica is gone, or has started afresh: nothing lies there any more."""
