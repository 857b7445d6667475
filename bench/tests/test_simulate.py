import json
import os
import random
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path

import pytest
from small_loads import APPENDS, UPDATES, appending, outcomes, random_query, settings

from streamrag.engine.costs.profile_files import load_profile, save_profile
from streamrag.engine.costs.step_profiles import TableProfile
from streamrag.engine.recompute_or_swap import EVICTIONS
from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import as_dataclass
from streamrag.trace.values import Trace, TracedQuery
from streamrag_bench.cell import ARMS, CellResult
from streamrag_bench.report.timeline import make_timeline
from streamrag_bench.request_results import floor_s
from streamrag_bench.simulate import run_cell
from streamrag_bench.summary import digest
from streamrag_bench.workload import NUM_TAIL_TOKENS

H200 = load_profile("h200-llama8b-tp2")


def mean_s(result: CellResult) -> float:
    return sum(r.ttft_after_retrieval_s for r in result.requests) / len(result.requests)


def num_prompt_tokens(query: TracedQuery) -> int:
    return sum(event.chunk.num_tokens for event in query.events) + NUM_TAIL_TOKENS  # type: ignore[union-attr]


def test_every_arm_answers_every_query_and_says_what_the_engine_did() -> None:
    for arm in ARMS:
        result = run_cell(settings(arm=arm, num_output_tokens=3), trace=APPENDS)
        assert [r.query_id for r in result.requests] == [q.query_id for q in APPENDS.queries]
        assert result.num_unfinished == 0
        for request, query in zip(result.requests, APPENDS.queries, strict=True):
            assert request.arrival_s == pytest.approx(query.arrival_s)
            assert request.retrieval_end_s == pytest.approx(query.arrival_s + query.end_s)
            assert request.retrieval_end_s < request.first_token_s < request.finished_s
            assert request.num_chunks == 4
            record = request.record
            assert record is not None
            assert record.outcome == "finished"
            assert record.num_output_tokens == (3 if arm != "stock-sessions" else 6)  # three for the chunks before
            assert record.num_prompt_tokens == num_prompt_tokens(query)
            assert record.num_computed + record.num_from_cache >= record.num_prompt_tokens


def test_streaming_and_warming_beat_waiting_for_all_chunks() -> None:
    plain, warming, stock, ours = (run_cell(settings(arm=arm), trace=APPENDS) for arm in ARMS)
    for better in (warming, stock, ours):
        assert mean_s(better) < 0.7 * mean_s(plain)
        assert better.busy_s < better.completion_s


def test_updates_invalidate_and_are_answered_by_all_arms_but_the_stock_sessions() -> None:
    for arm in ("no-streaming", "warming", "streaming"):
        result = run_cell(settings(arm=arm, workload="anns"), trace=UPDATES)
        assert len(result.requests) == 8
        for request in result.requests:
            assert request.record is not None
            assert request.record.num_prompt_tokens == 2_100 + NUM_TAIL_TOKENS
    first = result.requests[0].record
    assert first is not None
    assert first.num_invalidated == (2_099 - 700) + (2_099 - 1_400)  # its engine is idle but for it
    with pytest.raises(ConfigurationError, match="'stock-sessions': query 'u0' has an update"):
        run_cell(settings(arm="stock-sessions", workload="anns"), trace=UPDATES)


def test_not_streaming_takes_what_its_steps_take() -> None:
    query = appending("q", 0.0, 3_000, 1_000)
    result = run_cell(settings(arm="no-streaming"), trace=Trace((query,)))
    num_left = 4_000 + NUM_TAIL_TOKENS - 2_048
    expected_s = H200.step_s([(2_048, 0)]) + H200.step_s([(num_left, 2_048)])
    assert result.requests[0].ttft_after_retrieval_s == pytest.approx(expected_s)
    assert result.busy_s == pytest.approx(expected_s)
    assert result.completion_s == pytest.approx(1.0 + expected_s)


@pytest.mark.parametrize("is_async", [True, False])
def test_the_floor_is_what_a_query_takes_alone(tmp_path_factory: pytest.TempPathFactory, is_async: bool) -> None:
    path = tmp_path_factory.mktemp("profiles") / "profile.json"
    profile = replace(H200, is_async=is_async, delivery_s=0.001)  # type: ignore[type-var]
    save_profile(profile, path)  # type: ignore[arg-type]
    rng = random.Random(5)
    for i in range(40):
        query = random_query(f"q{i}", rng)
        # With short steps of partial prompts an update wastes less, and the request may come out below its floor.
        cell = settings(profile=str(path), scheduler_options={"num_partial_tokens": None})
        (request,) = run_cell(cell, trace=Trace((query,))).requests
        assert request.floor_s == floor_s(query, profile, 2_048)
        # An update may keep a part of a block that the floor gives up.
        assert request.ttft_after_retrieval_s == pytest.approx(request.floor_s, rel=0.01), query


def test_two_runs_are_equal_but_for_the_wall_clock() -> None:
    rng = random.Random(1)
    trace = Trace(tuple(random_query(f"q{i}", rng, can_update=False) for i in range(30)))
    for arm in ARMS:
        cell = settings(arm=arm, qps=20.0, kv_tokens=60_000)
        one, other = (run_cell(cell, trace=trace, keep_steps=True) for _ in range(2))
        same = {"simulated_s_per_wall_s": 0}
        assert replace(one, wall_s=0, provenance={**one.provenance, **same}) == replace(
            other, wall_s=0, provenance={**other.provenance, **same}
        )


@pytest.mark.long
def test_the_order_of_sets_in_a_process_changes_nothing() -> None:
    code = "import sys; sys.path.insert(0, sys.argv[1]); from small_loads import outcomes; print(outcomes())"
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"
    other = subprocess.run(
        [sys.executable, "-c", code, os.path.dirname(__file__)],
        env={**os.environ, "PYTHONHASHSEED": seed, "VLLM_LOGGING_LEVEL": "ERROR"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert other.stdout == outcomes() + "\n"
    assert len(other.stdout) > 500


def test_steps_are_kept_on_request() -> None:
    result = run_cell(settings(arm="streaming"), trace=APPENDS, keep_steps=True)
    assert run_cell(settings(arm="streaming"), trace=APPENDS).steps == ()
    assert sum(step.end_s - step.start_s for step in result.steps) == pytest.approx(result.busy_s)
    num_computed = sum(r.record.num_computed for r in result.requests if r.record)
    assert sum(part.num_tokens for step in result.steps for part in step.parts) == num_computed
    assert {part.query_id for step in result.steps for part in step.parts} == {q.query_id for q in APPENDS.queries}
    assert all(step.num_tokens <= 2_048 and step.num_requests == len(step.parts) for step in result.steps)
    for before, after in pairwise(result.steps):
        assert before.end_s <= after.start_s


def test_short_memory_costs_preemptions_and_time() -> None:
    trace = Trace(tuple(appending(f"q{i}", 0.05 * i, 4_000, 4_000, 500) for i in range(12)))
    roomy, tight = (run_cell(settings(kv_tokens=n), trace=trace) for n in (200_000, 20_000))
    assert sum(len(r.record.preemptions) for r in tight.requests if r.record) > 0
    assert sum(r.record.num_recomputed for r in tight.requests if r.record) > 0
    assert sum(len(r.record.preemptions) for r in roomy.requests if r.record) == 0
    assert mean_s(tight) > mean_s(roomy)


def test_without_a_prefix_cache_all_that_was_evicted_is_computed_again() -> None:
    trace = Trace(tuple(appending(f"q{i}", 0.05 * i, 4_000, 4_000, 500) for i in range(12)))
    cells = [run_cell(settings(kv_tokens=20_000, has_prefix_cache=has), trace=trace) for has in (True, False)]
    records = [[r.record for r in cell.requests if r.record] for cell in cells]
    assert all(record.num_from_cache == 0 for record in records[1])
    assert sum(record.num_recomputed for record in records[1]) > sum(record.num_recomputed for record in records[0])


SLOW_STREAMS = Trace(tuple(appending(f"q{i}", 0.05 * i, 4_000, 4_000, 500, gap_s=4.0) for i in range(12)))
"""Idle for most of the time, and together far more than 20,000 tokens."""


def test_swapped_kv_is_copied_out_and_back_instead_of_computed_again() -> None:
    recompute, swap = (run_cell(settings(kv_tokens=20_000, eviction=e), trace=SLOW_STREAMS) for e in EVICTIONS[:2])
    assert recompute.copy_totals is None
    totals = swap.copy_totals
    assert totals is not None
    records = [r.record for r in swap.requests if r.record]
    assert {p.fate for record in records for p in record.preemptions} == {"swap"}
    assert sum(record.num_loaded for record in records) == 16 * totals.num_blocks_loaded > 0
    assert totals.num_bytes_out == totals.num_blocks_saved * 16 * 131_072
    assert totals.num_bytes_in > 0  # what is saved once may be loaded several times
    assert totals.out_s > 0
    assert sum(p.num_tokens_saved for r in records for p in r.preemptions) == 16 * totals.num_blocks_saved
    assert digest(swap).recompute_tax < digest(recompute).recompute_tax
    assert mean_s(swap) < mean_s(recompute)


def test_blocks_written_through_are_counted_too() -> None:
    result = run_cell(settings(kv_tokens=20_000, eviction="cost"), trace=SLOW_STREAMS)
    records, totals = [r.record for r in result.requests if r.record], result.copy_totals
    assert totals is not None
    num_saved = sum(p.num_tokens_saved for record in records for p in record.preemptions)
    num_written = sum(record.num_written_through for record in records)
    assert num_saved + num_written == 16 * totals.num_blocks_saved
    assert num_written > 0


def test_copies_are_kept_with_the_steps() -> None:
    for eviction in ("swap", "cost"):
        result = run_cell(settings(kv_tokens=20_000, eviction=eviction), trace=SLOW_STREAMS, keep_steps=True)
        totals = result.copy_totals
        assert totals is not None
        num_tokens = {"to-host": 0, "to-device": 0}
        for copy in result.copies:
            num_tokens[copy.direction] += copy.num_tokens
            assert copy.query_id in {q.query_id for q in SLOW_STREAMS.queries}
        assert num_tokens == {"to-host": 16 * totals.num_blocks_saved, "to-device": 16 * totals.num_blocks_loaded}
        assert make_timeline(result)["traceEvents"]
        assert run_cell(settings(kv_tokens=20_000, eviction=eviction), trace=SLOW_STREAMS).copies == ()


def test_a_host_memory_that_is_full_is_worth_less() -> None:
    cell = settings(kv_tokens=20_000, eviction="swap")
    roomy, tight = (run_cell(replace(cell, host_kv_bytes=n), trace=SLOW_STREAMS) for n in (64 << 30, 256 << 20))
    assert roomy.copy_totals
    assert tight.copy_totals
    assert tight.copy_totals.num_blocks_loaded < roomy.copy_totals.num_blocks_loaded
    assert len(tight.requests) == len(roomy.requests) == 12


def test_preemptions_of_the_stock_scheduler_are_seen_too() -> None:
    # Answers so long that the prompts that were admitted together outgrow the memory.
    trace = Trace(tuple(appending(f"q{i}", 0.0, 900) for i in range(4)))
    result = run_cell(settings(arm="no-streaming", kv_tokens=4_000, num_output_tokens=400), trace=trace)
    records = [r.record for r in result.requests if r.record]
    assert sum(len(record.preemptions) for record in records) > 0
    assert sum(record.num_recomputed + record.num_from_cache for record in records) > 0


def test_stock_sessions_that_stand_still_are_reported_as_far_as_they_came() -> None:
    # Idle sessions keep their memory: four of them leave no room for anybody's next chunk.
    trace = Trace(tuple(appending(f"q{i}", 0.0, 4_000, 4_000) for i in range(4)))
    result = run_cell(settings(arm="stock-sessions", kv_tokens=16_400), trace=trace)
    assert result.num_unfinished > 0
    assert len(result.requests) + result.num_unfinished == 4
    assert run_cell(settings(kv_tokens=16_400), trace=trace).num_unfinished == 0


def test_a_result_can_be_written_and_read() -> None:
    result = run_cell(settings(arm="streaming", kv_tokens=None), trace=APPENDS, keep_steps=True)
    assert as_dataclass(CellResult, json.loads(json.dumps(asdict(result)))) == result
    assert result.provenance["kv_tokens"] == H200.kv_tokens
    assert result.provenance["simulated_s_per_wall_s"] > 0


def test_progress_counts_the_answers() -> None:
    seen: list[tuple[int, int]] = []
    run_cell(settings(), trace=APPENDS, progress=lambda *counts: seen.append(counts))
    assert seen == [(i, 8) for i in range(1, 9)]


def test_clocks_are_not_mixed_and_copies_need_their_costs(tmp_path: Path) -> None:
    without_copies = tmp_path / "profile.json"
    save_profile(replace(H200, host_bandwidth_bytes_per_s=None), without_copies)  # type: ignore[arg-type, type-var]
    for changes, named in (
        ({"clock": "wall", "profile": None, "model": "some/model"}, "virtual time only"),
        ({"model": "some/model"}, "is for wall time"),
        ({"profile": None}, "needs a hardware profile"),
        ({"profile": "h300"}, "no profile 'h300'"),
        ({"profile": str(without_copies), "eviction": "swap"}, "does not say how long copies take"),
        ({"has_prefix_cache": False, "eviction": "swap"}, "needs a prefix cache"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            run_cell(settings(**changes), trace=APPENDS)


def test_a_prompt_that_fits_no_memory_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"kv_tokens=4096: one request of this load needs 5\d\d\d"):
        run_cell(settings(kv_tokens=4_096), trace=APPENDS)


async def test_a_simulated_engine_refuses_the_wall_clock() -> None:
    from streamrag.backends.simulated.client import SimulatedClient, by_parts, simulated_engine
    from streamrag.backends.simulated.config import EngineShape

    engine = simulated_engine(EngineShape(100), by_parts(lambda parts: 1.0), is_stock=True)
    with pytest.raises(ConfigurationError, match="runs in virtual time only"):
        await SimulatedClient(engine).__aenter__()


def test_contexts_are_cut_to_a_budget_or_to_the_length_of_the_engine_that_was_measured(tmp_path: Path) -> None:
    trace = Trace((appending("q", 0.0, 3_000, 3_000), appending("r", 0.0, 100)))
    result = run_cell(settings(max_context_tokens=4_000), trace=trace)
    assert (result.provenance["max_context_tokens"], result.provenance["num_contexts_cut"]) == (4_000, 1)
    record = result.requests[0].record
    assert record is not None
    assert record.num_prompt_tokens == 3_000 + NUM_TAIL_TOKENS
    measured = TableProfile("x", "y", ((1, 0.1), (512, 0.2)), 0.0, 0.0, 10_000, provenance={"max_model_len": 3_500})
    save_profile(measured, tmp_path / "profile.json")
    result = run_cell(settings(profile=str(tmp_path / "profile.json")), trace=trace)
    assert (result.provenance["max_context_tokens"], result.provenance["num_contexts_cut"]) == (3_466, 1)
    assert "max_context_tokens" not in run_cell(settings(), trace=trace).provenance
    with pytest.raises(ConfigurationError, match="--max-context-tokens"):
        run_cell(settings(kv_tokens=4_000), trace=trace)
    with pytest.raises(ConfigurationError, match="blocks of 16 tokens can be simulated"):
        run_cell(settings(kv_tokens=10**9), trace=trace)
