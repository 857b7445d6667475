"""Generated workloads have the published statistics; what is left open is plausible."""

import argparse
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from streamrag.cli.trace.command import add_generate_arguments
from streamrag.errors import ConfigurationError
from streamrag.trace.generate.distributions import Marginal, apportion, couple, stratified_counts
from streamrag.trace.generate.workloads import (
    MAX_CONTEXT_TOKENS,
    NUM_DOCUMENTS,
    WorkloadName,
    anns,
    crawler,
    generate,
)
from streamrag.trace.read import read_trace
from streamrag.trace.statistics import contexts, describe, num_common_tokens
from streamrag.trace.values import Trace, TracedAppend, TracedUpdate

# The Stream2LLM paper and its artifact; `first_chunk_to_end_s` follows from the gaps and chunk events per query.
PUBLISHED = {
    "crawler": {
        "tokens_per_query": {"mean": 8889, "p50": 5749, "p75": 11167, "p95": 28372},
        "retrieval_s": {"mean": 9.22, "p50": 8.67, "p95": 16.40},
        "gap_ms": {"mean": 1053, "p50": 701, "p95": 3078, "p99": 5293},
        "chunks_per_query": {"mean": 7.86, "max": 17},
        "first_chunk_to_end_s": {"mean": 6.86 * 1.053},
    },
    "anns": {
        "tokens_per_query": {"mean": 13006, "p50": 10126, "p75": 14615, "p95": 30618},
        "retrieval_s": {"mean": 4.47, "p50": 3.90, "p95": 8.51},
        "gap_ms": {"mean": 157, "p50": 36.7, "p95": 699, "p99": 2079},
        "chunks_per_query": {"mean": 4.42, "max": 26},
        "first_chunk_to_end_s": {"mean": 3.42 * 0.157},
    },
}
TAILS = {"p95", "p99"}


def distances(trace: Trace, workload: str) -> dict[str, float]:
    """How far each published statistic is off, as a share of it."""
    generated = describe(trace).as_dict()
    return {
        f"{name}.{figure}": generated[name][figure] / value - 1
        for name, figures in PUBLISHED[workload].items()
        for figure, value in figures.items()
    }


def share_that_invalidates(trace: Trace, tokens_per_s: float) -> float:
    """Share of the queries that invalidate over 10,000 tokens alone on an engine that prefills at this rate."""
    num_over = 0
    for query in trace.queries:
        num_computed = num_invalidated = 0.0
        for (old, new), (before, after) in zip(pairwise(contexts(query.events)), pairwise(query.events), strict=True):
            num_tokens = sum(chunk.num_tokens for chunk in old)
            num_computed = min(num_tokens, num_computed + tokens_per_s * (after.at_s - before.at_s))
            lcp = num_common_tokens(old, new)
            num_invalidated += max(0.0, num_computed - lcp)
            num_computed = min(num_computed, lcp)
        num_over += num_invalidated > 10_000
    return num_over / len(trace.queries)


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("workload", ["crawler", "anns"])
def test_every_published_statistic_holds_at_the_published_size(workload: WorkloadName, seed: int) -> None:
    off = distances(generate(workload, seed=seed), workload)
    assert {name: by for name, by in off.items() if abs(by) > (0.10 if name[-3:] in TAILS else 0.05)} == {}


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_500_crawler_queries_are_close_too(seed: int) -> None:
    off = distances(generate("crawler", 500, seed), "crawler")
    assert {name: by for name, by in off.items() if abs(by) > 0.05} == {}


def test_the_published_sizes_are_the_defaults() -> None:
    assert (len(generate("crawler").queries), len(generate("anns").queries)) == (4322, 500)


def test_most_crawls_have_six_to_ten_chunks_and_most_searches_up_to_three() -> None:
    crawls, searches = (describe(generate(name)).chunks_per_query.values for name in ("crawler", "anns"))
    assert sum(6 <= num <= 10 for num in crawls) > 0.7 * len(crawls)
    assert 0.50 < sum(num <= 3 for num in searches) / len(searches) < 0.55


@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize("long_window", ["first", "last"])
def test_more_than_a_tenth_of_the_searches_invalidate_over_10000_tokens(long_window: str, seed: int) -> None:
    """Published of an engine of two H200s, at every load: these are its speed alone, and half of it."""
    trace = generate("anns", seed=seed, long_window=long_window)  # type: ignore[arg-type]
    assert 0.10 < share_that_invalidates(trace, 30_000) < share_that_invalidates(trace, 60_000) < 0.35
    assert describe(trace).num_invalidated.share_over(10_000) == pytest.approx(0.46, abs=0.04)


def test_a_search_changes_more_of_its_prompt_the_less_its_best_ranks_settle() -> None:
    shares = [describe(anns(rank_bias=bias)).changed_share.mean for bias in (1, 2, 6)]
    assert shares == pytest.approx([0.54, 0.38, 0.20], abs=0.03)


@pytest.mark.parametrize("workload", ["crawler", "anns"])
@pytest.mark.parametrize("num_queries", [1, 2, 3, 50, None])
def test_a_trace_is_valid(workload: WorkloadName, num_queries: int | None) -> None:
    kind = {"crawler": TracedAppend, "anns": TracedUpdate}[workload]
    trace = generate(workload, num_queries, seed=7)
    assert [query.arrival_s for query in trace.queries] == sorted(query.arrival_s for query in trace.queries)
    assert len({query.query_id for query in trace.queries}) == len(trace.queries)
    for query in trace.queries:
        times = [event.at_s for event in query.events]
        assert times[0] > 0
        assert all(before < after for before, after in pairwise(times))
        assert query.end_s == times[-1]
        assert {type(event) for event in query.events} == {kind}


def test_keys_stand_for_one_length_and_no_query_shares_any() -> None:
    seen: set[str] = set()
    for workload in ("crawler", "anns"):
        for query in generate(workload).queries:
            chunks = {chunk for context in contexts(query.events) for chunk in context}
            keys = {chunk.key for chunk in chunks}
            assert len(keys) == len(chunks)
            assert not keys & seen
            assert min(chunk.num_tokens for chunk in chunks) >= 1
            seen |= keys


@pytest.mark.parametrize("seed", range(5))
def test_every_update_brings_one_document_and_no_pool_is_too_long(seed: int) -> None:
    for query in anns(seed=seed).queries:
        pools = list(contexts(query.events))
        assert {len(pool) for pool in pools} == {NUM_DOCUMENTS}
        assert max(sum(chunk.num_tokens for chunk in pool) for pool in pools) <= MAX_CONTEXT_TOKENS
        assert all(len(set(new) - set(old)) == 1 for old, new in pairwise(pools))


def test_the_long_window_can_be_the_last_one() -> None:
    """The windows of each query are the same, in another order: the artifact's gaps are those between their starts."""
    early, late = anns(100, long_window="first"), anns(100, long_window="last")
    for a, b in zip(early.queries, late.queries, strict=True):
        starts = [0.0, *(event.at_s for event in b.events[:-1])]
        gaps = [after.at_s - before.at_s for before, after in pairwise(a.events)]
        assert gaps == pytest.approx([after - before for before, after in pairwise(starts)])
        assert a.end_s == pytest.approx(b.end_s)
    assert describe(late).first_chunk_to_end_s.mean > 5 * describe(early).first_chunk_to_end_s.mean


def test_a_lower_rate_stretches_the_same_arrivals() -> None:
    slow, fast = crawler(200, qps=0.5), crawler(200, qps=4.0)
    assert [query.arrival_s for query in slow.queries] == pytest.approx([8 * query.arrival_s for query in fast.queries])
    assert [query.events for query in slow.queries] == [query.events for query in fast.queries]
    assert describe(crawler(seed=1, qps=2.0)).qps == pytest.approx(2.0, rel=0.05)


def test_a_seed_makes_the_same_trace_in_every_process() -> None:
    code = "from streamrag.trace.generate import anns, crawler; print((crawler(20, 3), anns(20, 3)))"
    runs = [
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": n}
        )
        for n in ("1", "2")
    ]
    assert runs[0].stdout == runs[1].stdout == f"{(crawler(20, 3), anns(20, 3))}\n"
    assert crawler(20, 3).queries != crawler(20, 4).queries


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("web",), "workload='web'"),
        (("crawler", 0), "num_queries=0"),
        (("anns", 10, 1, 0.0), "qps=0"),
        (("anns", 10, 1, float("nan")), "qps=nan"),
    ],
)
def test_values_that_cannot_work_are_named(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        generate(*arguments)  # type: ignore[arg-type]


def test_options_of_a_search_that_cannot_work_are_named() -> None:
    with pytest.raises(ConfigurationError, match="long_window='both'"):
        anns(1, long_window="both")  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="rank_bias=0"):
        anns(1, rank_bias=0)


def test_the_command_writes_what_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl.gz"
    status = main("generate", "anns", "--queries", "30", "--seed", "5", "--output", str(path))
    assert status == 0
    assert f"{path}: 30 queries of" in capsys.readouterr().err
    written, made = read_trace(path), anns(30, 5)
    assert describe(written).tokens_per_query == describe(made).tokens_per_query
    assert [query.end_s for query in written.queries] == pytest.approx(
        [query.end_s for query in made.queries], abs=1e-6
    )
    assert written.provenance["generator"] == "anns"


def main(*arguments: str) -> int:
    parser = argparse.ArgumentParser()
    add_generate_arguments(parser)
    parsed = parser.parse_args(arguments[1:])
    status: int = parsed.run(parsed)
    return status


def test_a_marginal_passes_through_its_points_at_every_seed() -> None:
    marginal = Marginal(((0.01, 2.0), (0.5, 10.0), (0.9, 100.0), (0.99, 200.0)))
    for seed in range(5):
        values = marginal.sample(1001, Random(seed))
        assert values == sorted(values)
        assert (values[0], values[-1]) == pytest.approx((2.0, 200.0))
        assert values[500] == pytest.approx(10.0, rel=0.01)
        assert values[900] == pytest.approx(100.0, rel=0.02)


def test_counts_have_their_shares() -> None:
    drawn = stratified_counts((1, 0, 2, 1), 400, Random(1))
    assert [drawn.count(count) for count in (1, 2, 3, 4)] == [100, 0, 200, 100]


def test_coupling_keeps_the_order_of_the_scores() -> None:
    assert couple([0.3, 9.0, 0.1], [1.0, 2.0, 3.0]) == [2.0, 3.0, 1.0]


def test_apportioned_parts_have_the_total_and_are_never_empty() -> None:
    assert apportion(10, [1.0, 1.0, 2.0]) == [3, 3, 4]
    assert apportion(3, [1000.0, 1.0, 1.0]) == [1, 1, 1]
    assert apportion(11, [1e9, 1.0]) == [10, 1]
