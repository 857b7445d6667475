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


class PrefixRouter:
    """A base of routers that track which prompts are cached where, in a `PrefixIndex`, by the outcome of queries."""

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
        """Return all ids by cost, cheapest first: tokens to compute there, uncached ones and open queries, each with
        its weight, over the replica's speed; an unknown speed counts as the mean."""
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
