import pytest
from engine_step import loaded, prefill
from step_cost import NUM_STEPS, WAYS, Times, all_states, rows, sessions, take_turns
from vllm.v1.core.sched.scheduler import Scheduler

from streamrag.backends.vllm.scheduler.hooks import StreamingScheduler


def test_a_load_has_a_quarter_of_its_requests_in_each_state() -> None:
    ours = loaded(all_states, 8, StreamingScheduler).scheduler
    assert (len(ours.running), len(ours.plugin.queues.idle), len(ours.requests)) == (2, 2, 8)
    assert sorted(request.is_complete for request in ours.waiting) == [False, False, True, True]
    stock = loaded(all_states, 8, Scheduler).scheduler
    assert (len(stock.running), len(stock.waiting)) == (2, 6)


def test_a_load_may_have_only_complete_prompts_that_wait() -> None:
    ours = loaded(prefill, 4, StreamingScheduler).scheduler
    assert [request.is_complete for request in ours.waiting] == [True] * 4


def test_a_load_has_requests_of_all_classes() -> None:
    scheduler = loaded(sessions, 8, StreamingScheduler).scheduler
    states = ([r.request_class for r in each] for each in (scheduler.running, scheduler.plugin.queues.idle.values()))
    assert list(states) == [["session"] * 2, ["stream"] * 2]
    assert sorted(r.request_class for r in scheduler.waiting) == ["pool", "session", "stream", "stream"]


@pytest.mark.parametrize("way", WAYS)
def test_above_high_water_no_data_are_computed(way: str) -> None:
    made = loaded(sessions, 8, StreamingScheduler, **WAYS[way](8))
    for _ in range(NUM_STEPS):
        made.step()
    num_left = sum(r.num_remaining_tokens for r in made.scheduler.waiting if r.request_class == "stream")
    assert (num_left > 0) == (way == "above high water")


def test_both_schedulers_take_as_many_steps() -> None:
    times = take_turns("all wait, complete", 4, "fcfs", "")
    assert len(times.stock) == len(times.ours) == NUM_STEPS
    assert 0 < len(times.order) <= 2 * NUM_STEPS


def test_a_row_says_by_how_much_the_target_is_met_or_missed() -> None:
    times = Times([1e-4, 2e-4, 3e-4], [3e-4, 3.1e-4, 4e-4], [1e-5, 1e-5, 1e-5])
    noisy = Times([8e-4], [9e-4], [1e-5])
    met, missed = rows({(500, "all states", "fcfs", ""): [noisy, times], (50, "all states", "fcfs", ""): [times]})
    for row in (met, missed):
        assert row["more_us"] == pytest.approx(110)
        assert row["order_p99_us"] == pytest.approx(10)
    assert missed["ratio_p50"] == pytest.approx(1.55)
    assert (met["is_met"], missed["is_met"]) == (True, False)
