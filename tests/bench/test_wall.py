from pathlib import Path

import pytest
from small_loads import APPENDS, UPDATES, appending, settings

from streamrag.bench.cell import CellSettings
from streamrag.bench.virtual_time import run_virtual
from streamrag.bench.wall import run_cell
from streamrag.bench.workload import NUM_TAIL_TOKENS
from streamrag.errors import ConfigurationError
from streamrag.trace.values import Trace


def wall(**changes: object) -> CellSettings:
    return settings(**{"clock": "wall", "profile": None, "model": "nowhere", **changes})


def test_clocks_are_not_mixed() -> None:
    for changes, named in (
        ({"clock": "virtual"}, "wall time only"),
        ({"profile": "h200-llama8b-tp2"}, "is for virtual time"),
        ({"model": None}, "needs a model"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            run_cell(wall(**changes), trace=APPENDS)


def test_stock_sessions_refuse_updates_before_any_engine_is_started() -> None:
    with pytest.raises(ConfigurationError, match="'u0' has an update"):
        run_cell(wall(arm="stock-sessions"), trace=UPDATES)


def test_a_real_engine_refuses_virtual_time() -> None:
    from streamrag.backends.vllm.client.measured import running_engine

    async def main() -> None:
        async with running_engine("nowhere", {}, policy=None):
            pass

    with pytest.raises(ConfigurationError, match="wall clock only"):
        run_virtual(main())


@pytest.mark.engine
def test_contexts_longer_than_the_model_are_cut_and_answered(tiny_model: Path) -> None:
    trace = Trace((appending("q", 0.0, 6_000, 6_000, 500), appending("r", 0.0, 100)))
    result = run_cell(wall(model=str(tiny_model), max_num_batched_tokens=2_048, kv_tokens=16_384), trace=trace)
    assert [request.query_id for request in result.requests] == ["q", "r"]
    assert result.provenance["num_contexts_cut"] == 1
    assert result.provenance["max_context_tokens"] == 8_192 - NUM_TAIL_TOKENS - 2
    record = result.requests[0].record
    assert record is not None
    assert record.num_prompt_tokens == 6_500 + NUM_TAIL_TOKENS


@pytest.mark.engine
def test_a_cell_runs_on_the_real_engine(tiny_model: Path) -> None:
    trace = Trace(tuple(appending(f"q{i}", 0.1 * i, 200, 150, 90, gap_s=0.2) for i in range(4)))
    cell = wall(model=str(tiny_model), max_num_batched_tokens=256, num_output_tokens=3, kv_tokens=4_096)
    result = run_cell(cell, trace=trace, keep_steps=True)
    assert [r.query_id for r in result.requests] == ["q0", "q1", "q2", "q3"]
    assert result.provenance["kv_tokens"] >= 4_064  # vLLM keeps a block for itself
    for request in result.requests:
        assert request.retrieval_end_s >= request.arrival_s + 0.6
        assert request.retrieval_end_s < request.first_token_s < request.finished_s <= result.completion_s
        assert 0 < request.floor_s < 5
        assert request.record is not None
        assert request.record.num_computed >= 440
        assert request.arrival_s <= request.record.arrival_s <= request.record.finished_s
    assert 0 < result.busy_s < result.wall_s
    assert sum(step.num_tokens for step in result.steps) >= 4 * (440 + 32)
