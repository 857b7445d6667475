from dataclasses import replace

import pytest

from streamrag.engine.costs.copy_costs import linear_copies
from streamrag.errors import ConfigurationError
from streamrag_bench.simulated_step_times import CopyClock

STEADY = linear_copies(1_000, 1e6)  # a block takes a millisecond
NUM_LAYERS = 4


def test_a_model_without_layers_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="num_layers=0"):
        CopyClock(STEADY, 0)


def test_a_step_without_copies_takes_what_it_computes() -> None:
    clock = CopyClock(STEADY, NUM_LAYERS)
    assert clock.step_s(1.0, 0.020) == pytest.approx(0.020)
    assert (clock.busy_out_s, clock.busy_in_s) == (0.0, 0.0)


def test_blocks_that_a_step_overwrites_are_saved_before_its_forward() -> None:
    assert CopyClock(STEADY, NUM_LAYERS).step_s(1.0, 0.020, num_saves=5) == pytest.approx(0.025)


def test_blocks_that_stay_are_saved_beside_the_forward() -> None:
    clock = CopyClock(STEADY, NUM_LAYERS)
    assert clock.step_s(1.0, 0.020, num_held_saves=15) == pytest.approx(0.020)
    assert clock.step_s(1.020, 0.020) == pytest.approx(0.020)


def test_the_next_forward_waits_for_saves_that_took_longer_than_the_step() -> None:
    clock = CopyClock(STEADY, NUM_LAYERS)
    assert clock.step_s(1.0, 0.020, num_held_saves=50) == pytest.approx(0.020)
    assert clock.step_s(1.020, 0.020, num_saves=5) == pytest.approx(0.030 + 0.005 + 0.020)
    assert clock.step_s(2.0, 0.020) == pytest.approx(0.020)


def test_loads_run_layer_by_layer_beside_the_forward() -> None:
    clock = CopyClock(STEADY, NUM_LAYERS)
    assert clock.step_s(1.0, 0.020, num_loads=10) == pytest.approx(0.020)
    assert clock.step_s(2.0, 0.020, num_loads=40) == pytest.approx(0.040 + 0.020 / NUM_LAYERS)
    assert clock.step_s(3.0, 0.020, num_saves=5, num_loads=40) == pytest.approx(0.005 + 0.040 + 0.020 / NUM_LAYERS)


def test_with_one_layer_a_forward_begins_when_all_is_loaded() -> None:
    assert CopyClock(STEADY, 1).step_s(1.0, 0.020, num_loads=10) == pytest.approx(0.030)


def test_a_device_that_cannot_do_both_at_once_stands_still_while_it_copies() -> None:
    clock = CopyClock(replace(STEADY, is_overlapped=False), NUM_LAYERS)
    assert clock.step_s(1.0, 0.020, 1, 2, 4) == pytest.approx(0.027)
    assert clock.step_s(2.0, 0.020) == pytest.approx(0.020)


@pytest.mark.parametrize("is_overlapped", [True, False])
def test_the_engines_count_how_long_they_are_busy(is_overlapped: bool) -> None:
    clock = CopyClock(replace(STEADY, is_overlapped=is_overlapped), NUM_LAYERS)
    clock.step_s(1.0, 0.020, num_saves=1, num_held_saves=2, num_loads=4)
    clock.step_s(2.0, 0.020, num_loads=6)
    assert clock.busy_out_s == pytest.approx(0.003)
    assert clock.busy_in_s == pytest.approx(0.010)
