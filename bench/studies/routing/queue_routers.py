"""Routers by the number of open queries, to compare with: Ray Serve's default, and what it approximates."""

import random
from collections.abc import Sequence

from streamrag.routing.router import BasicRouter, Opening, ReplicaState


class ShortestQueue(BasicRouter):
    """A router to the replica with the fewest open queries; of equals one drawn at random."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        drawn = self._rng.sample(replicas, len(replicas))
        return [replica.id for replica in sorted(drawn, key=lambda replica: replica.num_open)]


class PowerOfTwo(BasicRouter):
    """Ray Serve's default: of two drawn at random the one with fewer open queries. The others follow at random."""

    def __init__(self, seed: int = 0) -> None:
        self._rng = random.Random(seed)

    def rank(self, opening: Opening, replicas: Sequence[ReplicaState], now_s: float) -> list[str]:
        drawn = self._rng.sample(replicas, len(replicas))
        drawn[:2] = sorted(drawn[:2], key=lambda replica: replica.num_open)
        return [replica.id for replica in drawn]
