"""The public benchmark's load: its statistics and its seeds."""

import itertools
from itertools import pairwise

import pytest

from streamrag.errors import ConfigurationError
from streamrag.trace.values import Trace, TracedUpdate, chunks_of
from streamrag_bench.public.workload import PublicLoad, make_trace, read_statistics
from streamrag_bench.trace.statistics import describe

LENGTHS, RETRIEVALS = ("ragpulse", "mooncake", "azure"), ("crawl", "search", "recorded-crawl", "recorded-search")


def load(**changes: object) -> PublicLoad:
    return PublicLoad(**{"num_queries": 300, **changes})  # type: ignore[arg-type]


def key_lengths(trace: Trace) -> dict[str, set[int]]:
    lengths: dict[str, set[int]] = {}
    for chunk in (chunk for query in trace.queries for event in query.events for chunk in chunks_of(event)):
        lengths.setdefault(chunk.key, set()).add(chunk.num_tokens)
    return lengths


def test_every_table_is_ascending_and_has_a_value_for_each_rank() -> None:
    statistics = read_statistics()
    assert statistics["format"] == 1
    for group in ("lengths", "retrieval"):
        for tables in statistics[group].values():
            for table in (value for value in tables.values() if isinstance(value, list)):
                assert len(table) == len(statistics["ranks"])
                assert sorted(table) == table
                assert table[0] >= 0


@pytest.mark.parametrize(("lengths", "retrieval"), itertools.product(LENGTHS, RETRIEVALS))
def test_a_load_has_the_statistics_that_it_is_drawn_from(lengths: str, retrieval: str) -> None:
    tables = {**read_statistics()["lengths"][lengths], **read_statistics()["retrieval"][retrieval]}
    trace = make_trace(load(lengths=lengths, retrieval=retrieval, qps=4.0), 1)
    found = describe(trace)
    assert found.mode == tables["mode"]
    assert found.qps == pytest.approx(4.0, rel=0.1)
    # The median is the table's; a rank's neighbours bound what 300 stratified draws can differ.
    first = sorted(next(e.at_s for e in query.events if e.at_s > 0) for query in trace.queries)
    assert tables["first_s"][4] <= first[150] <= tables["first_s"][6]
    gaps = sorted(b.at_s - a.at_s for query in trace.queries for a, b in pairwise(e for e in query.events if e.at_s))
    assert tables["gaps_s"][4] <= gaps[len(gaps) // 2] <= tables["gaps_s"][6]
    if lengths != "ragpulse":  # whose contexts have a system prompt and a history too
        tokens = found.tokens_per_query.percentile(50)
        assert tables["retrieved_tokens"][4] <= tokens <= tables["retrieved_tokens"][6]
    assert {len(sizes) for sizes in key_lengths(trace).values()} == {1}, "a key stands for the same tokens"


def test_a_seed_decides_everything_and_another_seed_makes_another_load() -> None:
    assert make_trace(load(), 1) == make_trace(load(), 1)
    assert make_trace(load(), 1) != make_trace(load(), 2)
    slow, fast = make_trace(load(qps=1.0), 1), make_trace(load(qps=2.0), 1)
    assert [q.events for q in slow.queries] == [q.events for q in fast.queries]
    assert slow.queries[-1].arrival_s == pytest.approx(2 * fast.queries[-1].arrival_s)


def test_system_prompts_are_shared_and_known_before_retrieval() -> None:
    queries = make_trace(load(retrieval="search"), 1).queries
    known = [chunks_of(query.events[0]) for query in queries]
    assert all(query.events[0].at_s == 0 for query in queries)
    assert 2 <= len({chunks[0].key for chunks in known}) <= 4
    assert len({chunks[1].key for chunks in known}) == len(queries)
    for query in queries:
        assert all(isinstance(event, TracedUpdate) for event in query.events)
        assert {chunks_of(event)[:2] for event in query.events} == {chunks_of(query.events[0])}


def test_a_load_of_warm_up_alone_or_an_unknown_trace_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="5 queries warm up, of 5"):
        load(num_queries=5, num_warm_up=5)
    with pytest.raises(ConfigurationError, match="lengths"):
        load(lengths="burstgpt")
