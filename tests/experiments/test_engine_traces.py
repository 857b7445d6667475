"""The recorded traces on the engine and in its simulation: which ways there are, and whether their order agrees."""

from dataclasses import replace

import pytest

from bench.tests.made import made_result
from experiments import engine_traces
from experiments.engine_traces import FOLDER, MAX_CONTEXT_TOKENS, TRACES, UTILISATION, Measured, groups_of, orders, rate
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.trace.read import read_trace
from streamrag_bench.workload import fit_contexts, make_load

CRAWL, SEARCH = (FOLDER / f"{name}.jsonl.gz" for name in TRACES)
PROFILE = TableProfile("made-up", "none", ((1, 0.01), (1_024, 0.11)), 0.0, 0.0, 0)


def test_the_trace_of_a_search_has_no_sessions_of_vllm_s_own() -> None:
    crawl, search = ([way.name for ways in groups_of(read_trace(path)) for way in ways] for path in (CRAWL, SEARCH))
    assert crawl == ["not streaming", "warming", "vLLM's own sessions", "the paper's FCFS", "streamrag"]
    assert set(crawl) - set(search) == {"vLLM's own sessions"}


def test_the_rate_keeps_the_engine_busy_for_half_of_the_time() -> None:
    for path in (CRAWL, SEARCH):
        trace, found = read_trace(path), Measured(path=path)
        way = groups_of(trace)[0][0]
        cell = found.cell(way, profile="any")
        queries = fit_contexts(cell, make_load(cell, trace), None).queries
        lengths = [sum(c.num_tokens for c in _last(query.events)) for query in queries]
        assert max(lengths) <= MAX_CONTEXT_TOKENS
        busy_s = UTILISATION * len(queries) / rate(queries, PROFILE)
        tokens_s = sum(lengths) * 0.1 / 1_023
        assert tokens_s < busy_s < 1.3 * tokens_s


def _last(events):
    return [e.chunk for e in events] if hasattr(events[-1], "chunk") else events[-1].chunks


def test_orders_are_compared_where_both_tell_ways_apart() -> None:
    def row(way: str, real: float, simulated: float) -> dict[str, object]:
        seconds = {f"{rank}_{w}": s for rank in ("p50", "p95") for w, s in (("real", real), ("simulated", simulated))}
        return {"trace": "t", "way": way, **seconds}

    rows = [row("a", 1.0, 1.0), row("b", 2.0, 1.05), row("c", 3.0, 4.0), row("d", 3.5, 2.0)]
    told = list(orders(rows))
    assert told[0] == (
        "t, P50: 4 of 5 pairs that are told apart in both have the same order, 1 are not told apart; not: c and d"
    )
    assert len(told) == 2 * len(engine_traces.PERCENTILES) // 2


def test_rows_are_medians_over_the_turns_of_a_way() -> None:
    way = engine_traces.OURS[1]
    runs = []
    for seconds in (1.0, 3.0, 2.0):
        cell = Measured(path=CRAWL).cell(way, profile="any")
        result = made_result(cell)
        requests = tuple(replace(r, first_token_s=r.retrieval_end_s + seconds) for r in result.requests)
        runs.append(
            engine_traces.validity.Run(way, 1, replace(result, requests=requests), [replace(result, requests=requests)])
        )
    (row,) = engine_traces.rows_of(Measured(path=CRAWL, runs=runs))
    assert (row["trace"], row["way"], row["num_turns"]) == ("crawl-python-docs", "streamrag", 3)
    assert row["p50_real"] == row["p95_simulated"] == pytest.approx(2.0)
