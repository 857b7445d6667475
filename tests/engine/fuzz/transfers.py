"""Loads of an engine that a third-party KV connector gives KV to, or takes it from; and log-probabilities of prompts.

They follow vLLM's own tests, tests/v1/core and tests/v1/kv_connector/unit, whose situations the other loads never make.
Seeds from `FIRST_SEED` on play them.
"""

import random
from collections.abc import Callable
from dataclasses import replace
from typing import TypeAlias

from .connector import Remote
from .events import Abort, Chunk, Event, Evict, Plain, Reset, Session
from .scenarios import Scenario, make_load
from .situations import SITUATIONS, last_event_s, streams_of

__all__ = ["FIRST_SEED", "KINDS", "make_transfers"]

FIRST_SEED = 1_000_000
Kind: TypeAlias = Callable[[random.Random, Scenario], Scenario]
ALSO = ("ends", "gaps", "goers", "grammars", "malformed", "pauses")
"""The other situations that such loads have as well."""


def make_transfers(seed: int) -> Scenario:
    """The load of that seed."""
    rng = random.Random(seed)
    scenario = replace(make_load(seed), eviction="recompute", sliding_window=None, has_mamba=False)
    kind = sorted(KINDS)[seed % len(KINDS)]
    names = sorted(rng.sample(ALSO, rng.choice([0, 0, 1, 2])))
    scenario = KINDS[kind](rng, scenario)
    for name in names:
        scenario = SITUATIONS[name](rng, scenario)
    events = [*scenario.events, *_sessions(rng, scenario)]
    if rng.random() < 0.3:
        events += [
            (rng.uniform(0, last_event_s(scenario) + 5), Reset(rng.random() < 0.8)) for _ in range(rng.choice([1, 3]))
        ]
    events = sorted(events, key=lambda each: each[0])
    return replace(scenario, situations=(kind, *names), events=tuple(events))


def _hand_over(rng: random.Random, scenario: Scenario) -> Scenario:
    """A prefill engine: most answers have one token, many prompts end with a block, and memory is short."""
    scenario = _with_plain(rng, scenario, share=rng.choice([0.2, 0.7, 1.0]))
    events: list[tuple[float, Event]] = []
    for at_s, event in scenario.events:
        if isinstance(event, Plain) or (isinstance(event, Chunk) and event.is_complete):
            num_tokens = len(event.prompt) // scenario.block_size * scenario.block_size
            prompt = (
                event.prompt[:num_tokens] if isinstance(event, Plain) and num_tokens and rng.random() < 0.5 else None
            )
            max_tokens = 1 if rng.random() < 0.7 else event.max_tokens
            event = replace(event, prompt=prompt or event.prompt, max_tokens=max_tokens)
        events.append((at_s, event))
    events += _evictions(rng, scenario)
    remote = Remote(
        scenario.seed, rng.choice(["kv_producer", "kv_producer", "kv_both"]), most_send_steps=rng.choice([1, 3, 8])
    )
    return replace(
        scenario,
        remote=remote,
        events=tuple(events),
        is_async=rng.random() < 0.8,
        num_blocks=_num_blocks(rng, scenario),
    )


def _loads(rng: random.Random, scenario: Scenario) -> Scenario:
    """An engine that is given KV: late, in the background or at once, and some of it fails."""
    scenario = _with_plain(rng, scenario, share=rng.choice([0.3, 1.0]))
    remote = Remote(
        scenario.seed,
        rng.choice(["kv_consumer", "kv_consumer", "kv_both"]),
        share_found=rng.choice([0.5, 1.0]),
        most_deferrals=rng.choice([0, 0, 1, 8]),
        share_async=rng.choice([0.0, 0.5, 1.0]),
        most_load_steps=rng.choice([1, 4, 10]),
        share_of_faults=rng.choice([0.0, 0.0, 0.3, 0.8]),
        failure_policy=rng.choice(["recompute", "fail"]),
    )
    is_async = rng.random() < 0.6
    if remote.share_of_faults and (is_async or remote.failure_policy == "recompute"):
        # What a step has loaded and computed wrongly stays in the prefix cache, also of vLLM's own scheduler, if the
        # request loses its KV, or ends, before it has computed it again.
        remote = replace(remote, share_async=1.0)
    return replace(
        scenario,
        remote=remote,
        is_async=is_async,
        num_blocks=_num_blocks(rng, scenario),
        events=(*scenario.events, *_evictions(rng, scenario)),
    )


def _logprobs(rng: random.Random, scenario: Scenario) -> Scenario:
    """Plain requests want log-probabilities of their prompts, and get blocks of which it is not known whether a load
    into them has failed: they are restarted, some while the end of their prompt is computed."""
    scenario = _with_plain(rng, scenario, share=0.3)
    events = list(scenario.events)
    for number in range(rng.choice([5, 15])):
        num_tokens = rng.randrange(scenario.max_model_len // 2, scenario.max_model_len)
        prompt = tuple(rng.randrange(4) for _ in range(num_tokens))
        plain = Plain(f"pl{number}", prompt, rng.randrange(1, 4), has_prompt_logprobs=True)
        events.append((rng.uniform(0, last_event_s(scenario) + 5), plain))
    scenario = replace(scenario, events=tuple(sorted(events, key=lambda each: each[0])))
    scenario = SITUATIONS["bad slots"](rng, scenario)
    for_one = -(-scenario.max_model_len // scenario.block_size)
    return replace(
        scenario,
        eviction="swap",
        is_async=rng.random() < 0.9,
        has_v2_runner=rng.random() < 0.3,
        share_of_evicted_loaders=rng.choice([0.3, 1.0]),
        share_of_faults=rng.choice([0.1, 0.3]),
        num_host_blocks=rng.choice([40, 400]),
        num_blocks=int(for_one * rng.choice([1, 1.2, 1.5])),
        max_num_batched_tokens=rng.choice([40, 200, 200]),
        watermark=0.0,
        low_water=0.0,
    )


def _late_answers(rng: random.Random, scenario: Scenario) -> Scenario:
    """Many requests at once, in steps of few tokens, and a connector that answers late, or loads in the background."""
    scenario = _with_plain(rng, scenario, share=1.0)
    events: list[tuple[float, Event]] = [timed for timed in scenario.events if isinstance(timed[1], Plain | Abort)]
    for number in range(rng.choice([3, 10, 30])):
        prompt = tuple(rng.randrange(4) for _ in range(rng.randrange(1, scenario.max_model_len)))
        events.append((rng.choice([0.0, 0.0, rng.uniform(0, 9)]), Plain(f"many{number}", prompt, rng.randrange(1, 6))))
    remote = Remote(
        scenario.seed,
        "kv_consumer",
        share_found=rng.choice([0.5, 1.0]),
        most_deferrals=rng.choice([0, 2, 8]),
        share_async=rng.choice([0.0, 0.5, 1.0]),
        most_load_steps=rng.choice([1, 5]),
    )
    return replace(
        scenario,
        events=tuple(events),
        remote=remote,
        asks_all=True,
        policy=rng.choice(["arrival", "fcfs", "srpf"]),
        options={"sizes_steps": False},
        late_binding=False,
        low_water=0.0,
        watermark=0.0,
        num_blocks=1_000,
        max_num_seqs=rng.choice([2, 8, 40]),
        max_num_batched_tokens=rng.choice([40, 80, 200]),
    )


KINDS: dict[str, Kind] = {
    "hand-over": _hand_over,
    "late answers": _late_answers,
    "loads": _loads,
    "prompt log-probabilities": _logprobs,
}


def _with_plain(rng: random.Random, scenario: Scenario, *, share: float) -> Scenario:
    """Make plain requests of that share of the streams, with their last prompts."""
    events = list(scenario.events)
    for name, chunks in streams_of(scenario):
        if rng.random() < share:
            events = [timed for timed in events if getattr(timed[1], "request_id", "") != name]
            at_s, last = chunks[-1]
            prompt = last.prompt[: scenario.max_model_len - 1]
            events.append((rng.uniform(chunks[0][0], at_s), Plain(f"p{name}", prompt, last.max_tokens, last.stop)))
            if rng.random() < 0.15:
                events.append((at_s + rng.uniform(0, 6), Abort(f"p{name}", is_in_mid_step=rng.random() < 0.5)))
    return replace(scenario, events=tuple(sorted(events, key=lambda each: each[0])))


def _evictions(rng: random.Random, scenario: Scenario) -> list[tuple[float, Event]]:
    times = [rng.uniform(0, last_event_s(scenario) + 5) for _ in range(rng.choice([0, 0, 5, 20]))]
    return [(at_s, Evict(rng.randrange(100))) for at_s in times]


def _sessions(rng: random.Random, scenario: Scenario) -> list[tuple[float, Event]]:
    """vLLM's own streaming sessions, which our scheduler refuses."""
    num = rng.choice([0, 0, 1, 3])
    prompts = [tuple(rng.randrange(4) for _ in range(rng.randrange(1, 20))) for _ in range(num)]
    return [(rng.uniform(0, last_event_s(scenario)), Session(f"v{i}", prompt)) for i, prompt in enumerate(prompts)]


def _num_blocks(rng: random.Random, scenario: Scenario) -> int:
    for_one = -(-scenario.max_model_len // scenario.block_size)
    return int(for_one * rng.choice([1, 1.3, 2, 4]))
