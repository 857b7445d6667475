"""A fixed thousand of random loads; `make fuzz` runs more."""

import pytest
from fuzz import run_seeds

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
