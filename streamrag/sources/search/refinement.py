"""The state of one hybrid search: its rankings, its failures and the durations of its parts."""

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from streamrag.core import Chunk
from streamrag.errors import SourceError, StreamRagError
from streamrag.sources.fusion import reciprocal_rank_fusion
from streamrag.sources.search.reranker import TooSlowError
from streamrag.sources.workers.pool import WorkerTimeoutError
from streamrag.support.messages import message_of

log = logging.getLogger("streamrag.sources")

WEIGHTS, FUSION_K = {"vectors": 2.0}, 5
"""Weights of rankings and constant of the fusion, chosen by bench/studies/retrieval: see docs/hybrid-search.md."""
NEWEST_WEIGHT = 0.2  # weight of the newest duration in the moving average


class Refinement:
    """The `k` best passages by the rankings and scores so far.

        fused     a b c d e f g     reciprocal rank fusion of all rankings
        scored    c a | b d         its first passages, scored batch by batch, sorted by score
        best      c a b d e         scored passages first

    Scored passages never change their relative order, so a batch changes nothing above its best passage.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self.rankings: dict[str, tuple[Chunk, ...]] = {}
        self.fused: tuple[Chunk, ...] = ()
        self.best: tuple[Chunk, ...] = ()
        self._scored: list[tuple[float, Chunk]] = []

    def rank(self, name: str, ranking: Sequence[Chunk]) -> bool:
        """Replace the ranking of that name, and fuse all rankings. Return whether the best passages change."""
        self.rankings[name] = tuple(ranking)
        weights = [WEIGHTS.get(each, 1.0) for each in self.rankings]
        self.fused = reciprocal_rank_fusion(tuple(self.rankings.values()), weights, k=FUSION_K)
        return self._set_best(self.fused)

    def score(self, batch: Sequence[Chunk], scores: Sequence[float]) -> bool:
        """Add scores of the next passages of `fused`. Return whether the best passages change."""
        self._scored += zip(scores, batch, strict=True)
        self._scored.sort(key=lambda scored: -scored[0])  # stable: of equal scores, fused order decides
        return self._set_best((*(chunk for _, chunk in self._scored), *self.fused[len(self._scored) :]))

    def _set_best(self, ranked: Sequence[Chunk]) -> bool:
        before, self.best = self.best, tuple(ranked[: self._k])
        return self.best != before


class MeanDuration:
    """An exponential moving average of durations; infinity before the first one."""

    def __init__(self) -> None:
        self.mean_s = inf

    def add(self, duration_s: float) -> None:
        self.mean_s = duration_s if self.mean_s == inf else self.mean_s + NEWEST_WEIGHT * (duration_s - self.mean_s)


class Failures:
    """The failed parts of one search.

    `missing` names the parts and may be shown to clients. `errors` may name internal hosts, files and processes.
    """

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self.errors: list[Exception] = []
        self.missing: list[str] = []

    @contextmanager
    def record(self, what: str) -> Iterator[None]:
        """Log, record and suppress an error of the block; raise a caller's mistake, or any error of a closed source.

        what: the part, which `missing` says failed or took too long. A mistake is a StreamRagError, but no SourceError.
        """
        try:
            yield
        except Exception as error:
            if not self._is_open() or (isinstance(error, StreamRagError) and not isinstance(error, SourceError)):
                raise
            log.warning("%s failed: %s: %s", what, type(error).__name__, message_of(error))
            self.errors.append(error)
            is_slow = isinstance(error, TooSlowError | WorkerTimeoutError)
            self.missing.append(f"{what} {'took too long' if is_slow else 'failed'}")
