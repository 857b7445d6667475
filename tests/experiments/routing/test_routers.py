"""The routers that exist to compare with."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from experiments.routing.flowguard import FlowGuard, MendedFlowGuard, Weights, overload, score
from experiments.routing.prefix_affinity import PrefixAffinity
from experiments.routing.queue_routers import PowerOfTwo, ShortestQueue
from experiments.routing.routers import ALL_ROUTERS
from streamrag.routing import ROUTERS, Opening, ReplicaState
from streamrag.routing.prefix_index import PrefixIndex
from tests.routing.router_cases import LONG, OPENINGS, OTHER, STATES, check_ranking, replicas


@pytest.mark.parametrize("name", sorted(ALL_ROUTERS.keys() - ROUTERS.keys()))
@settings(max_examples=40)
@given(rounds=st.lists(st.tuples(OPENINGS, STATES), max_size=6))
def test_a_baseline_router_names_each_replica_once(name, rounds):
    check_ranking(ALL_ROUTERS[name](), rounds)


def test_the_power_of_two_never_takes_the_longer_of_two_queues():
    short, long = replicas("short", "long")
    router = PowerOfTwo()
    assert {router.rank(LONG, [replace(long, num_open=3), short], 0.0)[0] for _ in range(20)} == {"short"}
    assert {router.rank(LONG, [long, short], 0.0)[0] for _ in range(50)} == {"short", "long"}


def test_the_shortest_queue_is_first():
    a, b, c = replicas("a", "b", "c")
    states = [replace(a, num_open=2), replace(b, num_open=1), replace(c, num_open=3)]
    assert ShortestQueue().rank(LONG, states, 0.0) == ["b", "a", "c"]


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


def test_flowguard_follows_hits_of_other_prompts_and_the_mended_one_its_own():
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


def test_a_match_of_less_than_a_tenth_of_a_prompt_does_not_count():
    router, states = PrefixAffinity(index=PrefixIndex(block_size=1)), replicas("a", "b")
    router.routed(Opening(tuple(range(10))), "a")
    assert router.rank(Opening(tuple(range(100))), states, 0.0)[0] == "a"
    assert router.rank(Opening(tuple(range(101))), states, 0.0)[0] == "b"
