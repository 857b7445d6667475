import pytest

from streamrag.trace.statistics import Distribution, contexts, describe, num_common_tokens
from streamrag.trace.values import (
    Trace,
    TracedAppend,
    TracedChunk,
    TracedEvent,
    TracedQuery,
    TracedSkip,
    TracedUpdate,
)

A, B, C = (TracedChunk(key, num_tokens) for key, num_tokens in (("a", 100), ("b", 50), ("c", 10)))


def query(query_id: str, arrival_s: float, events: tuple[TracedEvent, ...], end_s: float = 9.0) -> TracedQuery:
    return TracedQuery(query_id, arrival_s, "why?", events, end_s)


def test_percentiles_are_interpolated_between_neighbours() -> None:
    values = Distribution.of([4, 1, 2, 3])
    assert [values.percentile(percent) for percent in (0, 50, 75, 100)] == [1, 2.5, 3.25, 4]
    assert (values.num, values.mean, values.min, values.max) == (4, 2.5, 1, 4)
    assert values.share_over(3) == 0.25
    assert values.summary()["p95"] == 3.85


def test_a_distribution_of_nothing_is_zero() -> None:
    nothing = Distribution.of([])
    assert set(nothing.summary().values()) == {0}
    assert nothing.share_over(0) == 0


def test_appends_extend_and_updates_replace_the_context() -> None:
    events = (TracedAppend(1, A), TracedAppend(2, B), TracedUpdate(3, (B, C)), TracedAppend(4, A))
    assert list(contexts(events)) == [(A,), (A, B), (B, C), (B, C, A)]


def test_the_common_prefix_ends_at_the_first_chunk_that_differs() -> None:
    assert num_common_tokens((A, B, C), (A, B)) == 150
    assert num_common_tokens((A, B), (B, A)) == 0
    assert num_common_tokens((A, B, C), (A, C, B)) == 100


def test_a_crawl_is_described() -> None:
    crawl = query("1", 0.0, (TracedAppend(1.0, A), TracedAppend(1.5, B), TracedAppend(3.0, C)), end_s=4.0)
    found = describe(Trace((crawl, query("2", 2.0, (TracedAppend(2.0, A),), end_s=2.0), query("3", 4.0, (), 1.0))))
    assert (found.num_queries, found.mode, found.qps, found.has_text) == (3, "append", 0.5, False)
    assert found.tokens_per_query.values == (0, 100, 160)
    assert found.chunks_per_query.values == (0, 1, 3)
    assert found.gap_ms.values == (500, 1500)
    assert found.retrieval_s.values == (1, 2, 4)
    assert found.first_chunk_s.values == (1, 2)
    assert found.first_chunk_to_end_s.values == (0, 3)
    assert found.num_invalidated.values == (0, 0, 0)
    assert found.changed_share.num == 0
    assert found.prefix_seen_share == 100 / 260  # the second query's only chunk is the first one's first
    assert found.interarrival_s.values == (2, 2)


def test_a_search_is_described() -> None:
    updates = (TracedUpdate(1, (A, B)), TracedUpdate(2, (A, C)), TracedUpdate(3, (B, A)), TracedUpdate(4, ()))
    found = describe(Trace((query("1", 0.0, updates),)))
    assert found.mode == "update"
    assert found.changed_share.values == (pytest.approx(10 / 110), 1.0)  # an update to nothing has no share
    assert found.num_invalidated.values == (50 + 110 + 150,)
    assert found.tokens_per_chunk.values == (10, 50, 100)  # each chunk once
    assert found.qps == 0


def test_queries_with_one_event_each_are_plain_and_others_can_be_mixed() -> None:
    assert describe(Trace((query("1", 0.0, (TracedUpdate(0, (A, B)),)),))).mode == "plain"
    assert describe(Trace((query("1", 0.0, (TracedUpdate(0, (A,)), TracedAppend(1, B))),))).mode == "mixed"


def test_failed_queries_and_skipped_pages_are_counted() -> None:
    failed = TracedQuery("1", 0.0, "why?", (), 1.0, skipped=(TracedSkip(0.5, "x", "gone"),), outcome="failed")
    found = describe(Trace((failed,)))
    assert (found.num_incomplete, found.num_skipped) == (1, 1)


def test_an_empty_trace_has_statistics_too() -> None:
    assert describe(Trace(())).as_dict()["tokens_per_query"]["mean"] == 0
