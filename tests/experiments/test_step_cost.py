import pytest
from engine_step import loaded, prefill
from step_cost import NUM_STEPS, Times, all_states, rows, take_turns
from vllm.v1.core.sched.scheduler import Scheduler

from streamrag.backends.vllm.scheduler.scheduler import StreamingScheduler


def test_a_load_has_a_quarter_of_its_requests_in_each_state() -> None:
    ours = loaded(all_states, 8, StreamingScheduler).scheduler
    assert (len(ours.running), len(ours.idle), len(ours.requests)) == (2, 2, 8)
    assert sorted(request.is_complete for request in ours.waiting) == [False, False, True, True]
    stock = loaded(all_states, 8, Scheduler).scheduler
    assert (len(stock.running), len(stock.waiting)) == (2, 6)


def test_a_load_may_have_nobody_but_complete_prompts_that_wait() -> None:
    ours = loaded(prefill, 4, StreamingScheduler).scheduler
    assert [request.is_complete for request in ours.waiting] == [True] * 4


def test_both_schedulers_take_as_many_steps() -> None:
    times = take_turns("all wait, complete", 4, "fcfs")
    assert len(times.stock) == len(times.ours) == NUM_STEPS
    assert 0 < len(times.order) <= 2 * NUM_STEPS


def test_a_row_says_by_how_much_the_target_is_met_or_missed() -> None:
    times = Times([1e-4, 2e-4, 3e-4], [3e-4, 3.1e-4, 4e-4], [1e-5, 1e-5, 1e-5])
    noisy = Times([8e-4], [9e-4], [1e-5])
    met, missed = rows({(500, "all states", "fcfs"): [noisy, times], (50, "all states", "fcfs"): [times]})
    for row in (met, missed):
        assert row["more_us"] == pytest.approx(110)
        assert row["order_p99_us"] == pytest.approx(10)
    assert missed["ratio_p50"] == pytest.approx(1.55)
    assert (met["is_met"], missed["is_met"]) == (True, False)
