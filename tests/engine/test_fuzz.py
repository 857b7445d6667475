"""Four hundred fixed random loads; `make fuzz` runs more."""

from collections import Counter

import pytest

from tests.engine.fuzz import play, run_seeds
from tests.engine.fuzz.scenarios import make_load
from tests.engine.fuzz.transfers import FIRST_SEED, make_transfers

FAILED_ONCE = [2_769, 3_058, FIRST_SEED + 294, FIRST_SEED + 3_162, FIRST_SEED + 51_494]
"""What the scheduler did wrong before, in loads that others come across too rarely.

2769: a block that was computed from a failed load, and lost before that was known, was saved to host memory.
3058: the prefix cache was reset, and a partial prompt that could start then was left asleep.
51494, with a connector: a load that did not fit beside what loaded prompts still needed kept them from running.
294 and 3162, with one: two requests whose loads found no memory took the tokens of the one that would have freed it.
"""
SITUATIONS = [
    "aborts by a pause",
    "aborts in mid-step",
    "aborts of idle streams",
    "chunks after a gap",
    "chunks after the end",
    "chunks for idle streams without KV",
    "chunks in a pause",
    "chunks for preempted streams",
    "chunks in mid-prefill",
    "chunks with steps in flight",
    "clients that gave up",
    "copies of who was preempted",
    "events: Malformed",
    "forced preemptions",
    "host blocks not loaded",
    "host blocks not saved",
    "identical final prompts",
    "later hits after an eviction",
    "later hits of blocks that nobody holds",
    "later hits of those that run",
    "later hits that give a block back",
    "later hits with steps in flight",
    "pauses: abort",
    "pauses: keep",
    "pauses: wait",
    "plain requests",
    "plain requests with a grammar",
    "streams with a grammar",
    "prefix cache resets",
    "preemptions",
    "prompts that change token 0",
    "prompts that invalidate KV",
    "prompts that outgrow the model",
    "prompts that shrink",
    "request ids used again",
    "runs: asynchronous",
    "runs: runner V2",
    "runs: with bad slots",
    "runs: with classes",
    "runs: with data_high_water",
    "runs: with groups_prefills",
    "runs: with kv_budget",
    "runs: with max_data_tokens",
    "runs: with small host",
    "runs: with weights",
    "runs: without prefix cache",
    "steps with more idle streams than slots",
    "streams without a first chunk",
    "the engine slept beside idle streams",
    "tokens copied from prompts",
    "tokens copied wrongly",
    "tokens from the prefix cache",
]

WITH_CONNECTORS = [
    "events: Session",
    "hand-overs",
    "hand-overs after an eviction",
    "hand-overs of one token",
    "plans beside a last token in flight",
    "requests with failed loads",
]


def test_random_loads_are_served_correctly_and_meet_every_situation() -> None:
    met = run_seeds(range(400))
    assert {name for name in SITUATIONS if met[name] < 10} == set()


def test_random_loads_with_another_kv_connector_are_served_correctly_and_meet_every_situation() -> None:
    met = run_seeds(range(FIRST_SEED, FIRST_SEED + 80))
    assert {name for name in WITH_CONNECTORS if met[name] < 5} == set()


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_loads_that_once_went_wrong_are_served_correctly(seed: int) -> None:
    met: Counter[str] = Counter()
    play(make_load(seed) if seed < FIRST_SEED else make_transfers(seed), met)
    assert met["answers checked"]
