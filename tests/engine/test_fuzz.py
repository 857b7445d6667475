"""A fixed thousand of random loads; `make fuzz` runs more."""

from collections import Counter

import pytest
from fuzz import run_seed, run_seeds

FAILED_ONCE = [2_769, 3_058]
"""What the scheduler did wrong before, in loads that others come across too rarely.

2769: a block that was computed from a failed load, and lost before that was known, was saved to host memory.
3058: the prefix cache was reset, and a partial prompt that could start then was left asleep.
"""
SITUATIONS = [
    "aborts of idle streams",
    "chunks after the end",
    "chunks for idle streams without KV",
    "chunks for preempted streams",
    "chunks in mid-prefill",
    "chunks with steps in flight",
    "forced preemptions",
    "identical final prompts",
    "plain requests",
    "prefix cache resets",
    "preemptions",
    "prompts that change token 0",
    "prompts that invalidate KV",
    "prompts that outgrow the model",
    "prompts that shrink",
    "runs: asynchronous",
    "runs: runner V2",
    "runs: without prefix cache",
    "steps with more idle streams than slots",
    "the engine slept beside idle streams",
    "tokens from the prefix cache",
]


@pytest.mark.timeout(180)
def test_a_thousand_random_loads_are_served_correctly_and_meet_every_situation() -> None:
    met = run_seeds(range(1_000))
    assert {name for name in SITUATIONS if met[name] < 10} == set()


@pytest.mark.parametrize("seed", FAILED_ONCE)
def test_loads_that_once_went_wrong_are_served_correctly(seed: int) -> None:
    met: Counter[str] = Counter()
    run_seed(seed, met)
    assert met["answers checked"]
