"""Our router: the replica on which the first token is expected soonest.

    expected_s = (tokens still to be computed there + tokens of this prompt that do not lie there) / its tokens a second

The tokens that wait are those of the books, fresh; what lies there is what the index believes. A prefix that becomes
popular is replicated by itself, when waiting for it takes longer than computing it elsewhere.
"""

from collections.abc import Sequence

from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.remembering import Remembering
from streamrag.routing.router import Opening, ReplicaState


class Soonest(Remembering):
    """Of equals it takes the replica with fewer open queries, then the one that holds less."""

    def __init__(self, extra: float = 0.0, index: PrefixIndex | None = None) -> None:
        super().__init__(index)
        self._extra = extra

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        found, num_tokens = self.found(opening, replicas), len(opening.token_ids)
        speeds = [replica.tokens_per_s for replica in replicas if replica.tokens_per_s > 0]
        usual = sum(speeds) / len(speeds) if speeds else 1.0
        keys = []
        for replica in replicas:
            num_missing = (num_tokens - found.get(replica.id, 0)) * (1 + self._extra)
            expected_s = (replica.num_new_tokens + num_missing) / (replica.tokens_per_s or usual)
            keys.append((expected_s, replica.num_open, self._index.num_tokens(replica.id), replica.id))
        return [name for *_, name in sorted(keys)]
