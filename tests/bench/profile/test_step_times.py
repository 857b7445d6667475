from dataclasses import replace
from typing import Any

import pytest
from measured import SHAPE, TRUE, measured_engine

from streamrag.bench.profile.step_times import measure, measure_profile
from streamrag.bench.virtual_time import run_virtual
from streamrag.engine.costs.step_profiles import StepPart, TableProfile


def run(is_stock: bool, **arguments: Any) -> TableProfile:
    async def main() -> TableProfile:
        async with measured_engine(is_stock=is_stock) as client:
            return await measure_profile(client, "found", 512, 2_048, **arguments)  # type: ignore[arg-type]

    return run_virtual(main())


@pytest.mark.parametrize("is_stock", [True, False])
def test_measuring_finds_what_the_steps_of_an_engine_take(is_stock: bool) -> None:
    found = run(is_stock, max_num_seqs=16)
    parts: list[list[StepPart]] = [
        [(1, 0)],
        [(64, 900)],
        [(300, 0)],
        [(100, 500)] * 4,
        [(1, 1_500)] * 10,
        [(512, 1_400)],
    ]
    for step in parts:
        assert found.step_s(step) == pytest.approx(TRUE.step_s(step), rel=0.02)
    assert found.request_s == pytest.approx(TRUE.request_s, rel=0.05)
    assert found.pair_s == pytest.approx(TRUE.pair_s, rel=0.05)
    assert found.own_pair_s == pytest.approx(TRUE.own_pair_s, rel=0.2)
    assert found.delivery_s == pytest.approx(TRUE.delivery_s, abs=5e-4)
    assert (found.kv_tokens, found.block_size, found.is_async) == (32_000, 32, False)


def test_with_one_request_a_step_its_cost_is_part_of_the_base_line() -> None:
    found = run(True, max_num_seqs=1)
    assert found.step_s([(300, 1_000)]) == pytest.approx(TRUE.step_s([(300, 1_000)]), rel=0.02)
    assert found.request_s == 0


def test_steps_without_all_their_requests_are_left_out() -> None:
    async def main() -> set[int]:
        async with measured_engine(replace(SHAPE, max_num_seqs=2)) as client:
            found = await measure(client, 512, 2_048, max_num_seqs=16)  # type: ignore[arg-type]
            return {len(step.parts) for step in found.steps}

    assert run_virtual(main()) == {1}
