"""FlowGuard, the router of StreamServe, to compare with: as published, and mended where that is inert.

    S = .4 C + .1 (1 - M) + .3 (1 - Q) + .2 (1 - L)        the largest is chosen
    M / 100 + 2 Q > .85                                    is overloaded, and excluded

C is a hit rate, M the share of KV in use, Q and L the queries that wait and that are open, as shares of the most that
a replica takes. Where all are excluded the shortest queue is chosen.

Source: StreamServe, section 3.3, algorithm 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from streamrag.routing.basic_routers import BasicRouter
from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.router import Opening, ReplicaState
from streamrag.routing.soonest import PrefixRouter

STALE_S = 2.0
"""Reports older than this are stale; the paper has a period of .5 s, and does not say when they are."""


@dataclass(frozen=True, slots=True)
class Weights:
    """Weights of the four signals."""

    cache: float = 0.4
    memory: float = 0.1
    queue: float = 0.3
    load: float = 0.2


PUBLISHED = Weights()


def score(replica: ReplicaState, weights: Weights, cache_hit_rate: float) -> float:
    """S, of a replica on which that share of the prompt is found."""
    return (
        weights.cache * cache_hit_rate
        + weights.memory * (1 - replica.kv_usage)
        + weights.queue * (1 - replica.num_queued / replica.max_open)
        + weights.load * (1 - replica.num_open / replica.max_open)
    )


def overload(replica: ReplicaState, memory_divisor: float = 100.0) -> float:
    """The larger, the more so. M is a share already, so that dividing it by 100 lets it count for nothing."""
    return replica.kv_usage / memory_divisor + 2 * replica.num_queued / replica.max_open


class FlowGuard(BasicRouter):
    """As published: C is the hit rate of all that the replica has computed, whatever the prompt.

    weights: of the signals.
    threshold: of the overload above which a replica is excluded; infinite excludes none.
    stale_s: age of a report from which on its replica is excluded.
    memory_divisor: of M, in the overload.
    """

    def __init__(
        self,
        weights: Weights = PUBLISHED,
        threshold: float = 0.85,
        stale_s: float = STALE_S,
        memory_divisor: float = 100.0,
    ) -> None:
        self._weights, self._threshold, self._stale_s = weights, threshold, stale_s
        self._memory_divisor = memory_divisor

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        return self.order(replicas, [replica.cache_hit_rate for replica in replicas], now_s)

    def order(self, replicas: Sequence[ReplicaState], cache_hit_rates: Sequence[float], now_s: float) -> list[str]:
        """Order those that are neither stale nor overloaded by their scores, then the others by their queues."""
        good, excluded = [], []
        for replica, cache_hit_rate in zip(replicas, cache_hit_rates, strict=True):
            is_stale = now_s - replica.measured_s > self._stale_s
            if is_stale or overload(replica, self._memory_divisor) > self._threshold:
                excluded.append((replica.num_queued, replica.id))
            else:
                good.append((-score(replica, self._weights, cache_hit_rate), replica.id))
        return [
            name
            for of_one_kind in (good, excluded)
            for _, name in sorted(of_one_kind, key=lambda scored: scored[0])  # of equals the first, as with argmax
        ]


class MendedFlowGuard(PrefixRouter):
    """C is the share of this prompt that lies there, and memory counts for overload as it is. Options as published."""

    def __init__(
        self,
        weights: Weights = PUBLISHED,
        threshold: float = 0.85,
        stale_s: float = STALE_S,
        memory_divisor: float = 1.0,
        index: PrefixIndex | None = None,
    ) -> None:
        super().__init__(index)
        self._flowguard = FlowGuard(weights, threshold, stale_s, memory_divisor)

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        found, num_tokens = self.matches(opening, replicas), max(len(opening.token_ids), 1)
        return self._flowguard.order(replicas, [found.get(replica.id, 0) / num_tokens for replica in replicas], now_s)
