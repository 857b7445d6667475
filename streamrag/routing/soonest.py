"""Our router: the replica on which the first token is expected soonest, with a price on what delays others.

    (waiting tokens + 2 x tokens of this prompt that do not lie there + 384 x open queries) / its tokens a second

Waiting tokens are those that queries there have still to compute, by the caller's own counts. A query is expected to
grow as much as the last ones have, from their openings to their complete prompts. The prefix index guesses what lies
there. Computing what lies elsewhere counts twice, because it delays the next query too. An open query slows every step
by its share. A popular prefix is replicated by itself, when waiting for it costs more than computing it elsewhere.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.prefix_router import PrefixRouter
from streamrag.routing.router import Opening, ReplicaState

RECOMPUTE = 2.0
OPEN_TOKENS = 384
NUM_REMEMBERED = 100
"""Recent queries by which growth is judged."""


@dataclass(slots=True)
class _RecentMean:
    """The mean of the last values, of which older ones count less."""

    value: float = 0.0
    _num: int = 0

    def add(self, value: float) -> None:
        self._num = min(self._num + 1, NUM_REMEMBERED)
        self.value += (value - self.value) / self._num


class Soonest(PrefixRouter):
    """The router to the replica with the least cost; of equals to the one that holds less.

    recompute: what a token that must be computed anew counts, in tokens that wait.
    open_tokens: what an open query counts, in tokens that wait.
    """

    def __init__(
        self, recompute: float = RECOMPUTE, open_tokens: float = OPEN_TOKENS, index: PrefixIndex | None = None
    ) -> None:
        super().__init__(index)
        self._recompute, self._open_tokens = recompute, open_tokens
        self._opening, self._complete = _RecentMean(), _RecentMean()

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
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
        """Return how many tokens a query is expected to bring after its opening."""
        return max(round(self._complete.value - self._opening.value), 0)
