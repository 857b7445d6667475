"""Pairs of a comparison with given times."""

from streamrag import Chunk
from streamrag.telemetry import Answer, Answered, ChunkArrived, QueryEvent, Timings
from streamrag_bench.compare.pairs import AskedPair, ComparedGroup


def events(
    *,
    retrieval_s: float = 1.0,
    first_chunk_s: float | None = 0.5,
    ttft_s: float = 2.0,
    total_s: float = 3.0,
    token_ids: tuple[int, ...] = (1, 2),
    num_invalidated: int = 0,
) -> list[QueryEvent]:
    """The events of a query whose prompt has 100 tokens."""
    answer = Answer(
        text="An answer.",
        token_ids=token_ids,
        finish_reason="stop",
        num_prompt_tokens=100,
        num_invalidated=num_invalidated,
        is_exact=True,
        submitted_s=0.0,
        timings=Timings(0.0, first_chunk_s, retrieval_s, ttft_s, ttft_s - retrieval_s, total_s),
    )
    chunks = [] if first_chunk_s is None else [ChunkArrived(first_chunk_s, Chunk("alpha", "a.md"))]
    return [*chunks, Answered(total_s, answer)]


def group_of(*pairs: tuple[list[QueryEvent], list[QueryEvent]], name: str = "crawl") -> ComparedGroup:
    """A group of pairs, streaming and not, that were asked one at a time."""
    return ComparedGroup(name, [(AskedPair("Why?", *pair),) for pair in pairs])
