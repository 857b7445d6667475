"""Prefix affinity, after Ray Serve's PrefixCacheAffinityRouter (ray 2.60).

If the queues differ by more than a threshold: power of two choices. Otherwise the replicas that hold most of the
prompt, fewest open queries first. If these hold less than a tenth of it: the replicas that hold least in total. As
shipped in Ray, the threshold is infinite.

Differences: full blocks of tokens instead of characters, bounded memory, and no actor that is called over the network.
"""

import random
from collections.abc import Sequence
from math import inf

from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.router import Opening, ReplicaState
from streamrag.routing.soonest import PrefixRouter


class PrefixAffinity(PrefixRouter):
    """Routes to the replica that holds most of the prompt.

    imbalance: difference between the most and the fewest open queries of a replica above which only queues count.
    least_match: share of the prompt below which a match does not count.
    """

    def __init__(
        self, imbalance: float = inf, least_match: float = 0.1, seed: int = 0, index: PrefixIndex | None = None
    ) -> None:
        super().__init__(index)
        self._imbalance, self._least_match = imbalance, least_match
        self._rng = random.Random(seed)

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        """Return the replicas of `_first` by open queries, then the others at random, the less busy of two in front."""
        if not replicas:
            return []
        fallback = self._rng.sample(replicas, len(replicas))
        fallback[:2] = sorted(fallback[:2], key=lambda replica: replica.num_open)
        first = self._first(self.matches(opening, replicas), len(opening.token_ids), replicas)
        names = [replica.id for replica in sorted(first, key=lambda replica: replica.num_open)]
        first_ids = set(names)
        return names + [replica.id for replica in fallback if replica.id not in first_ids]

    def _first(
        self, matches: dict[str, int], num_tokens: int, replicas: Sequence[ReplicaState]
    ) -> Sequence[ReplicaState]:
        """Return the replicas to prefer: none if imbalanced; all with the best match if that counts (`least_match`);
        or else those that hold least in total."""
        lengths = [replica.num_open for replica in replicas]
        if max(lengths) - min(lengths) > self._imbalance:
            return ()
        best = max(matches.get(replica.id, 0) for replica in replicas)
        if best and best >= self._least_match * num_tokens:
            return [replica for replica in replicas if matches.get(replica.id, 0) == best]
        held = {replica.id: self._index.num_tokens(replica.id) for replica in replicas}
        least = min(held.values())
        return [replica for replica in replicas if held[replica.id] == least]
