"""How fast replicas are, by the time for which prompts wait there."""

import random

from streamrag.routing.soonest import LASTS_S, QUERY_TOKENS, Speed


def computing(num_seconds: float, share: float, tokens_per_s: float, *, seed: int = 1) -> tuple[Speed, float]:
    """Prompts come and are computed one at a time, of which so many lie in the cache but for 32 tokens."""
    rng, speed, now_s = random.Random(seed), Speed(), 0.0
    while now_s < num_seconds:
        now_s += rng.expovariate(2.0)
        num_tokens = 32 if rng.random() < share else 1_184
        speed.waiting(True, now_s)
        now_s += (num_tokens + QUERY_TOKENS) / tokens_per_s
        seconds = speed.computed(now_s)
        speed.waiting(False, now_s)
        speed.add(num_tokens, seconds, now_s)
    return speed, now_s


def test_a_replica_that_finds_most_in_its_cache_is_as_fast_as_one_that_computes_all() -> None:
    for share in (0.0, 0.5, 1.0):
        speed, now_s = computing(60.0, share, 9_000.0)
        assert abs(speed.tokens_per_s(now_s) - 9_000) < 1


def test_a_replica_that_becomes_three_times_slower_is_noticed_in_twenty_queries() -> None:
    speed, now_s = computing(60.0, 0.5, 9_000.0)
    for _ in range(20):
        speed.waiting(True, now_s)
        now_s += 1_000 / 3_000
        speed.add(1_000 - QUERY_TOKENS, speed.computed(now_s), now_s)
        speed.waiting(False, now_s)
    assert 3_000 < speed.tokens_per_s(now_s) < 3_600


def test_prompts_that_wait_together_share_the_time() -> None:
    speed = Speed(0)
    speed.waiting(True, 0.0)
    for at_s in (1.0, 2.0, 2.0):
        speed.add(500, speed.computed(at_s), at_s)
    assert speed.tokens_per_s(2.0) == 0.9 * (500 + 0.9 * (500 + 0.9 * 500)) / (0.9 * (0.9 * (1 + 0.9 * 1)))
    assert speed.tokens_per_s(2.0 + LASTS_S) == 0
