from dataclasses import replace
from statistics import median

import pytest
from measured import SHAPE, TRUE, measured_engine

from streamrag.backends.simulated.config import EngineShape
from streamrag.bench.profile.recomputation import NUM_CONTEXT_BESIDE, RecomputeTimes, measure_recompute, prompt_sizes
from streamrag.bench.virtual_time import run_virtual
from streamrag.engine.costs.step_profiles import recompute_s
from streamrag.errors import BackendError

BUDGET, LONGEST = 200, 600
LEAST = replace(SHAPE, max_num_batched_tokens=BUDGET)


def run(
    shape: EngineShape = LEAST, *, longest: int = LONGEST, num_beside: int = 4, max_s: float = 1e6
) -> RecomputeTimes:
    budget = BUDGET if shape is LEAST else 16

    async def main() -> RecomputeTimes:
        async with measured_engine(shape) as client:
            return await measure_recompute(client, budget, longest, num_beside, max_s=max_s)  # type: ignore[arg-type]

    return run_virtual(main())


@pytest.fixture(scope="module")
def found() -> RecomputeTimes:
    return run()


@pytest.mark.parametrize("longest", [20, 100, 2_048, 8_192])
def test_sizes_grow_to_what_the_model_takes(longest: int) -> None:
    sizes = prompt_sizes(longest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == longest - 4


def test_measuring_finds_what_recomputing_adds_to_the_steps(found: RecomputeTimes) -> None:
    assert list(found.alone) == list(found.beside) == prompt_sizes(LONGEST)
    batch = ((1, NUM_CONTEXT_BESIDE),) * 4
    for size, seconds in found.alone.items():
        assert median(seconds) == pytest.approx(recompute_s(TRUE, 0, size, BUDGET), rel=0.01)
    for size, seconds in found.beside.items():
        assert median(seconds) == pytest.approx(recompute_s(TRUE, 0, size, BUDGET, batch), rel=0.02)


def test_the_steps_on_the_way_are_kept_for_the_fit(found: RecomputeTimes) -> None:
    steps = found.as_pass().steps
    for step in steps:
        assert step.step_s == pytest.approx(TRUE.step_s(step.parts), rel=0.01)
    assert {len(step.parts) for step in steps} == {1, 5}


def test_prompt_sizes_that_would_take_too_long_are_left_out() -> None:
    assert list(run(max_s=0.1).alone) == prompt_sizes(LONGEST)[:1]


def test_a_batch_leaves_room_for_the_prompt() -> None:
    small = replace(SHAPE, max_num_batched_tokens=16)
    assert run(small, longest=150, num_beside=400).num_beside == 8


def test_an_engine_that_takes_other_steps_is_noticed() -> None:
    with pytest.raises(BackendError, match="steps of 16"):
        run(replace(SHAPE, max_num_batched_tokens=10), longest=40)
