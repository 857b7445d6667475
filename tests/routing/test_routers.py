from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrag.errors import ConfigurationError
from streamrag.routing import ROUTERS, Opening, make_router
from streamrag.routing.router import ConsistentHash, RoundRobin
from streamrag.routing.soonest import Soonest
from tests.routing.router_cases import LONG, OPENINGS, OTHER, STATES, check_ranking, replicas


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=40)
@given(rounds=st.lists(st.tuples(OPENINGS, STATES), max_size=6))
def test_a_router_names_each_replica_once(name, rounds):
    check_ranking(make_router(name), rounds)


def test_an_unknown_router_or_option_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="no router 'fastest'; there are soonest, "):
        make_router("fastest")
    with pytest.raises(ConfigurationError, match=r"router round_robin: .*speed"):
        make_router("round_robin", speed=3)


# ---------------------------------------------------------------------------------------------------------------- basic


def test_round_robin_takes_each_in_turn():
    router = RoundRobin()
    assert [router.rank(LONG, replicas("a", "b", "c"), 0.0)[0] for _ in range(4)] == ["a", "b", "c", "a"]


def test_a_replica_that_leaves_moves_only_its_own_sessions():
    router, all_of_them = ConsistentHash(), replicas(*"abcdefgh")
    sessions = [Opening((1,), session=f"session {n}") for n in range(400)]
    before = {opening.session: router.rank(opening, all_of_them, 0.0)[0] for opening in sessions}
    after = {opening.session: router.rank(opening, all_of_them[1:], 0.0)[0] for opening in sessions}
    assert all(after[session] == name for session, name in before.items() if name != "a")
    shares = [list(before.values()).count(name) for name in "abcdefgh"]
    assert min(shares) > 25, shares


def test_without_a_session_equal_beginnings_go_to_the_same_replica():
    router, states = ConsistentHash(), replicas(*"abcdefgh")
    longer = Opening((*LONG.token_ids, 1, 2, 3))
    assert router.rank(LONG, states, 0.0) == router.rank(longer, states[::-1], 0.0)
    assert router.rank(LONG, states, 0.0) != router.rank(OTHER, states, 0.0)


# ----------------------------------------------------------------------------------------------------------------- ours


def test_the_soonest_is_where_waiting_and_computing_take_least():
    router, (a, b) = Soonest(), replicas("a", "b", tokens_per_s=1_000.0)
    assert router.routed(LONG, "a") == 640
    assert router.routed(LONG, "a") == 0, "all of it lies there"
    assert router.rank(LONG, [replace(a, num_new_tokens=1_279), b], 0.0)[0] == "a"
    assert router.rank(LONG, [replace(a, num_new_tokens=1_281), b], 0.0)[0] == "b", "so it is replicated"


def test_open_queries_count_as_if_tokens_waited():
    router, (a, b) = Soonest(), replicas("a", "b")
    assert router.rank(LONG, [replace(a, num_open=1), replace(b, num_new_tokens=383)], 0.0)[0] == "b"
    assert router.rank(LONG, [replace(a, num_open=1), replace(b, num_new_tokens=385)], 0.0)[0] == "a"


def test_a_query_is_expected_to_grow_as_the_last_ones_did():
    router = Soonest()
    assert router.routed(LONG, "a") == 640, "nothing is known of growth"
    router.completed((*LONG.token_ids, *range(100)), "a")
    assert router.routed(LONG, "a") == 100
    for _ in range(500):
        router.completed(LONG.token_ids[:600], "a")
    assert router.routed(OTHER, "a") == 640, "prompts do not shrink"


def test_the_replica_that_holds_less_is_taken_of_equals():
    router, states = Soonest(), replicas("a", "b")
    router.routed(OTHER, "a")
    assert router.rank(LONG, states, 0.0) == ["b", "a"]


def test_a_replica_a_third_as_fast_gets_a_query_when_the_other_has_three_times_the_work():
    router = Soonest()
    slow, fast = replicas("slow", "fast", tokens_per_s=3_000.0)
    slow = replace(slow, tokens_per_s=1_000.0)
    assert router.rank(LONG, [slow, replace(fast, num_new_tokens=2_559)], 0.0)[0] == "fast"
    assert router.rank(LONG, [slow, replace(fast, num_new_tokens=2_561)], 0.0)[0] == "slow"


def test_a_replica_of_unknown_speed_is_as_fast_as_the_others_are_on_average():
    router, (a, b) = Soonest(), replicas("a", "b")
    assert router.rank(LONG, [replace(a, num_new_tokens=2), replace(b, num_new_tokens=1)], 0.0) == ["b", "a"]
    known = replace(a, tokens_per_s=500.0)
    assert router.rank(LONG, [replace(known, num_new_tokens=1), replace(b, num_new_tokens=2)], 0.0) == ["a", "b"]


def test_a_complete_prompt_is_found_later_and_not_on_a_replica_that_was_lost():
    router, (a, b) = Soonest(), replicas("a", "b")
    router.completed(LONG.token_ids, "b")
    assert router.rank(LONG, [a, b], 0.0)[0] == "b"
    router.lost("b")
    assert router.rank(LONG, [a, b], 0.0)[0] == "a"


def test_a_replica_is_believed_to_hold_no_more_than_its_memory():
    router, (a, b) = Soonest(), replicas("a", "b", num_kv_tokens=640)
    router.rank(LONG, [a, b], 0.0)
    router.routed(LONG, "b")
    router.routed(OTHER, "b")
    assert router.rank(LONG, [replace(a, num_new_tokens=1), b], 0.0)[0] == "b"
    assert router.routed(LONG, "b") == 640
