"""Requests of classes in the scheduler: who goes first, and that nobody waits for ever."""

from collections.abc import Callable
from typing import Any

Make = Callable[..., Any]


def own_tokens(index: int, num: int = 16) -> list[int]:
    """That no other index has."""
    return [1_000 * (index + 1) + i for i in range(num)]


def test_a_session_question_is_served_before_the_pool_and_the_pool_before_data(bench: Make) -> None:
    b = bench(streamrag={"policy": "fcfs", "class_ageing_s": 100})
    b.plain("pool", 16, max_tokens=1)
    b.chunk("asked", own_tokens(1), is_complete=True, max_tokens=1, request_class="session")
    b.chunk("data", own_tokens(2), request_class="stream")
    b.run()
    assert [o.request_id for o in b.outputs] == ["asked", "pool", "data"]


def test_data_of_a_session_are_served_within_their_bound_however_many_questions_come(bench: Make) -> None:
    ageing_s = 5
    b = bench(streamrag={"policy": "fcfs", "class_ageing_s": ageing_s})
    data = own_tokens(99, 60)
    b.chunk("data", data[:4], request_class="stream")
    b.run()
    began_s, num_held = b.engine.now_s, 4
    while b.scheduler.requests["data"].num_computed_tokens < 4:
        # A question for each step, which fills it, and one more token of data.
        b.chunk(f"asked{num_held}", own_tokens(num_held), is_complete=True, max_tokens=1, request_class="session")
        b.chunk("data", data[num_held : num_held + 1], kept=num_held, request_class="stream")
        num_held += 1
        b.step()
        assert b.engine.now_s - began_s <= 2 * ageing_s + 2


def test_data_wait_while_memory_is_nearly_full_and_questions_go_on(bench: Make) -> None:
    b = bench(num_blocks=50, streamrag={"data_high_water": 0.5})
    b.chunk("others", own_tokens(0, 88))
    b.run()
    b.chunk("data", own_tokens(1, 40), request_class="stream")
    b.chunk("asked", own_tokens(2, 40), is_complete=True, request_class="session")
    b.run()
    assert b.tokens("asked") == b.fresh_answer(own_tokens(2, 40))
    data = b.scheduler.requests["data"]
    assert (data.num_computed_tokens, data.num_acknowledged) == (0, 1)  # its client does not wait for memory
    b.engine.abort("others")
    b.run()
    assert data.num_computed_tokens == 39


def test_data_of_one_session_do_not_fill_the_steps_of_others(bench: Make) -> None:
    b = bench(streamrag={"max_data_tokens": 4})
    for i in range(2):
        b.chunk(f"data{i}", own_tokens(i, 40), request_class="stream")
    b.step()
    assert [b.scheduler.requests[f"data{i}"].num_computed_tokens for i in range(2)] == [4, 4]


def test_prompts_begin_only_if_their_answers_fit_the_budget_as_well(bench: Make) -> None:
    b = bench(num_blocks=50, max_num_batched_tokens=200, streamrag={"kv_budget": 0.5, "policy": "fcfs"})
    for i in range(3):
        b.plain(f"q{i}", 20, first=1_000 * i, max_tokens=20)  # ten blocks each, of 25
    b.plain("r large", 60, first=9_000, max_tokens=60)  # 30 blocks
    b.plain("s small", 4, first=8_000, max_tokens=1)
    b.step()
    assert {r.request_id for r in b.scheduler.running} == {"q0", "q1"}
    most = 0
    while b.engine.has_work:
        b.step()
        ran = {r.request_id for r in b.scheduler.running}
        assert "r large" not in ran or len(ran) == 1  # served, but alone
        most = max(most, len(ran))
    assert most == 2
    assert len(b.tokens("r large")) == 60
    assert len(b.tokens("s small")) == 1


def test_an_evicted_request_claims_no_budget_until_it_begins_again(bench: Make) -> None:
    b = bench(num_blocks=50, max_num_batched_tokens=200, streamrag={"kv_budget": 0.5, "policy": "fcfs"})
    b.plain("first", 40, max_tokens=20)
    b.step()
    b.scheduler.plugin.evictions.evict(b.scheduler.requests["first"])
    assert b.scheduler.plugin.claims.budget_left.has_claims is False
    b.run()
    assert len(b.tokens("first")) == 20
    assert b.scheduler.plugin.claims.budget_left.num_blocks == 25


def test_streams_that_get_the_same_chunk_compute_it_once(bench: Make) -> None:
    answers = {}
    for is_grouped in (True, False):
        b = bench(streamrag={"groups_prefills": is_grouped})
        same, names = own_tokens(0, 60), ("s0", "s1", "s2")
        for num_held, num in ((0, 10), (10, 50), (50, 60)):
            for name in names:
                b.chunk(name, same[num_held:num], kept=num_held)
            b.run()
        for name in names:
            b.chunk(name, own_tokens(1 + int(name[1]), 3), kept=60, is_complete=True)
        b.run()
        answers[is_grouped] = [b.tokens(name) for name in names]
        computed = sum(b.record(name).num_computed for name in names)
        # Beside the shared tokens once: each one's own, and what is in blocks that are not whole yet.
        assert (computed < 60 + 3 * (3 + 2 * 4)) == is_grouped
        assert answers[is_grouped] == [b.fresh_answer(same + own_tokens(1 + i, 3)) for i in range(3)]
    assert answers[True] == answers[False]


def test_followers_go_on_when_their_leader_leaves_or_loses_its_kv(bench: Make) -> None:
    same = own_tokens(0, 80)
    for leaves in ("aborted", "evicted"):
        b = bench(streamrag={"groups_prefills": True, "policy": "fcfs"})
        for name in ("a", "b"):
            b.chunk(name, same[:10])
        b.run()
        for name in ("a", "b"):
            b.chunk(name, same[10:], kept=10, is_complete=True)
        b.step()
        assert b.scheduler.requests["b"].num_computed_tokens < 10 < b.scheduler.requests["a"].num_computed_tokens
        if leaves == "aborted":
            b.engine.abort("a")
        else:
            b.scheduler.plugin.evictions.evict(b.scheduler.requests["a"])
        b.run()
        assert b.tokens("b") == b.fresh_answer(same)
