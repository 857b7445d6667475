"""Requests of classes in the scheduler: who goes first, and that nobody waits for ever."""

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]


def own_tokens(index: int, num: int = 16) -> list[int]:
    """That no other index has."""
    return [1_000 * (index + 1) + i for i in range(num)]


def test_who_is_of_a_higher_class_is_served_first_and_the_pool_as_its_policy_says(bench: Make) -> None:
    b = bench(streamrag={"policy": "classes('fcfs', 100)"})
    b.plain("pool", 16, max_tokens=1)
    b.chunk("asked", own_tokens(1), is_complete=True, max_tokens=1, request_class="session")
    b.chunk("data", own_tokens(2), request_class="stream")
    b.chunk("ahead", own_tokens(3), is_complete=True, max_tokens=1, request_class="flash")
    b.run()
    assert [o.request_id for o in b.outputs] == ["ahead", "asked", "pool", "data"]


def test_data_of_a_session_are_served_within_their_bound_however_many_questions_come(bench: Make) -> None:
    ageing_s = 5
    b = bench(streamrag={"policy": f"classes('fcfs', {ageing_s})"})
    data = own_tokens(99, 60)
    b.chunk("data", data[:4], request_class="stream")
    b.run()
    began_s, num_held = b.engine.now_s, 4
    while b.scheduler.requests["data"].num_computed_tokens < 4:
        # A question for each step, which fills it, and one more token of data.
        b.chunk(f"ahead{num_held}", own_tokens(num_held), is_complete=True, max_tokens=1, request_class="flash")
        b.chunk("data", data[num_held : num_held + 1], kept=num_held, request_class="stream")
        num_held += 1
        b.step()
        assert b.engine.now_s - began_s <= 3 * ageing_s + 2
