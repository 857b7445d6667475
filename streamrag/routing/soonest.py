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


KEPT = 0.9  # weight of earlier prompts relative to the next one
LASTS_S = 30.0
"""Seconds without a prompt after which the speed is unknown, so that a replica that was slow is tried again."""
QUERY_TOKENS = 384
"""Cost of a query besides its tokens: the constant part of a step. In measured profiles it is between 185 (two A40s)
and 620 (two H100s). Without it, a replica that finds most prompts in its cache looks slow."""


class Speed:
    """Measures the tokens that one replica computes per second in which any prompt waits there.

        prompts wait   ──────────        ───────────────
        computed                 a             b        c      b counts the time since a, c the time since b

    All times are of one clock. Engines often report the prefix hits of a prompt after its computation. Therefore
    `computed` returns the seconds, and `add` takes them together with the tokens.
    """

    def __init__(self, query_tokens: float = QUERY_TOKENS) -> None:
        self._query_tokens = query_tokens
        self._since_s: float | None = None
        self._open_s = 0.0  # seconds of waiting since the last computed prompt
        self._tokens = self._seconds = 0.0
        self._added_s = 0.0

    def waiting(self, is_waiting: bool, now_s: float) -> None:
        """Record whether prompts wait from now on."""
        if self._since_s is not None:
            self._open_s += now_s - self._since_s
        self._since_s = now_s if is_waiting else None

    def computed(self, now_s: float) -> float:
        """Record that a prompt has been computed. Return the seconds of waiting that count for it."""
        self.waiting(self._since_s is not None, now_s)
        seconds, self._open_s = self._open_s, 0.0
        return seconds

    def add(self, num_tokens: float, seconds: float, now_s: float) -> None:
        """Add the tokens computed for a prompt, and the seconds that `computed` returned for it."""
        self._tokens = KEPT * (self._tokens + num_tokens + self._query_tokens)
        self._seconds = KEPT * (self._seconds + seconds)
        self._added_s = now_s

    def tokens_per_s(self, now_s: float) -> float:
        """Return the speed, 0 if unknown."""
        is_known = self._seconds > 0 and now_s - self._added_s < LASTS_S
        return self._tokens / self._seconds if is_known else 0.0
