"""What the retrievers of generated workloads could say."""

from dataclasses import replace

import pytest

from streamrag.trace.values import Trace, TracedQuery
from streamrag_bench.trace.generate import anns, crawler
from streamrag_bench.trace.generate.hints import USUAL_DURATION_S, USUAL_GAP_S, with_hints


def without_hints(trace: Trace) -> tuple[TracedQuery, ...]:
    return tuple(replace(q, events=tuple(replace(e, hint=None) for e in q.events)) for q in trace.queries)


@pytest.mark.parametrize("plain", [crawler(30), anns(30, long_window="last")])
def test_hints_change_nothing_else(plain: Trace) -> None:
    for kind in ("estimated", "exact"):
        hinted = with_hints(plain, kind)
        assert all(event.hint for query in hinted.queries for event in query.events)
        assert without_hints(hinted) == plain.queries


def test_an_exact_hint_is_the_end_itself() -> None:
    for query in with_hints(anns(20), "exact").queries:
        for left, event in enumerate(reversed(query.events)):
            assert event.hint
            assert event.hint.num_chunks == left
            assert event.hint.end_s is not None
            assert event.at_s + event.hint.end_s == pytest.approx(query.end_s)


def test_a_crawl_expects_the_pages_in_its_queue_at_the_mean_gap_so_far() -> None:
    first, second, *_, last = with_hints(crawler(5), "estimated").queries[0].events
    assert first.hint
    assert second.hint
    assert last.hint
    num = first.hint.num_chunks
    assert num
    assert first.hint.end_s == pytest.approx(num * USUAL_GAP_S)
    mean_s = (USUAL_GAP_S + second.at_s - first.at_s) / 2
    assert (second.hint.num_chunks, second.hint.end_s) == (num - 1, pytest.approx((num - 1) * mean_s))
    assert (last.hint.num_chunks, last.hint.end_s) == (0, 0.0)


def test_an_estimate_uses_nothing_of_what_is_still_to_come() -> None:
    query = next(q for q in crawler(20).queries if len(q.events) > 4)
    later = tuple(replace(e, at_s=e.at_s + 7.0) if i > 2 else e for i, e in enumerate(query.events))
    both = [with_hints(Trace((replace(query, events=events),)), "estimated") for events in (query.events, later)]
    known, other = ([event.hint for event in trace.queries[0].events[:3]] for trace in both)
    assert known == other


def test_a_search_expects_to_take_as_long_as_usual() -> None:
    for query in with_hints(anns(20), "estimated").queries:
        for event in query.events:
            assert event.hint
            assert event.hint.num_chunks is None
            assert event.hint.end_s == pytest.approx(max(USUAL_DURATION_S - event.at_s, 0.0))
