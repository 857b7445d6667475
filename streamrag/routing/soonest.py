"""Our router: the replica with the soonest expected first token, plus a price for delaying other queries.

    (waiting tokens + 2 x tokens of this prompt that are not cached there + 384 x open queries) / its tokens per second

Waiting tokens are those that its queries still have to compute, by the caller's own counts. A query is expected to
grow by as much as recent ones did, from their openings to their complete prompts. The prefix index estimates what is
cached. Uncached tokens count twice, because they delay the next query too; an open query slows every step by its share.
A popular prefix is thus replicated when waiting for it costs more than computing it on another replica.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.prefix_router import PrefixRouter
from streamrag.routing.router import Opening, ReplicaState

RECOMPUTE = 2.0
OPEN_TOKENS = 384
NUM_REMEMBERED = 100  # number of recent queries over which growth is averaged


@dataclass(slots=True)
class _RecentMean:
    """A mean over recent values. Older values have less weight."""

    value: float = 0.0
    _num: int = 0

    def add(self, value: float) -> None:
        self._num = min(self._num + 1, NUM_REMEMBERED)
        self.value += (value - self.value) / self._num


class Soonest(PrefixRouter):
    """Routes to the replica with the least cost; between equals, to the one that holds fewer tokens.

    recompute: cost of a token that must be computed, in waiting tokens.
    open_tokens: cost of an open query, in waiting tokens.
    """

    def __init__(
        self, recompute: float = RECOMPUTE, open_tokens: float = OPEN_TOKENS, index: PrefixIndex | None = None
    ) -> None:
        super().__init__(index)
        self._recompute, self._open_tokens = recompute, open_tokens
        self._opening, self._complete = _RecentMean(), _RecentMean()

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        """Return all ids by cost in seconds, cheapest first. A replica of unknown speed counts as fast as the mean."""
        found, num_tokens = self.matches(opening, replicas), len(opening.token_ids)
        speeds = [replica.tokens_per_s for replica in replicas if replica.tokens_per_s > 0]
        usual = sum(speeds) / len(speeds) if speeds else 1.0
        costs = []
        for replica in replicas:
            num_missing = num_tokens - found.get(replica.id, 0)
            cost = replica.num_new_tokens + self._recompute * num_missing + self._open_tokens * replica.num_open
            held = self._index.num_tokens(replica.id)
            costs.append((cost / (replica.tokens_per_s or usual), held, replica.id))
        return [name for *_, name in sorted(costs)]

    def routed(self, opening: Opening, replica_id: str) -> int:
        self._opening.add(len(opening.token_ids))
        return super().routed(opening, replica_id) + self.growth()

    def completed(self, token_ids: Sequence[int], replica_id: str) -> None:
        self._complete.add(len(token_ids))
        super().completed(token_ids, replica_id)

    def growth(self) -> int:
        """Return the number of tokens that a query is expected to add after its opening."""
        return max(round(self._complete.value - self._opening.value), 0)
