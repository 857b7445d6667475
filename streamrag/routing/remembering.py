"""What those routers have in common that remember which prompts lie where."""

from collections.abc import Sequence

from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.router import Opening, ReplicaState


class Remembering:
    """Keeps a `PrefixIndex` in step with what becomes of queries."""

    def __init__(self, index: PrefixIndex | None = None) -> None:
        self._index = PrefixIndex() if index is None else index
        self._last: tuple[Opening, list[int]] | None = None  # a query is ranked, and then routed

    def found(self, opening: Opening, replicas: Sequence[ReplicaState]) -> dict[str, int]:
        """Leading tokens of that prompt that lie on each replica; those with none may be left out."""
        for replica in replicas:
            self._index.resize(replica.id, replica.num_kv_tokens)
        return self._index.found(self._keys(opening))

    def routed(self, opening: Opening, replica_id: str) -> int:
        keys = self._keys(opening)
        num_found = self._index.found(keys).get(replica_id, 0)
        self._index.hold(keys, replica_id)
        return len(opening.token_ids) - num_found

    def completed(self, token_ids: Sequence[int], replica_id: str) -> None:
        self.prefilled(token_ids, replica_id)

    def prefilled(self, token_ids: Sequence[int], replica_id: str) -> None:
        self._index.hold(self._index.keys(token_ids), replica_id)

    def lost(self, replica_id: str) -> None:
        self._index.forget(replica_id)

    def _keys(self, opening: Opening) -> list[int]:
        if self._last is None or self._last[0] is not opening:
            self._last = opening, self._index.keys(opening.token_ids)
        return self._last[1]
