"""The base of routers that track which prompts are cached where."""

from collections.abc import Sequence

from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.router import Opening, ReplicaState


class PrefixRouter:
    """Updates a `PrefixIndex` from the outcome of queries."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self._index = PrefixIndex() if index is None else index
        self._last: tuple[Opening, list[int]] | None = None  # `rank` and `routed` need the same keys

    def matches(self, opening: Opening, replicas: Sequence[ReplicaState]) -> dict[str, int]:
        """Set the replicas' capacities in the index, and return the matching tokens by replica id, without zeros."""
        for replica in replicas:
            self._index.resize(replica.id, replica.num_kv_tokens)
        return self._index.matches(self._keys(opening))

    def routed(self, opening: Opening, replica_id: str) -> int:
        """Return the number of tokens that do not match at the replica, and record that it holds the opening."""
        keys = self._keys(opening)
        num_matched = self._index.matches(keys).get(replica_id, 0)
        self._index.hold(keys, replica_id)
        return len(opening.token_ids) - num_matched

    def completed(self, token_ids: Sequence[int], replica_id: str) -> None:
        self._index.hold(self._index.keys(token_ids), replica_id)

    prefilled = completed

    def lost(self, replica_id: str) -> None:
        self._index.forget(replica_id)

    def _keys(self, opening: Opening) -> list[int]:
        """Return the keys of the opening's blocks, cached for the last opening."""
        if self._last is None or self._last[0] is not opening:
            self._last = opening, self._index.keys(opening.token_ids)
        return self._last[1]
