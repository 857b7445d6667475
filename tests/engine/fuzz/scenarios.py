"""Random loads for the fuzz: what a few clients do, and when. Pure data, made from a seed."""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, get_args

from streamrag.core import RequestClass

from .clients import VOCABULARY
from .connector import Remote
from .events import Abort, Chunk, Event, Evict, Plain, Reset

__all__ = ["POLICIES", "Scenario", "make_load"]

POLICIES = ["arrival", "fcfs", "lcas", "lcas_oldest", "mcps", "k_lpm(1)", "k_lpm(2)", "k_lpm(inf)", "srpf", "srpf(0.1)"]


@dataclass(frozen=True, slots=True)
class Scenario:
    """An engine, and what happens to it at which time."""

    seed: int
    policy: str
    can_partial_evict: bool | None
    num_partial_tokens: int | None
    late_binding: bool
    is_async: bool
    has_v2_runner: bool
    has_prefix_cache: bool
    must_fit_whole: bool
    watermark: float
    sliding_window: int | None
    has_mamba: bool
    block_size: int
    max_model_len: int
    num_blocks: int
    eviction: str
    num_host_blocks: int
    share_of_faults: float
    """Share of the copies between device and host memory that fail."""
    low_water: float
    max_num_seqs: int
    max_num_batched_tokens: int
    events: tuple[tuple[float, Event], ...] = field(repr=False)
    num_draft_tokens: int = 0
    """How many tokens of a draft a step verifies at most; 0 for an engine without drafts."""
    vocabulary: int = VOCABULARY
    """How many tokens the model knows. If few, then answers come across what stands in their prompts."""
    situations: tuple[str, ...] = ()
    """What was added to the load; see `situations`."""
    bad_loads: frozenset[int] = frozenset()
    """Host slots that cannot be read."""
    bad_saves: frozenset[int] = frozenset()
    """Host slots that cannot be written."""
    share_of_evicted_loaders: float = 0.0
    """Share of the requests for which a step loads that lose their KV before that step has ended."""
    num_true_host_blocks: int | None = None
    """How many there are, if fewer than the scheduler was promised."""
    reused_ids: Mapping[str, str] = field(default_factory=dict)
    """From a request to the one whose id it takes, if that one has ended by then."""
    request_classes: Mapping[str, RequestClass] = field(default_factory=dict)
    """Of streams; pool, if not here."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Further ones of the scheduler."""
    remote: Remote | None = None
    """What a third-party KV connector does, if there is one."""
    asks_all: bool = False
    """Whether nothing but the tokens of a step and the slots keeps requests from being started."""

    @property
    def has_logprobs(self) -> bool:
        return any(isinstance(event, Plain) and event.has_prompt_logprobs for _, event in self.events)


def make_load(seed: int) -> Scenario:
    rng = random.Random(seed)
    block_size = rng.choice([2, 4, 8])
    max_model_len = rng.choice([40, 64, 100])
    num_blocks_for_one = -(-max_model_len // block_size)
    max_num_seqs = rng.choice([1, 2, 3, 4, 8])
    documents = [_tokens(rng, rng.randrange(1, 25)) for _ in range(6)]
    template = _tokens(rng, rng.choice([0, 3, block_size, 2 * block_size + 1]))
    is_crowded = rng.random() < 0.1
    num_requests = 10 * max_num_seqs if is_crowded else rng.randrange(1, 10)
    spread_s = rng.choice([0.5, 3.0, 15.0, 60.0])
    events: list[tuple[float, Event]] = []
    for number in range(num_requests):
        start_s = 0.0 if is_crowded else rng.uniform(0, spread_s)
        is_plain = not is_crowded and rng.random() < 0.3
        make = _plain if is_plain else _stream
        events += make(rng, f"{'p' if is_plain else 's'}{number}", start_s, template, documents, max_model_len)
    last_s = max(at_s for at_s, _ in events)
    for _ in range(rng.choice([0, 0, 0, 1, 4])):
        events.append((rng.uniform(0, last_s + 5), Evict(rng.randrange(100))))
    if rng.random() < 0.1:
        events.append((rng.uniform(0, last_s + 5), Reset()))
    # Drawn last, and from elsewhere: the seeds above stay what they were.
    window = random.Random(-seed - 1).choice([None, None, None, 1, block_size, 3 * block_size + 1])
    swap = random.Random(-2 * seed - 1_000_003)
    if swap.random() < 0.6:
        window = None
    policy, can_partial_evict = rng.choice(POLICIES), rng.random() < 0.7
    num_partial_tokens = rng.choice([None, 3, 2_048])
    is_async, has_v2_runner, has_prefix_cache = rng.random() < 0.5, rng.random() < 0.4, rng.random() < 0.7
    eviction = (
        swap.choice(["recompute", "swap", "swap", "cost"]) if has_prefix_cache and window is None else "recompute"
    )
    if eviction != "recompute" and random.Random(-5 * seed - 11).random() < 0.5:
        can_partial_evict = None
    scales = [1, 1, 1.3, 2, 4, 20]
    if eviction != "recompute":
        scales = [1, 1, 1.3, 1.6, 2]
        num_evictions = swap.choice([0, 10, 40])
        events += [(swap.uniform(0, last_s + 5), Evict(swap.randrange(100))) for _ in range(num_evictions)]
    classing = random.Random(-7 * seed - 17)
    request_classes: dict[str, RequestClass] = {}
    options: dict[str, Any] = {}
    if classing.random() < 0.4:
        options = {"class_ageing_s": classing.choice([None, 0.5, 3.0, 4.0])}
        names = sorted({event.request_id for _, event in events if isinstance(event, Chunk)})
        request_classes = {name: classing.choice(get_args(RequestClass)[:3]) for name in names}
    if classing.random() < 0.4:
        options |= {
            "data_high_water": classing.choice([None, 0.5, 0.9]),
            "max_data_tokens": classing.choice([None, 3]),
            "kv_budget": classing.choice([None, 0.1, 0.5, 1.0]),
            "groups_prefills": classing.random() < 0.7,
        }
    if random.Random(-11 * seed - 3).random() < 0.2:
        options["sizes_steps"] = False
    if random.Random(-13 * seed - 29).random() < 0.15:
        options |= {"looks_up_again": False}
    return Scenario(
        seed=seed,
        request_classes=request_classes,
        options=options,
        sliding_window=window,
        has_mamba=False,
        eviction=eviction,
        num_host_blocks=swap.choice([3, 10, 40, 400]),
        share_of_faults=swap.choice([0.0, 0.0, 0.1, 0.3]),
        low_water=swap.choice([0.0, 0.1, 0.5]),
        policy=policy,
        can_partial_evict=can_partial_evict,
        num_partial_tokens=num_partial_tokens,
        late_binding=random.Random(-3 * seed - 7).random() < 0.8,
        is_async=is_async,
        has_v2_runner=has_v2_runner,
        has_prefix_cache=has_prefix_cache,
        must_fit_whole=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        block_size=block_size,
        max_model_len=max_model_len,
        num_blocks=(1 if window is None else 2) * int(num_blocks_for_one * rng.choice(scales)),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max(max_num_seqs, rng.choice([4, 8, 16, 40, 200])),
        events=tuple(sorted(events, key=lambda e: e[0])),
    )


def _tokens(rng: random.Random, num: int) -> tuple[int, ...]:
    return tuple(rng.randrange(4) for _ in range(num))


def _plain(
    rng: random.Random,
    name: str,
    at_s: float,
    template: tuple[int, ...],
    documents: list[tuple[int, ...]],
    max_model_len: int,
) -> list[tuple[float, Event]]:
    prompt = (template + sum(rng.sample(documents, rng.randrange(1, 5)), ()))[: max_model_len - 1]
    events: list[tuple[float, Event]] = [(at_s, Plain(name, prompt, rng.randrange(1, 12), _stop(rng)))]
    return events + _maybe_abort(rng, name, at_s, at_s + 10)


def _stream(
    rng: random.Random,
    name: str,
    at_s: float,
    template: tuple[int, ...],
    documents: list[tuple[int, ...]],
    max_model_len: int,
) -> list[tuple[float, Event]]:
    gap_s = rng.choice([0.0, 0.3, 1.0, 5.0, 20.0])
    num_chunks = rng.choice([1, 2, 3, 5, 8])
    limit = max_model_len - 1
    prompt: tuple[int, ...] = ()
    events: list[tuple[float, Event]] = []
    first_s = at_s
    for index in range(num_chunks):
        is_complete = index == num_chunks - 1
        old = prompt
        prompt = _next_prompt(rng, old, template, documents)
        if rng.random() > 0.03:  # else it may outgrow the model
            prompt = prompt[:limit]
        num_shared = next((i for i, (a, b) in enumerate(zip(old, prompt, strict=False)) if a != b), None)
        num_shared = min(len(old), len(prompt)) if num_shared is None else num_shared
        # There is no empty request: one token at least is sent again.
        num_kept = min(rng.choice([num_shared, num_shared, num_shared // 2, 0]), len(prompt) - 1)
        chunk = Chunk(name, index, prompt, num_kept, is_complete, rng.randrange(1, 12), _stop(rng))
        events.append((at_s, chunk))
        at_s += rng.expovariate(1 / gap_s) if gap_s else 0.0
    return events + _maybe_abort(rng, name, first_s, at_s + 5)


def _next_prompt(
    rng: random.Random, old: tuple[int, ...], template: tuple[int, ...], documents: list[tuple[int, ...]]
) -> tuple[int, ...]:
    if not old:
        return template + rng.choice(documents)
    kind = rng.choice(["append", "append", "append", "one more", "same", "shrink", "first token", "replace", "reorder"])
    match kind:
        case "append":
            return old + rng.choice(documents)
        case "one more":
            return old + _tokens(rng, 1)
        case "same":
            return old
        case "shrink":
            return old[: rng.randrange(1, len(old) + 1)]
        case "first token":
            return ((old[0] + 1) % 4, *old[1:])
        case "replace":
            position = rng.randrange(len(old))
            return (*old[:position], (old[position] + 1) % 4, *rng.choice(documents))
        case _:
            return template + sum(rng.sample(documents, 3), ())


def _stop(rng: random.Random) -> int | None:
    return rng.randrange(50) if rng.random() < 0.3 else None


def _maybe_abort(rng: random.Random, name: str, from_s: float, until_s: float) -> list[tuple[float, Event]]:
    return [(rng.uniform(from_s, until_s), Abort(name))] if rng.random() < 0.1 else []
