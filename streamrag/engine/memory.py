"""The KV memory that a plan works with."""

from typing import Protocol

from streamrag.engine.request import RequestView


class Memory(Protocol):
    """The KV memory of an engine. Its methods may be costly, so a plan calls them only where the result matters."""

    num_free_blocks: int

    def num_present_tokens(self, request: RequestView) -> int:
        """Return how many leading tokens `request` need not compute: held, or available from the prefix cache."""

    def num_blocks_needed(self, request: RequestView, num_tokens: int) -> int:
        """Return how many free blocks `request` needs to compute `num_tokens` more."""

    def can_evict(self, request: RequestView) -> bool:
        """Whether evicting `request` frees its blocks at once: not if a step in flight may still write them."""

    def num_blocks_freed(self, request: RequestView) -> int:
        """Return how many blocks the eviction of `request` alone frees at least: those that no other request shares."""
