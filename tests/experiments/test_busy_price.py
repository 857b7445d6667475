"""Chunks that are sent later, and the price of a busy time."""

from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any

import pytest

from experiments import busy_price
from experiments.busy_price import AS_THEY_COME, LOADS, SENDINGS, Sending, near_the_end, paced, prices, sent
from streamrag.bench.cell import CellSettings
from streamrag.bench.workload import load_trace
from streamrag.trace.values import TracedAppend, TracedQuery


def test_chunks_are_delayed_until_near_the_end_or_paced() -> None:
    arrivals = [0.0, 1.0, 1.2, 3.0]
    assert near_the_end(arrivals, 4.0, 1.5) == [2.5, 2.5, 2.5, 3.0]
    assert near_the_end(arrivals, 4.0, inf) == arrivals
    assert paced(arrivals, 4.0, 0.5) == [0.0, 1.0, 1.5, 3.0]
    assert paced(arrivals, 4.0, 2.0) == [0.0, 2.0, 2.0, 4.0]
    assert paced([0.0, 3.9], 4.0, 9.0) == [0.0, 4.0]


def queries(workload: str) -> tuple[TracedQuery, ...]:
    return load_trace(CellSettings("virtual", workload, "streaming", qps=1.0, num_queries=40)).queries


@pytest.mark.parametrize("sending", SENDINGS)
@pytest.mark.parametrize("workload", ["crawler", "anns-last"])
def test_delayed_sending_keeps_the_last_context_and_the_end_of_retrieval(workload: str, sending: Sending) -> None:
    for query in queries(workload):
        later = sent(query, sending)
        assert later.end_s == query.end_s
        times = [event.at_s for event in later.events]
        assert times == sorted(times)
        assert times[-1] <= query.end_s
        if isinstance(query.events[-1], TracedAppend):
            assert [replace(e, at_s=0) for e in later.events] == [replace(e, at_s=0) for e in query.events]
        else:
            assert replace(later.events[-1], at_s=0) == replace(query.events[-1], at_s=0)
            assert len(set(times)) == len(times), "of updates at one time only the last is sent"
    if sending == AS_THEY_COME:
        assert [sent(query, sending) for query in queries(workload)] == list(queries(workload))


def test_each_tenth_has_the_price_of_the_best_that_is_no_busier() -> None:
    load = LOADS[2]

    def row(name: str, busy: float, p95: float) -> dict[str, Any]:
        seconds = {"p50": p95 / 4, "p95": p95, "p99": 2 * p95}
        return {"load": load.name, "sent": name, "busy": busy, "busy_equal": busy, **seconds}

    rows = [row("not streaming", 1.0, 9.0), row(AS_THEY_COME.name, 1.55, 1.0), row("a", 1.42, 1.5), row("b", 1.3, 1.2)]
    told = list(prices(load, rows))
    assert told[0].startswith("anns-last 2 QPS, at most 1.50 times")
    assert "P50 1.20x, P95 1.20x, P99 1.20x of as they come, b" in told[0]
    assert told[1:] == ["anns-last 2 QPS: nothing measured is as little busy as 1.25 times not streaming"]
    # Beside not streaming with as many tokens a step, "a" is too busy for its tenth, and "b" has to be taken.
    rows[2]["busy"], rows[2]["busy_equal"] = 1.2, 1.42
    assert list(prices(load, rows)) == told
    assert busy_price.RULES.keys() == busy_price.DASHES.keys()


def test_not_streaming_has_our_budget_too_where_the_published_one_is_another(tmp_path: Path) -> None:
    for load in LOADS:
        cells = busy_price.cells_of(load._replace(num_queries=2), [1], tmp_path)
        assert (busy_price.EQUAL in cells) == (load.workload == "crawler")
    (equal,) = busy_price.cells_of(LOADS[0]._replace(num_queries=2), [1], tmp_path)[busy_price.EQUAL]
    assert (equal.arm, equal.max_num_batched_tokens) == ("no-streaming", busy_price.BUDGET)
