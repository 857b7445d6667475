"""The routers that exist to compare with."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrag.routing import ROUTERS, Opening
from streamrag.routing.prefix_index import PrefixIndex
from studies.routing.prefix_affinity import PrefixAffinity
from studies.routing.queue_routers import PowerOfTwo, ShortestQueue
from studies.routing.routers import ALL_ROUTERS
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
