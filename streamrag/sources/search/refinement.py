"""The state of one query's search while its parts answer, and how long the parts take."""

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

NEWEST_WEIGHT = 0.2
"""Weight of the newest duration in a running mean."""


class Refinement:
    """The `k` best passages, by the rankings and scores that are known so far.

        fused     a b c d e f g     by reciprocal rank, of all rankings
        scored    c a | b d         the first of those, batch by batch; sorted by score, and put in front
        best      c a b d e

    Passages that have been scored never change their order. So a batch changes nothing above the best of its passages.
    """

    def __init__(self, k: int) -> None:
        self._k = k
        self.rankings: dict[str, tuple[Chunk, ...]] = {}
        self.fused: tuple[Chunk, ...] = ()
        self.best: tuple[Chunk, ...] = ()
        self._scored: list[tuple[float, Chunk]] = []

    def rank(self, name: str, ranking: Sequence[Chunk]) -> bool:
        """Put a ranking in the place of the one of that name; return whether that changes what is best."""
        self.rankings[name] = tuple(ranking)
        self.fused = reciprocal_rank_fusion(tuple(self.rankings.values()))
        return self._become(self.fused)

    def score(self, batch: Sequence[Chunk], scores: Sequence[float]) -> bool:
        """Take the scores of the next passages of `fused`; return whether that changes what is best."""
        self._scored += zip(scores, batch, strict=True)
        self._scored.sort(key=lambda scored: -scored[0])  # of equals, the one that was fused higher stays first
        return self._become((*(chunk for _, chunk in self._scored), *self.fused[len(self._scored) :]))

    def _become(self, ranked: Sequence[Chunk]) -> bool:
        before, self.best = self.best, tuple(ranked[: self._k])
        return self.best != before


class MeanDuration:
    """A running mean of durations; infinity until one is known."""

    def __init__(self) -> None:
        self.mean_s = inf

    def add(self, took_s: float) -> None:
        """Add the newest duration."""
        self.mean_s = took_s if self.mean_s == inf else self.mean_s + NEWEST_WEIGHT * (took_s - self.mean_s)


class Failures:
    """The parts that failed for one query. Failures of a source that was closed are raised.

    `missing` says which parts failed, for clients of a service too. Their errors may name hosts, files and processes of
    the inside, and are for the log.
    """

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self.errors: list[Exception] = []
        self.missing: list[str] = []

    @contextmanager
    def record(self, what: str) -> Iterator[None]:
        """Record a failure of the block; mistakes of the program are raised."""
        try:
            yield
        except Exception as error:
            if not self._is_open() or (isinstance(error, StreamRagError) and not isinstance(error, SourceError)):
                raise
            log.warning("%s failed: %s: %s", what, type(error).__name__, message_of(error))
            self.errors.append(error)
            is_slow = isinstance(error, TooSlowError | WorkerTimeoutError)
            self.missing.append(f"{what} {'took too long' if is_slow else 'failed'}")
