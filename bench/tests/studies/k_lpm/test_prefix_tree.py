import math
from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrag.core import common_prefix_len
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import recompute_s
from streamrag.engine.policies import LongestPrefixPolicy
from streamrag.engine.request import RequestView
from streamrag.trace.values import TracedQuery, TracedUpdate
from streamrag_bench.workload import NUM_TAIL_TOKENS, Tokens
from studies.k_lpm.prefix_tree import Shape, Theorem, TieBlindPolicy, tree

SHAPE = Shape(num_prompts=24, num_repeats=4, num_user_tokens=40, num_doc_tokens=NUM_TAIL_TOKENS + 20)


def prompt(query: TracedQuery) -> list[int]:
    (event,) = query.events
    assert isinstance(event, TracedUpdate)
    tokens = Tokens()
    return [token for chunk in event.chunks for token in tokens.of_chunk(chunk)] + tokens.of_tail(query)


def test_prompts_form_a_tree() -> None:
    prompts = [prompt(query) for query in tree(SHAPE, seed=1).queries]
    assert {len(p) for p in prompts} == {SHAPE.num_prompt_tokens}
    shared = Counter(common_prefix_len(a, b) for i, a in enumerate(prompts) for b in prompts[:i])
    num_in_pairs = 6 * math.comb(4, 2)
    assert shared == {SHAPE.num_user_tokens: num_in_pairs, 0: math.comb(24, 2) - num_in_pairs}
    assert SHAPE.num_distinct_tokens == len({tuple(p[: i + 1]) for p in prompts for i in range(len(p))})


def test_each_seed_has_an_order_of_its_own() -> None:
    one, again, other = (tree(SHAPE, seed) for seed in (1, 1, 2))
    assert one == again
    assert one != other
    assert sorted(q.query_id for q in one.queries) == sorted(q.query_id for q in other.queries)


def test_the_bounds_are_those_of_the_papers_example() -> None:
    burst = Theorem(n=4, u=5, d=5, s=0, T=0)
    assert (burst.fcfs(), burst.lpm(2), burst.k_lpm(2)) == (40, 30, 30)
    apart = Theorem(n=4, u=5, d=5, s=2, T=8)
    assert (apart.fcfs(), apart.lpm(2), apart.k_lpm(2)) == (8 + 32, 8 + 30, 8 + 26)


def test_fcfs_is_k_lpm_with_one_repeat() -> None:
    some = Theorem(n=30, u=0.7, d=0.2, s=0.1, T=3)
    assert some.k_lpm(1) == pytest.approx(some.fcfs())


def test_a_user_and_a_document_together_take_what_a_prompt_takes_alone() -> None:
    profile = load_profile("h200-llama8b-tp2")
    shape = Shape(600, 4, 6_656, 1_536)
    plugged_in = Theorem.of(shape, profile, 8_192, rate=10, starts_at_s=60.0)
    assert plugged_in.u + plugged_in.d == pytest.approx(recompute_s(profile, 0, 8_192, 8_192))
    assert (plugged_in.n, plugged_in.s, plugged_in.T) == (600, 0.1, 60.0)
    assert plugged_in.u > 4 * plugged_in.d > 0


def test_with_few_arrivals_the_theorem_does_not_hold_which_its_proof_overlooks() -> None:
    rare = Theorem(n=8, u=1, d=1, s=4, T=32)  # s is above u + kd
    assert longest_ttft([0, 0, 1, 1, 2, 2, 3, 3], rare, LongestPrefixPolicy(2)) > rare.k_lpm(2)


def longest_ttft(users: list[int], theorem: Theorem, policy: LongestPrefixPolicy) -> float:
    """Under definition 2 with no attention costs: one prompt at a time, of which the last is remembered."""
    waiting = dict(enumerate(users))
    now_s, last_user, longest_s = theorem.T, -1, 0.0
    while waiting:
        views = [
            RequestView(
                f"q{i:03}", theorem.s * (i + 1), theorem.s * (i + 1), 2, num_cached_tokens=int(user == last_user)
            )
            for i, user in waiting.items()
        ]
        first = policy.order(views, now_s)[0]
        policy.on_admitted([first])
        user = waiting.pop(int(first.request_id[1:]))
        now_s += theorem.d + (theorem.u if user != last_user else 0.0)
        last_user = user
        longest_s = max(longest_s, now_s - first.arrival_s)
    return longest_s


@given(
    st.sampled_from([1, 2, 4]),
    st.permutations([user for user in range(5) for _ in range(4)]),
    st.floats(0, 10),
    st.floats(0, 10),
    st.floats(0, 1),
)
def test_our_k_lpm_keeps_the_theorems_bound_whatever_the_order_of_arrival(
    k: int, users: list[int], u: float, d: float, busyness: float
) -> None:
    n, s = len(users), busyness * (u + k * d)
    theorem = Theorem(n, u, d, s, T=s * n)
    # Also where a user has a multiple of k prompts: each round finds k of one user.
    assert longest_ttft(users, theorem, LongestPrefixPolicy(k)) <= theorem.k_lpm(k) + 1e-6


@pytest.mark.parametrize(
    ("make", "can_starve"), [(lambda: LongestPrefixPolicy(math.inf), False), (TieBlindPolicy, True)]
)
def test_lpm_keeps_the_bound_of_k_lpm_where_ties_go_to_the_oldest_and_breaks_it_where_they_are_random(
    make: Callable[[], LongestPrefixPolicy], can_starve: bool
) -> None:
    users = list(range(60)) * 4
    theorem = Theorem(len(users), u=3, d=1, s=1, T=240)
    assert (longest_ttft(users, theorem, make()) > theorem.k_lpm(4)) is can_starve


def test_random_ties_are_only_among_equally_long_prefixes_and_behind_those_that_were_admitted() -> None:
    policy = TieBlindPolicy()
    admitted = RequestView("a", 9.0, 9.0, 100, is_running=True)
    hit = RequestView("b", 8.0, 8.0, 100, num_cached_tokens=50)
    others = [RequestView(f"c{i}", float(i), float(i), 100) for i in range(6)]
    orders = [policy.order([*others, hit, admitted], 10.0) for _ in range(20)]
    assert all(order[:2] == [admitted, hit] and sorted(order[2:]) == others for order in orders)
    assert len({tuple(order) for order in orders}) > 10
