"""What a search knows of one query while its parts answer, and what of that is news."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import inf

from streamrag.core import Chunk
from streamrag.errors import SourceError, StreamRagError
from streamrag.sources.fusion import reciprocal_rank_fusion
from streamrag.support.messages import message_of

PACE_WEIGHT = 0.2
"""Weight of the newest time in a running mean."""


class Refinement:
    """The `k` best passages, by whatever is known so far.

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
        """Whether this ranking changes what is best. It takes the place of the one that had that name."""
        self.rankings[name] = tuple(ranking)
        self.fused = reciprocal_rank_fusion(tuple(self.rankings.values()))
        return self._become(self.fused)

    def score(self, batch: Sequence[Chunk], scores: Sequence[float]) -> bool:
        """Whether the scores of these passages, the next ones of `fused`, change what is best."""
        self._scored += zip(scores, batch, strict=True)
        self._scored.sort(key=lambda scored: -scored[0])  # of equals, the one that was fused higher stays first
        return self._become((*(chunk for _, chunk in self._scored), *self.fused[len(self._scored) :]))

    def _become(self, ranked: Sequence[Chunk]) -> bool:
        before, self.best = self.best, tuple(ranked[: self._k])
        return self.best != before


class Pace:
    """How long something took lately, as a running mean; infinity until it is known."""

    def __init__(self) -> None:
        self.mean_s = inf

    def note(self, took_s: float) -> None:
        """It took so long just now."""
        self.mean_s = took_s if self.mean_s == inf else self.mean_s + PACE_WEIGHT * (took_s - self.mean_s)


class Failures:
    """The parts that failed for one query. Those of a source that was closed are raised: nothing is to be kept then."""

    def __init__(self, is_open: Callable[[], bool]) -> None:
        self._is_open = is_open
        self.errors: list[Exception] = []
        self.missing: list[str] = []

    @contextmanager
    def noted(self, what: str) -> Iterator[None]:
        """What fails in the block is noted, but for mistakes of the program, which are raised."""
        try:
            yield
        except Exception as error:
            if not self._is_open() or (isinstance(error, StreamRagError) and not isinstance(error, SourceError)):
                raise
            self.errors.append(error)
            self.missing.append(f"{what} failed: {message_of(error)}")
