from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrag.errors import ConfigurationError
from streamrag.routing import ROUTERS, Opening, ReplicaState, make_router
from streamrag.routing.affinity import PrefixAffinity
from streamrag.routing.flowguard import FlowGuard, MendedFlowGuard, Weights, overload, score
from streamrag.routing.prefix_index import PrefixIndex
from streamrag.routing.simple import ConsistentHash, PowerOfTwo, RoundRobin, ShortestQueue
from streamrag.routing.soonest import Soonest

LONG, OTHER = Opening(tuple(range(640))), Opening(tuple(range(1_000, 1_640)))


def replicas(*names, **common):
    return [ReplicaState(name, max_open=10, measured_s=0.0, **common) for name in names]


STATES = st.lists(
    st.builds(
        ReplicaState,
        st.integers(0, 99).map(str),
        num_queued=st.integers(0, 20),
        num_open=st.integers(0, 40),
        max_open=st.integers(1, 32),
        num_new_tokens=st.integers(0, 10_000),
        kv_usage=st.floats(0, 1),
        cache_hit_rate=st.floats(0, 1),
        num_kv_tokens=st.integers(0, 2_000),
        tokens_per_s=st.one_of(st.just(0.0), st.floats(1, 1e5)),
        measured_s=st.floats(-10, 0),
    ),
    max_size=6,
    unique_by=lambda state: state.id,
)
OPENINGS = st.builds(
    Opening,
    st.lists(st.integers(0, 2), max_size=5).map(lambda blocks: tuple(token for b in blocks for token in [b] * 64)),
    session=st.one_of(st.none(), st.sampled_from(["s", "t"])),
)


@pytest.mark.parametrize("name", ROUTERS)
@settings(max_examples=40)
@given(rounds=st.lists(st.tuples(OPENINGS, STATES), max_size=6))
def test_whatever_it_is_told_a_router_names_each_replica_once(name, rounds):
    router = make_router(name)
    for opening, states in rounds:
        names = router.rank(opening, states, 0.0)
        assert sorted(names) == sorted(state.id for state in states)
        if names:
            assert router.routed(opening, names[0]) >= 0
            router.completed(opening.token_ids, names[0])
            router.lost(names[-1])


def test_an_unknown_router_or_option_is_refused_by_name():
    with pytest.raises(ConfigurationError, match="no router 'fastest'; there are soonest, "):
        make_router("fastest")
    with pytest.raises(ConfigurationError, match=r"router round_robin: .*speed"):
        make_router("round_robin", speed=3)


# ----------------------------------------------------------------------------------------------------------- simple


def test_round_robin_takes_each_in_turn():
    router = RoundRobin()
    assert [router.rank(LONG, replicas("a", "b", "c"), 0.0)[0] for _ in range(4)] == ["a", "b", "c", "a"]


def test_the_power_of_two_never_takes_the_longer_of_two_queues():
    short, long = replicas("short", "long")
    router = PowerOfTwo()
    assert {router.rank(LONG, [replace(long, num_open=3), short], 0.0)[0] for _ in range(20)} == {"short"}
    assert {router.rank(LONG, [long, short], 0.0)[0] for _ in range(50)} == {"short", "long"}


def test_the_shortest_queue_is_first():
    a, b, c = replicas("a", "b", "c")
    states = [replace(a, num_open=2), replace(b, num_open=1), replace(c, num_open=3)]
    assert ShortestQueue().rank(LONG, states, 0.0) == ["b", "a", "c"]


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


# -------------------------------------------------------------------------------------------------------- FlowGuard


def test_flowguards_score_is_the_published_sum():
    replica = ReplicaState("a", num_queued=2, num_open=5, max_open=10, kv_usage=0.4, cache_hit_rate=0.25)
    assert score(replica, Weights(), replica.cache_hit_rate) == pytest.approx(0.1 + 0.06 + 0.24 + 0.1)


def test_memory_does_not_count_for_overload_as_published_and_does_when_mended():
    full = ReplicaState("a", num_queued=4, max_open=10, kv_usage=1.0)
    assert overload(full) == pytest.approx(0.81)
    assert overload(full, 1.0) == pytest.approx(1.8)


def test_the_overloaded_come_last_and_if_all_are_the_shortest_queue_is_first():
    a, b = replicas("a", "b")
    busy = replace(a, num_queued=5, num_open=5, cache_hit_rate=1.0)
    assert FlowGuard().rank(LONG, [busy, b], 0.0) == ["b", "a"]
    busier = replace(b, num_queued=6, num_open=6, cache_hit_rate=0.9)
    assert FlowGuard().rank(LONG, [busier, busy], 0.0) == ["a", "b"]
    assert FlowGuard(threshold=9.0).rank(LONG, [replace(b, num_open=3), busy], 0.0) == ["a", "b"]


def test_the_stale_are_excluded():
    stale, fresh = replicas("stale", "fresh")
    states = [replace(stale, cache_hit_rate=1.0), replace(fresh, measured_s=3.0)]
    assert FlowGuard().rank(LONG, states, 2.0) == ["stale", "fresh"]
    assert FlowGuard().rank(LONG, states, 2.1) == ["fresh", "stale"]


def test_as_published_hits_of_other_prompts_attract_a_query_and_mended_only_its_own():
    attractive, right = replicas("attractive", "right")
    attractive = replace(attractive, cache_hit_rate=0.9)
    published, mended = FlowGuard(), MendedFlowGuard()
    for router in (published, mended):
        router.rank(LONG, [attractive, right], 0.0)
        router.routed(LONG, "right")
        router.routed(OTHER, "attractive")
    assert published.rank(LONG, [attractive, right], 0.0)[0] == "attractive"
    assert mended.rank(LONG, [attractive, right], 0.0)[0] == "right"
    mended.lost("right")
    assert mended.rank(LONG, [attractive, right], 0.0)[0] == "attractive", "of equals the first"


# --------------------------------------------------------------------------------------------------- prefix affinity


def test_affinity_follows_the_prefix_whatever_the_queue_as_it_is_shipped():
    router, (a, b) = PrefixAffinity(), replicas("a", "b")
    router.routed(LONG, "a")
    assert router.rank(LONG, [replace(a, num_open=99), b], 0.0)[0] == "a"
    assert PrefixAffinity.rank(router, OTHER, [a, b], 0.0)[0] == "b", "what nobody holds goes where least is held"


def test_affinity_gives_way_to_queues_that_differ_by_more_than_its_threshold():
    router, (a, b) = PrefixAffinity(imbalance=4), replicas("a", "b")
    router.routed(LONG, "a")
    assert router.rank(LONG, [replace(a, num_open=4), b], 0.0)[0] == "a"
    assert router.rank(LONG, [replace(a, num_open=5), b], 0.0)[0] == "b"


def test_less_than_a_tenth_of_a_prompt_does_not_count():
    router, states = PrefixAffinity(index=PrefixIndex(block_size=1)), replicas("a", "b")
    router.routed(Opening(tuple(range(10))), "a")
    assert router.rank(Opening(tuple(range(100))), states, 0.0)[0] == "a"
    assert router.rank(Opening(tuple(range(101))), states, 0.0)[0] == "b"


# ------------------------------------------------------------------------------------------------------------- ours


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


def test_of_equals_the_replica_that_holds_less_is_taken():
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
