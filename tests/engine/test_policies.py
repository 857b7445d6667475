"""The order that each policy makes, and how policies are named."""

import random
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import SPECS, policy_of, view_lists

from streamrag.core import RequestClass
from streamrag.engine import ClassPolicy, RequestView, make_policy
from streamrag.errors import ConfigurationError


def view(name: str, arrival_s: float = 0.0, **fields: object) -> RequestView:
    defaults: dict[str, object] = {"last_chunk_s": arrival_s, "num_tokens": 100}
    return RequestView(name, arrival_s, **{**defaults, **fields})  # type: ignore[arg-type]


def order(spec: str, *requests: RequestView) -> str:
    return " ".join(r.request_id for r in make_policy(spec).order(requests, 100.0))


def order_in_classes(spec: str, ageing_s: float, *requests: RequestView) -> str:
    return " ".join(r.request_id for r in ClassPolicy(make_policy(spec), ageing_s).order(requests, 100.0))


@pytest.mark.parametrize("spec", SPECS)
@given(requests=view_lists(), rng=st.randoms(use_true_random=False))
def test_an_order_is_total_and_does_not_depend_on_the_order_given(
    spec: str, requests: list[RequestView], rng: random.Random
) -> None:
    expected = policy_of(spec).order(requests, 10.0)
    shuffled = rng.sample(requests, len(requests))
    assert policy_of(spec).order(shuffled, 10.0) == expected
    assert sorted(expected) == sorted(requests)


@pytest.mark.parametrize("spec", SPECS)
@given(requests=view_lists())
def test_requests_that_have_shown_a_token_come_first(spec: str, requests: list[RequestView]) -> None:
    has_output = [r.has_output for r in policy_of(spec).order(requests, 10.0)]
    assert has_output == sorted(has_output, reverse=True)


@pytest.mark.parametrize("spec", [spec for spec in SPECS if "k_lpm" not in spec])  # whose order depends on who came
@given(steps=st.lists(view_lists(), max_size=4), rng=st.randoms(use_true_random=False))
def test_earlier_orders_do_not_change_the_order_of_a_policy(
    spec: str, steps: list[list[RequestView]], rng: random.Random
) -> None:
    policy, before = policy_of(spec), list[RequestView]()
    for number, requests in enumerate(steps):
        speed = rng.choice([100.0, 20_000.0])
        now = {r.request_id: r for r in requests} | {r.request_id: r for r in before if rng.random() < 0.5}
        before = list(now.values())  # some with the view of before, some with another, some are gone
        fresh = policy_of(spec)
        for each in (policy, fresh):
            each.on_speed(speed)
        assert policy.order(before, float(number)) == fresh.order(before, float(number))


def test_arrival_ignores_everything_but_the_arrival() -> None:
    assert order("arrival", view("b", 2), view("a", 3), view("c", 1, is_complete=False)) == "c b a"


def test_fcfs_serves_complete_prompts_first_and_each_tier_by_arrival() -> None:
    requests = view("p1", 1, is_complete=False), view("c3", 3), view("c2", 2), view("p0", 0, is_complete=False)
    assert order("fcfs", *requests) == "c2 c3 p0 p1"


def test_lcas_serves_the_newest_chunk_first_and_lcas_oldest_the_oldest() -> None:
    requests = view("c1", last_chunk_s=1), view("c2", last_chunk_s=2), view("p", last_chunk_s=3, is_complete=False)
    assert order("lcas", *requests) == "c2 c1 p"
    assert order("lcas_oldest", *requests) == "c1 c2 p"


def test_mcps_serves_the_most_computed_first_complete_or_not() -> None:
    requests = view("a", num_computed_tokens=1), view("b", num_computed_tokens=9, is_complete=False), view("c")
    assert order("mcps", *requests) == "b a c"


def test_srpf_prefers_short_prompts_until_a_long_one_has_waited() -> None:
    long, short = view("long", 0, num_tokens=20_000), view("short", 1, num_tokens=1_000)
    assert order("srpf(0.25, tokens_per_s=10_000)", long, short) == "short long"
    assert order("srpf(0.25, tokens_per_s=10_000)", long, short._replace(last_chunk_s=9)) == "long short"
    assert order("srpf(0, tokens_per_s=10_000)", long, short._replace(last_chunk_s=9)) == "short long"


def test_srpf_computes_first_what_is_likely_to_be_complete_first() -> None:
    old = view("old", 0, num_tokens=20_000, is_complete=False)
    new = view("new", 1, num_tokens=100, last_chunk_s=0.5, is_complete=False)
    complete = view("complete", 2, num_tokens=90_000)
    assert order("srpf", new, old, complete) == "complete old new"
    assert order("srpf", new._replace(expected_complete_s=2), old, complete) == "complete new old"


def test_srpf_counts_in_seconds_of_the_engine_at_hand_unless_it_is_told_a_speed() -> None:
    long, short = view("long", num_tokens=10_000), view("short", num_tokens=100, last_chunk_s=9)
    policy, told = make_policy("srpf(0.25)"), make_policy("srpf(0.25, tokens_per_s=100_000)")
    for each in (policy, told):
        each.on_speed(1_000_000.0)
        assert [r.request_id for r in each.order([long, short], 9.0)] == ["long", "short"]
        each.on_speed(1_000.0)
    assert [r.request_id for r in policy.order([long, short], 9.0)] == ["short", "long"]
    assert [r.request_id for r in told.order([long, short], 9.0)] == ["long", "short"]


def test_k_lpm_takes_the_oldest_then_the_longest_prefixes() -> None:
    requests = [view(f"r{i}", i, num_cached_tokens=10 * i) for i in range(5)]
    assert order("k_lpm(1)", *requests) == "r0 r1 r2 r3 r4"
    assert order("k_lpm(3)", *requests) == "r0 r4 r3 r1 r2"
    assert order("k_lpm(inf)", *requests) == "r4 r3 r2 r1 r0"


def test_k_lpm_continues_its_round_where_the_last_step_left_it() -> None:
    policy = make_policy("k_lpm(3)")
    requests = [view(f"r{i}", i, num_cached_tokens=10 * i) for i in range(5)]
    served = []
    while requests:
        first = policy.order(requests, 0.0)[0]
        policy.on_admitted([first])
        requests.remove(first)
        served.append(first.request_id)
    assert served == ["r0", "r4", "r3", "r1", "r2"]


@pytest.mark.parametrize("k", [1, 2, 5])
@given(num_older=st.integers(0, 5), rng=st.randoms(use_true_random=False))
def test_k_lpm_admits_within_its_bound_whatever_comes_later(k: int, num_older: int, rng: random.Random) -> None:
    policy = make_policy(f"k_lpm({k})")
    waiting = [view(f"r{i}", i, num_cached_tokens=rng.randrange(90)) for i in range(num_older)]
    waiting.append(view("victim", num_older, num_cached_tokens=0))
    for admission in range(1, k * (num_older + 1) + 1):
        waiting += [view(f"n{admission}-{j}", 100 + admission, num_cached_tokens=rng.randrange(90)) for j in range(3)]
        first = policy.order(waiting, 0.0)[0]
        policy.on_admitted([first])
        if first.request_id == "victim":
            return
        waiting.remove(first)
    pytest.fail("starved")


@given(ageing=st.sampled_from([0.25, 0.5, 1.0]), num_tokens=st.integers(1, 400), rng=st.randoms(use_true_random=False))
def test_srpf_is_overtaken_only_by_chunks_that_come_within_its_bound(
    ageing: float, num_tokens: int, rng: random.Random
) -> None:
    bound_s = num_tokens / 100 / ageing
    requests = [view("victim", num_tokens=num_tokens)]
    requests += [view(f"n{i}", rng.uniform(0, 2 * bound_s), num_tokens=rng.randrange(1, 400)) for i in range(20)]
    ordered = make_policy(f"srpf({ageing}, tokens_per_s=100)").order(requests, 10 * bound_s)
    ahead = ordered[: ordered.index(requests[0])]
    assert all(r.last_chunk_s < bound_s for r in ahead)


def test_classes_are_served_in_their_order_and_each_first_in_first_out() -> None:
    requests = [
        view("data2", since_s=2, last_chunk_s=4, request_class="stream", is_complete=False),
        view("data3", since_s=3, last_chunk_s=3, request_class="stream", is_complete=False),
        view("asked2", 2, request_class="session"),
        view("asked1", 1, request_class="session", num_tokens=9_000),
    ]
    assert order_in_classes("srpf", 100, *requests) == "asked1 asked2 data2 data3"


def test_the_pools_policy_orders_its_requests_in_the_places_between_the_classes() -> None:
    pool = [
        view("long", 90, num_tokens=9_000),
        view("short", 95, num_tokens=100),
        view("partial", 80, is_complete=False),
    ]
    others = [
        view("asked", 96, request_class="session"),
        view("early", 88, request_class="session"),
        view("late", 94.5, request_class="session"),
        view("data", since_s=99, last_chunk_s=99, request_class="stream", is_complete=False),
    ]
    # early 88, the pool's first place 93, late 94.5, asked 96, the pool's others 98 and 103, data 105
    assert order_in_classes("srpf(0, 1000)", 3, *pool, *others) == "early short late asked long partial data"
    assert order_in_classes("fcfs", 3, *pool, *others) == "early long late asked short partial data"


def test_without_other_classes_the_pool_s_policy_is_alone() -> None:
    requests = [view("a", num_tokens=9), view("b", num_tokens=5), view("c", is_complete=False)]
    assert order_in_classes("srpf", 1, *requests) == order("srpf", *requests) == "b a c"


@given(rank=st.integers(0, 2), ageing_s=st.sampled_from([0.5, 2.0]), rng=st.randoms(use_true_random=False))
def test_a_request_of_a_class_is_overtaken_only_by_what_comes_within_its_bound(
    rank: int, ageing_s: float, rng: random.Random
) -> None:
    names = get_args(RequestClass)
    # New chunks do not make a stream's wait begin anew.
    victim = view("victim", request_class=names[rank], is_complete=rank < 2, last_chunk_s=30.0 * (rank == 2))
    requests = [victim]
    for i in range(20):
        at_s = rng.uniform(0, 8 * ageing_s)
        requests.append(view(f"n{i}", at_s, since_s=at_s, request_class=rng.choice(names)))
    ordered = ClassPolicy(make_policy("fcfs"), ageing_s).order(requests, 40.0)
    ahead = ordered[: ordered.index(victim)]
    assert all(r.last_chunk_s <= rank * ageing_s for r in ahead)


def shortest_question_first(request: RequestView, now_s: float) -> int:
    return request.num_tokens


def test_a_custom_policy_is_found_by_its_dotted_name(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys
    import types

    module = types.ModuleType("own_policies")
    module.shortest = shortest_question_first  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "own_policies", module)
    assert order("own_policies.shortest", view("a", num_tokens=5), view("b", num_tokens=3)) == "b a"


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("fifo", "there is no policy 'fifo'"),
        ("fcfs(3)", "policy 'fcfs\\(3\\)'"),
        ("k_lpm(0)", "k must be a whole number"),
        ("k_lpm(two)", "policy 'k_lpm\\(two\\)'"),
        ("srpf(-1)", "ageing must be at least 0"),
        ("no_such_module.f", "cannot be imported"),
        ("math.pi", "is not a function"),
        ("a b", "neither a name"),
    ],
)
def test_a_policy_that_cannot_be_made_says_why(spec: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make_policy(spec)


@pytest.mark.parametrize("ageing_s", [0, -1, float("inf"), "soon", True])
def test_ageing_takes_a_number_of_seconds(ageing_s: float) -> None:
    with pytest.raises(ConfigurationError, match="class_ageing_s"):
        ClassPolicy(make_policy("fcfs"), ageing_s)
