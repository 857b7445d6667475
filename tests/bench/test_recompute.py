from dataclasses import replace
from statistics import median

import pytest
from measured import SHAPE, TRUE, measured_engine

from streamrag.backends.simulated.config import EngineShape
from streamrag.bench.recompute import NUM_CONTEXT_BESIDE, RecomputeTimes, measure_recompute, prompt_sizes
from streamrag.bench.virtual_time import run_virtual
from streamrag.engine.costs import recompute_s
from streamrag.errors import BackendError

BUDGET = 512


def run(shape: EngineShape = SHAPE, *, num_beside: int = 4, max_s: float = 1e6) -> RecomputeTimes:
    async def main() -> RecomputeTimes:
        async with measured_engine(shape) as client:
            return await measure_recompute(client, BUDGET, 2_048, num_beside, max_s=max_s)  # type: ignore[arg-type]

    return run_virtual(main())


@pytest.mark.parametrize("longest", [20, 100, 2_048, 8_192])
def test_sizes_grow_to_what_the_model_takes(longest: int) -> None:
    sizes = prompt_sizes(longest)
    assert sizes == sorted(set(sizes))
    assert sizes[-1] == longest - 4


def test_measuring_finds_what_recomputing_adds_to_the_steps() -> None:
    found = run()
    assert list(found.alone) == list(found.beside) == prompt_sizes(2_048)
    batch = ((1, NUM_CONTEXT_BESIDE),) * 4
    for size, seconds in found.alone.items():
        assert median(seconds) == pytest.approx(recompute_s(TRUE, 0, size, BUDGET), rel=0.01)
    for size, seconds in found.beside.items():
        assert median(seconds) == pytest.approx(recompute_s(TRUE, 0, size, BUDGET, batch), rel=0.02)


def test_the_steps_on_the_way_are_kept_for_the_fit() -> None:
    steps = run().as_pass().steps
    for step in steps:
        assert step.step_s == pytest.approx(TRUE.step_s(step.parts), rel=0.01)
    assert {len(step.parts) for step in steps} == {1, 5}


def test_what_would_take_too_long_is_left_out() -> None:
    found = run(max_s=2.0)
    assert 1 <= len(found.alone) < len(prompt_sizes(2_048))


def test_a_batch_leaves_room_for_the_prompt() -> None:
    found = run(replace(SHAPE, max_num_seqs=256), num_beside=400)
    assert found.num_beside == 256


def test_an_engine_that_takes_other_steps_is_noticed() -> None:
    with pytest.raises(BackendError, match="steps of 512"):
        run(replace(SHAPE, max_num_batched_tokens=300))
