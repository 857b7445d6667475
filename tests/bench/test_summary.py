"""The figures of cells, against numpy and by hand."""

import json
import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made import made_result, settings

from streamrag.bench.summary import PERCENTILES, digest, parse_slos, percentile, spread, summarise
from streamrag.errors import ConfigurationError


@given(
    st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=200),
    st.sampled_from([0.0, 0.25, 0.5, 0.95, 0.99, 1.0]),
)
def test_percentiles_are_those_of_numpy(values: list[float], fraction: float) -> None:
    assert percentile(values, fraction) == pytest.approx(np.percentile(values, 100 * fraction), rel=1e-9, abs=1e-6)


def test_a_percentile_beside_an_infinite_value_is_finite() -> None:
    assert percentile([1.0, 2.0, math.inf], 0.5) == 2.0
    assert percentile([1.0, 2.0, math.inf], 0.75) == math.inf


def test_an_empty_list_has_no_percentile() -> None:
    assert math.isnan(percentile([], 0.5))


def test_a_summary_has_the_published_names_and_is_json() -> None:
    result = made_result(settings(workload="anns", eviction="cost"))
    made = summarise(digest(result), {"ttft_after_retrieval_s": 0.1})
    written = json.loads(json.dumps(made, allow_nan=False))
    assert written["settings"]["workload"] == "anns"
    assert {"p50", "p95", "p99", "max", "mean"} == set(written["ttft_after_retrieval_s"]) == set(written["ttft_s"])
    assert set(PERCENTILES) == set(written["floor_s"]) == set(written["ratio_to_floor"])
    assert set(written["num_preemptions"]) == {"swap", "recompute"}
    for name in ("num_tokens_invalidated", "num_tokens_recomputed", "busy_s", "completion_s", "goodput"):
        assert isinstance(written[name], int | float)


def test_the_figures_are_those_of_the_requests() -> None:
    result = made_result(settings(workload="anns", eviction="cost"))
    made = summarise(digest(result), {})
    after = [r.first_token_s - r.retrieval_end_s for r in result.requests]
    records = [r.record for r in result.requests if r.record]
    assert made["ttft_after_retrieval_s"]["p95"] == pytest.approx(np.percentile(after, 95))
    assert made["ttft_after_retrieval_s"]["mean"] == pytest.approx(np.mean(after))
    assert made["ttft_after_retrieval_s"]["max"] == max(after)
    assert made["num_tokens_invalidated"] == sum(c.num_invalidated for r in records for c in r.chunks) > 0
    fates = [p.fate for r in records for p in r.preemptions]
    assert made["num_preemptions"] == {fate: fates.count(fate) for fate in ("swap", "recompute")}
    assert made["num_tokens_loaded"] == sum(r.num_loaded for r in records) > 0
    num_taxed = sum(r.num_recomputed for r in records if r.preemptions)
    assert num_taxed > 0
    assert made["recompute_tax"] == pytest.approx(num_taxed / sum(r.num_computed for r in records))
    assert result.copy_totals is not None
    assert made["copies"]["num_bytes_in"] == result.copy_totals.num_bytes_in > 0
    floor = spread([r.floor_s for r in result.requests])
    assert made["ratio_to_floor"]["p99"] == pytest.approx(np.percentile(after, 99) / floor["p99"])
    assert made["simulated_s_per_wall_s"] == result.completion_s / result.wall_s
    assert made["goodput"] is None


def test_an_engine_that_does_not_tell_is_not_said_to_have_done_nothing() -> None:
    result = made_result(settings())
    silent = replace(result, requests=tuple(replace(r, record=None) for r in result.requests))
    made = summarise(digest(silent), {})
    names = ("num_preemptions", "num_tokens_invalidated", "num_tokens_recomputed", "recompute_tax", "num_tokens_loaded")
    assert [made[name] for name in (*names, "copies")] == [None] * 6
    assert made["ttft_s"]["p50"] > 0


def test_tokens_recomputed_after_an_update_are_no_tax() -> None:
    result = made_result(settings(workload="anns"))
    records = [replace(r.record, preemptions=(), num_recomputed=15) for r in result.requests if r.record]
    requests = tuple(replace(r, record=record) for r, record in zip(result.requests, records, strict=True))
    made = summarise(digest(replace(result, requests=requests)), {})
    assert made["num_tokens_recomputed"] == 15 * len(requests)
    assert made["recompute_tax"] == 0


def test_a_cell_without_an_answered_request_has_no_figures() -> None:
    nothing = replace(made_result(settings()), requests=(), num_unfinished=60)
    made = summarise(digest(nothing), {"ttft_s": 1.0})
    assert made["num_unfinished"] == 60
    assert made["ttft_s"] == dict.fromkeys(("p50", "p95", "p99", "max", "mean"))
    assert made["goodput"] == 0
    json.dumps(made, allow_nan=False)


def test_goodput_counts_requests_that_meet_every_objective() -> None:
    result = made_result(settings(num_queries=200))
    slos = {"ttft_after_retrieval_s": 0.05, "total_s": 4.0}
    good = [r for r in result.requests if r.ttft_after_retrieval_s <= 0.05 and r.finished_s - r.arrival_s <= 4.0]
    assert 0 < len(good) < 200
    assert digest(result).goodput(slos) == pytest.approx(len(good) / result.completion_s)
    assert digest(result).goodput({"ttft_s": 1e9}) == pytest.approx(200 / result.completion_s)


def test_gaps_are_between_chunks_and_not_before_the_end_of_the_prompt() -> None:
    result = made_result(settings())
    assert len(digest(result).gaps_s) == sum(r.num_chunks - 1 for r in result.requests)
    assert digest(made_result(settings(arm="no-streaming"))).gaps_s == ()


def test_objectives_are_read() -> None:
    assert parse_slos("ttft_after_retrieval_s=0.5, total_s=30") == {"ttft_after_retrieval_s": 0.5, "total_s": 30.0}
    assert parse_slos("") == {}


@pytest.mark.parametrize("text", ["ttft=1", "ttft_s", "ttft_s=soon", "ttft_s=0", "ttft_s=nan", "ttft_s=inf"])
def test_a_wrong_objective_is_explained(text: str) -> None:
    with pytest.raises(ConfigurationError, match=text):
        parse_slos(text)


@pytest.mark.parametrize("again", ["total_s=x", "total_s=30", "total_s"])
def test_an_objective_is_given_once(again: str) -> None:
    with pytest.raises(ConfigurationError, match=f"SLO '{again}': total_s has a limit already, 5 seconds"):
        parse_slos(f"total_s=5,{again}")


def test_spread_does_not_mind_the_order() -> None:
    values = [random.Random(3).random() for _ in range(101)]
    assert spread(values) == spread(sorted(values))
