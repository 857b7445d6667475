"""The load of the public benchmark, drawn from quantile tables of public traces and of published retrieval."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from itertools import accumulate, pairwise
from random import Random
from typing import Any, Literal, TypeAlias

from streamrag.errors import ConfigurationError
from streamrag.support.validation import Count, CountOrZero, Positive, validated
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedEvent, TracedQuery, TracedUpdate
from streamrag_bench.trace.generate.distributions import apportion

Lengths: TypeAlias = Literal["ragpulse", "mooncake", "azure"]  # the trace that lengths and arrivals are drawn from
Retrieval: TypeAlias = Literal["crawl", "search", "recorded-crawl", "recorded-search"]  # whose timing is drawn

NUM_DOCUMENTS = 10  # documents of a search's result, as in the generated workload "anns"
SIGMA_LENGTH = 0.5  # of the logarithm of a chunk's length among those of a query; an assumption of ours


@validated
@dataclass(frozen=True, slots=True)
class PublicLoad:
    """The settings that a load depends on, besides its seed; docs/public-benchmark.md has the meaning of each.

    :raises ConfigurationError: a value is invalid, or all queries are warm-up.
    """

    lengths: Lengths = "ragpulse"
    retrieval: Retrieval = "crawl"
    qps: Positive = 1.0
    num_queries: Count = 200
    num_warm_up: CountOrZero = 20
    num_output_tokens: Count = 64
    max_context_tokens: Count | None = None

    def __post_init__(self) -> None:
        if self.num_warm_up >= self.num_queries:
            raise ConfigurationError(
                f"{self.num_warm_up} queries warm up, of {self.num_queries}: none is left to count"
            )


@cache
def read_statistics() -> dict[str, Any]:
    """Return the committed quantile tables; `bench/studies/public_benchmark/load_statistics.py` makes them."""
    values: dict[str, Any] = json.loads((resources.files(__package__) / "statistics.json").read_text())
    return values


def make_trace(load: PublicLoad, seed: int) -> Trace:
    """Return the queries of one seed, in order of arrival from 0. Equal arguments give equal traces."""
    lengths = read_statistics()["lengths"][load.lengths]
    retrieval = read_statistics()["retrieval"][load.retrieval]
    rng, num = Random(f"public {load.lengths} {load.retrieval} {seed}"), load.num_queries
    gaps = _sample(lengths["arrival_gaps"], num, rng)
    scale = num / (math.fsum(gaps) * load.qps)
    arrivals = accumulate((gap * scale for gap in gaps[1:]), initial=0.0)
    names = ("system_tokens", "history_tokens", "retrieved_tokens")
    columns = [_sample(lengths[name], num, rng) for name in names]
    queries, is_update = [], retrieval["mode"] == "update"
    for number, row in enumerate(zip(arrivals, _draw_times(retrieval, num, rng), *columns, strict=True)):
        arrival_s, (times, end_s), system, history, retrieved = row
        query_id = f"{seed}-{number}"
        # Queries whose system prompts are equally long share the prompt, so its length is one of the table.
        system = min(lengths["system_tokens"], key=lambda entry: abs(entry - system))
        lengths_of = {f"system {system}": system, f"{query_id} history": round(history)}
        known = [TracedChunk(key, num_tokens) for key, num_tokens in lengths_of.items() if num_tokens]
        num_chunks = NUM_DOCUMENTS if is_update else len(times)
        weights = [rng.lognormvariate(0.0, SIGMA_LENGTH) for _ in range(num_chunks)]
        sizes = apportion(max(round(retrieved), num_chunks), weights)
        shares = _sample(retrieval["changed_share"], len(times), rng)
        events = (
            _updates(query_id, known, times, sizes, shares) if is_update else _appends(query_id, known, times, sizes)
        )
        queries.append(TracedQuery(query_id, arrival_s, "", tuple(events), end_s))
    return Trace(tuple(queries), {"generator": "public", "seed": seed})


def _sample(table: Sequence[float], num: int, rng: Random) -> list[float]:
    """Draw one value from each of `num` equal slices of the ranks, linear between quantiles, in random order.

    So each seed has the percentiles of the table.
    """
    values = []
    for number in range(num):
        rank = (number + rng.random()) / num
        points = pairwise(zip(read_statistics()["ranks"], table, strict=True))
        (left, low), (right, high) = next(pair for pair in points if rank <= pair[1][0])
        values.append(low + (high - low) * (rank - left) / (right - left))
    rng.shuffle(values)
    return values


def _draw_times(retrieval: Mapping[str, Any], num: int, rng: Random) -> Iterator[tuple[list[float], float]]:
    """Yield for each query the seconds of its chunk events, and of the end of retrieval."""
    counts = [max(round(value), 1) for value in _sample(retrieval["num_events"], num, rng)]
    firsts, ends = (_sample(retrieval[name], num, rng) for name in ("first_s", "end_s"))
    gaps = iter(_sample(retrieval["gaps_s"], sum(counts), rng))
    for count, first_s, end_s in zip(counts, firsts, ends, strict=True):
        times = list(accumulate((next(gaps) for _ in range(count - 1)), initial=first_s))
        yield times, times[-1] + end_s


def _appends(query_id: str, known: list[TracedChunk], times: list[float], sizes: list[int]) -> Iterator[TracedEvent]:
    """Yield the chunks known at the arrival, then a chunk at each time."""
    new = [TracedChunk(f"{query_id} {place}", size) for place, size in enumerate(sizes)]
    yield from map(TracedAppend, [0.0] * len(known) + times, known + new)


def _updates(
    query_id: str, known: list[TracedChunk], times: list[float], sizes: list[int], shares: list[float]
) -> Iterator[TracedEvent]:
    """Yield the chunks known at the arrival, then a list at each time, each of which replaces the one before.

    A share of its documents, at the end, changes, and their successors are as long.
    """
    if known:
        yield TracedUpdate(0.0, tuple(known))
    documents: list[TracedChunk] = []
    for version, (at_s, share) in enumerate(zip(times, shares, strict=True)):
        del documents[round(len(sizes) * (1 - share)) :]
        places = range(len(documents), len(sizes))
        documents += [TracedChunk(f"{query_id} {place}.{version}", sizes[place]) for place in places]
        yield TracedUpdate(at_s, (*known, *documents))
