"""Workloads with the statistics of the two in the Stream2LLM paper: crawled pages, and pools of a vector search.

At the published size, every seed reproduces every published percentile and mean. docs/traces.md lists the published
figures and the assumptions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import exp
from random import Random
from typing import Literal, TypeAlias

from streamrag.support.validation import Count, Positive, validated
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedEvent, TracedQuery, TracedUpdate
from streamrag_bench.trace.generate.distributions import Marginal, apportion, couple, stratified_counts
from streamrag_bench.trace.generate.timing import ChunkTiming, retrieval_windows

WorkloadName: TypeAlias = Literal["crawler", "anns"]
LongWindow: TypeAlias = Literal["first", "last"]


@dataclass(frozen=True, slots=True)
class Workload:
    name: WorkloadName
    num_queries: int
    tokens: Marginal
    """Tokens of a query's final context, without template and question."""
    num_events: tuple[int, ...]
    """Number of queries out of 1,000 with 1, 2, ... chunk events."""
    timing: ChunkTiming
    sigma_chunk: float
    """Standard deviation of the logarithm of a chunk's tokens, among the chunks of a query."""
    sigma_query: float
    """Standard deviation of the logarithm of the factor that all chunks of a query share."""
    max_sigmas: float
    """Maximum of a chunk's length above the median, in units of `sigma_chunk`, before scaling to its query."""

    def length(self, rng: Random) -> float:
        """Draw a chunk's relative length: log-normal with median 1, cut at `max_sigmas`."""
        return exp(self.sigma_chunk * min(rng.gauss(), self.max_sigmas))


# Published: P50, P75 and P95 of tokens; P50 and P95 of duration; P50, P95 and P99 of gaps; mean and largest
# number of chunk events. The other points are chosen so that the published means hold too.
CRAWLER = Workload(
    name="crawler",
    num_queries=4322,
    tokens=Marginal(
        (
            (0.0002, 150),
            (0.05, 870),
            (0.25, 3050),
            (0.5, 5749),
            (0.75, 11167),
            (0.95, 28372),
            (0.99, 47000),
            (0.9999, 98000),
        )
    ),
    num_events=(4, 8, 16, 32, 68, 124, 177, 200, 161, 107, 55, 25, 12, 6, 3, 1, 1),
    timing=ChunkTiming(
        duration_s=Marginal(((0.0002, 1.6), (0.25, 6.6), (0.5, 8.67), (0.75, 11.4), (0.95, 16.4), (0.9999, 30))),
        gap_s=Marginal(
            ((0.0002, 0.015), (0.25, 0.38), (0.5, 0.701), (0.75, 1.395), (0.95, 3.078), (0.99, 5.293), (0.9999, 15))
        ),
        long_window_s=1.9,
        sigma_long_window=0.3,
        min_long_window_s=0.4,
    ),
    sigma_chunk=1.2,
    sigma_query=0.75,
    max_sigmas=3.0,
)
ANNS = Workload(
    name="anns",
    num_queries=500,
    tokens=Marginal(
        ((0.002, 2500), (0.25, 7700), (0.5, 10126), (0.75, 14615), (0.95, 30618), (0.99, 53000), (0.9985, 88000))
    ),
    num_events=(194, 178, 145, 115, 89, 68, 53, 40, 31, 24, 17, 12, 9, 7, 5, 4, 2, 2, 1, 1, 0, 1, 0, 1, 0, 1),
    timing=ChunkTiming(
        duration_s=Marginal(((0.002, 1.2), (0.25, 2.9), (0.5, 3.9), (0.75, 5.5), (0.95, 8.51), (0.9985, 18.5))),
        gap_s=Marginal(
            ((0.0005, 0.0003), (0.25, 0.012), (0.5, 0.0367), (0.75, 0.105), (0.95, 0.699), (0.99, 2.079), (0.9995, 9))
        ),
        long_window_s=3.5,
        sigma_long_window=0.45,
        min_long_window_s=0.2,
    ),
    sigma_chunk=1.0,
    sigma_query=0.4,
    max_sigmas=2.0,
)
NUM_DOCUMENTS = 10  # documents in every pool of the ANNS workload
MAX_CONTEXT_TOKENS = 120_000
"""Maximum tokens of a pool of the ANNS workload, so that prompts fit the published model's 131,072."""


@validated
def generate(
    workload: WorkloadName,
    num_queries: Count | None = None,
    seed: int = 1,
    qps: Positive = 1.0,
    *,
    long_window: LongWindow = "first",
) -> Trace:
    """Generate a workload of `num_queries`, by default of the published size. `long_window` applies to `anns`.

    :raises ConfigurationError: an unknown workload or long window, no query, or a rate that is not positive.
    """
    if workload == "crawler":
        return crawler(CRAWLER.num_queries if num_queries is None else num_queries, seed, qps)
    return anns(ANNS.num_queries if num_queries is None else num_queries, seed, qps, long_window=long_window)


@validated
def crawler(num_queries: Count = 4322, seed: int = 1, qps: Positive = 1.0) -> Trace:
    """Return a trace of queries whose context grows by appends: a search result, then pages as they are crawled.

    Arrivals are random, `qps` in a second. Chunks have a length, but no text. Equal arguments give equal traces.

    :raises ConfigurationError: no query, or a rate that is not positive.
    """
    rng = Random(f"crawler-{seed}")
    windows = retrieval_windows(CRAWLER.timing, stratified_counts(CRAWLER.num_events, num_queries, rng), rng)
    lengths = [[CRAWLER.length(rng) for _ in each] for each in windows]
    totals = _totals(CRAWLER, lengths, rng)
    events = []
    for i, (times, total) in enumerate(zip(windows, totals, strict=True)):
        chunks = [TracedChunk(f"crawler-{i}-{j}", num) for j, num in enumerate(apportion(total, lengths[i]))]
        events.append([TracedAppend(at_s, chunk) for at_s, chunk in zip(accumulate(times), chunks, strict=True)])
    return _trace(CRAWLER, events, seed, qps)


@validated
def anns(
    num_queries: Count = 500,
    seed: int = 1,
    qps: Positive = 1.0,
    *,
    long_window: LongWindow = "first",
    rank_bias: Count = 2,
) -> Trace:
    """Return a trace of queries whose context is replaced as the search refines: pools of ten documents by rank.

    A search has one long window of several seconds, and short gaps. With `long_window="first"` the long window precedes
    the first pool, and the gaps are between updates. With "last" it precedes the final pool, and the gaps are between
    the starts of the windows, as the paper's artifact measures them.

    Each update inserts one document into the pool, and drops the last one. The new document's rank is the maximum of
    `rank_bias` uniformly drawn ranks: 1 is uniform; with more, the best ranks settle first. Chunks have no text.

    :raises ConfigurationError: no query, a rate that is not positive, an unknown long window, or a `rank_bias` below 1.
    """
    rng = Random(f"anns-{seed}")
    windows = retrieval_windows(ANNS.timing, stratified_counts(ANNS.num_events, num_queries, rng), rng)
    pools = [_pools(len(each), rank_bias, rng) for each in windows]
    lengths = [[ANNS.length(rng) for _ in range(NUM_DOCUMENTS + len(each) - 1)] for each in pools]
    totals = _totals(ANNS, [[each[j] for j in pool[-1]] for each, pool in zip(lengths, pools, strict=True)], rng)
    events = []
    for i, (times, total) in enumerate(zip(windows, totals, strict=True)):
        documents = _documents(i, total, lengths[i], pools[i])
        ordered = times if long_window == "first" else (*times[1:], times[0])
        updates = zip(accumulate(ordered), pools[i], strict=True)
        events.append([TracedUpdate(at_s, tuple(documents[j] for j in pool)) for at_s, pool in updates])
    return _trace(ANNS, events, seed, qps, long_window=long_window, rank_bias=rank_bias)


def _totals(workload: Workload, lengths: Sequence[Sequence[float]], rng: Random) -> list[int]:
    """Draw the tokens of each query from the marginal; queries with more or longer chunks get more."""
    scores = [sum(each) * rng.lognormvariate(0, workload.sigma_query) for each in lengths]
    return [round(total) for total in couple(scores, workload.tokens.sample(len(scores), rng))]


def _pools(num_pools: int, rank_bias: int, rng: Random) -> list[tuple[int, ...]]:
    """Draw the pools of a search: document indices in rank order, numbered by discovery, from 0.

    Each pool is the one before without its last document, and with a new one at a random rank.
    """
    pools = [tuple(range(NUM_DOCUMENTS))]
    for document in range(NUM_DOCUMENTS, NUM_DOCUMENTS + num_pools - 1):
        rank = max(rng.randrange(NUM_DOCUMENTS) for _ in range(rank_bias))
        pools.append((*pools[-1][:rank], document, *pools[-1][rank:-1]))
    return pools


def _documents(query: int, total: int, lengths: Sequence[float], pools: Sequence[tuple[int, ...]]) -> list[TracedChunk]:
    """Return a document without text for each length, with tokens in proportion; the last pool has `total` of them.

    pools: document indices of each pool; documents that are not in the last one shrink, all by one factor, until each
        pool has about `MAX_CONTEXT_TOKENS` at most.
    """
    final = pools[-1]
    num_tokens = dict(zip(final, apportion(total, [lengths[j] for j in final]), strict=True))
    per_length = total / sum(lengths[j] for j in final)
    superseded = {j: per_length * length for j, length in enumerate(lengths) if j not in num_tokens}
    shrink = 1.0
    for pool in pools[:-1]:
        room = MAX_CONTEXT_TOKENS - sum(num_tokens.get(j, 0) for j in pool)
        shrink = max(shrink, sum(superseded.get(j, 0.0) for j in pool) / room)
    num_tokens |= {j: max(1, int(num / shrink)) for j, num in superseded.items()}
    return [TracedChunk(f"anns-{query}-{j}", num_tokens[j]) for j in range(len(lengths))]


def _trace(
    workload: Workload, events: Sequence[Sequence[TracedEvent]], seed: int, qps: float, **settings: str | int
) -> Trace:
    """Return a trace of queries with these events and Poisson arrivals; another rate scales the same arrivals.

    Retrieval ends with a query's last event. All arguments but the events are in the provenance.
    """
    arrivals = _poisson_arrivals(f"{workload.name}-{seed}-arrivals", len(events), qps)
    queries = tuple(
        TracedQuery(
            query_id=f"{workload.name}-{i}",
            arrival_s=arrival_s,
            text=f"Question {i} of the generated {workload.name} workload?",
            events=tuple(each),
            end_s=each[-1].at_s,
        )
        for i, (arrival_s, each) in enumerate(zip(arrivals, events, strict=True))
    )
    return Trace(
        queries, {"generator": workload.name, "num_queries": len(queries), "seed": seed, "qps": qps, **settings}
    )


def _poisson_arrivals(seed: str, num_queries: int, qps: float) -> list[float]:
    """Return the seconds at which queries of a Poisson process arrive; another rate scales the same times."""
    rng = Random(seed)
    return [arrival / qps for arrival in accumulate(rng.expovariate(1.0) for _ in range(num_queries))]
