"""Fusion of several rankings of passages into one."""

from collections.abc import Sequence
from dataclasses import replace

from streamrag.core import Chunk

RRF_K = 60
"""Source: Cormack, Clarke and Buettcher, "Reciprocal Rank Fusion", SIGIR 2009, where it is the best for most tasks."""


def reciprocal_rank_fusion(
    rankings: Sequence[Sequence[Chunk]], weights: Sequence[float] | None = None, *, k: float = RRF_K
) -> tuple[Chunk, ...]:
    """Return the chunks of all `rankings`, each best first, by decreasing sum of weight / (k + rank), ranks from 1.

    Chunks with the same text and uri are merged into the first of them. Ties are broken by the order of first
    appearance. Scores are removed, because scores of different retrievers are not comparable.
    """
    scores: dict[tuple[str, str], float] = {}
    chunks: dict[tuple[str, str], Chunk] = {}
    for weight, ranking in zip(weights or [1.0] * len(rankings), rankings, strict=True):
        ranks: dict[tuple[str, str], int] = {}  # the best rank, where a ranking has a text several times
        for rank, chunk in enumerate(ranking, 1):
            key = (chunk.uri, chunk.text)
            chunks.setdefault(key, chunk)
            ranks.setdefault(key, rank)
        for key, rank in ranks.items():
            scores[key] = scores.get(key, 0.0) + weight / (k + rank)
    return tuple(without_score(chunks[key]) for key in sorted(scores, key=lambda key: -scores[key]))


def without_score(chunk: Chunk) -> Chunk:
    """Return `chunk` without its score, which is not comparable with the scores of other retrievers."""
    return chunk if chunk.score is None else replace(chunk, score=None)
