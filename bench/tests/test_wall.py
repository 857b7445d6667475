from pathlib import Path

import pytest
from small_loads import APPENDS, UPDATES, appending, settings

from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.errors import ConfigurationError
from streamrag.trace.values import Trace
from streamrag_bench.cell import CellSettings
from streamrag_bench.wall import run_cell
from streamrag_bench.workload import NUM_TAIL_TOKENS


def wall(**changes: object) -> CellSettings:
    return settings(**{"clock": "wall", "profile": None, "model": "nowhere", **changes})


def test_clocks_are_not_mixed() -> None:
    for changes, named in (
        ({"clock": "virtual", "model": None}, "wall time only"),
        ({"profile": "h200-llama8b-tp2"}, "is for virtual time"),
        ({"model": None}, "needs a model"),
        ({"has_prefix_cache": False}, "virtual time only"),
    ):
        with pytest.raises(ConfigurationError, match=named):
            run_cell(wall(**changes), trace=APPENDS)


def test_stock_sessions_refuse_updates_before_any_engine_is_started() -> None:
    with pytest.raises(ConfigurationError, match="'u0' has an update"):
        run_cell(wall(arm="stock-sessions"), trace=UPDATES)


def test_a_real_engine_refuses_virtual_time() -> None:
    from streamrag_bench.measured_engine import running_engine

    async def main() -> None:
        async with running_engine("nowhere", {}, policy=None):
            pass

    with pytest.raises(ConfigurationError, match="needs the wall clock"):
        run_virtual(main())


@pytest.mark.long
@pytest.mark.engine
def test_a_cell_runs_on_the_real_engine_and_a_context_longer_than_the_model_is_cut(tiny_model: Path) -> None:
    queries = [appending(f"q{i}", 0.1 * i, 200, 150, 90, gap_s=0.2) for i in range(4)]
    trace = Trace((*queries, appending("long", 1.0, 6_000, 6_000, 500)))
    cell = wall(model=str(tiny_model), max_num_batched_tokens=512, num_output_tokens=3, kv_tokens=16_384)
    result = run_cell(cell, trace=trace, keep_steps=True)
    assert [r.query_id for r in result.requests] == ["q0", "q1", "q2", "q3", "long"]
    assert result.provenance["kv_tokens"] >= 16_352  # vLLM keeps a block for itself
    assert result.provenance["num_contexts_cut"] == 1
    assert result.provenance["max_context_tokens"] == 8_192 - NUM_TAIL_TOKENS - 4
    for request in result.requests:
        assert request.retrieval_end_s >= request.arrival_s + 0.6
        assert request.retrieval_end_s < request.first_token_s < request.finished_s <= result.completion_s
        assert request.record is not None
        assert request.record.num_computed >= 440
        assert request.arrival_s <= request.record.arrival_s <= request.record.finished_s
    *short, long = result.requests
    assert all(0 < request.floor_s < 5 for request in short)
    assert long.record is not None
    assert long.record.num_prompt_tokens == 6_500 + NUM_TAIL_TOKENS
    assert 0 < result.busy_s < result.wall_s
    assert sum(step.num_tokens for step in result.steps) >= 4 * (440 + 32) + 6_500 + 32
