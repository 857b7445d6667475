"""Random loads for the fuzz of sessions: an engine, sessions on it, and those around them. Made from a seed."""

import random
from dataclasses import dataclass, replace

from tests.engine.fuzz.scenarios import Scenario, make_load

from .engine import LONGEST

__all__ = ["ANSWERS", "Load", "SessionLoad", "WatchLoad", "make_session_load"]

SYSTEMS = ("Watch.", "Watch.", "You watch a long list of prices.", "")
FROZEN = ("", "Watch.", "You know this document.", "A document." * 9)
ANSWERS = (("yes", "no"), ("high", "low", "as before"), ("very high", "very low", "as before", "as never"))


@dataclass(frozen=True, slots=True)
class WatchLoad:
    """A question that is kept answered."""

    question: str
    answers: tuple[str, ...]
    min_interval_s: float
    priority: int
    max_tokens: int
    from_s: float
    until_s: float | None
    """When it is closed; None if the session closes it."""


@dataclass(frozen=True, slots=True)
class SessionLoad:
    """A session, and what is done to it."""

    system: str
    window_tokens: int
    slide_share: float
    max_waiting: int
    num_texts: int
    gap_s: float
    """Mean time between two texts."""
    longest: int
    """Characters of a text, at most."""
    freezes: tuple[str, ...]
    """System texts that take the place of the first, between texts."""
    num_askers: int
    closes_at_s: float | None
    watches: tuple[WatchLoad, ...]


@dataclass(frozen=True, slots=True)
class Load:
    """All of one run."""

    engine: Scenario
    step_s: float
    num_turns: int
    """Of the loop, that a message to the engine waits before it is sent."""
    spread_s: float
    """Most of it happens within that time."""
    max_batch: int
    """Texts that a session takes in at once."""
    sessions: tuple[SessionLoad, ...]
    num_plain: int
    """Requests of others."""
    num_evictions: int
    num_resets: int


def make_session_load(seed: int) -> Load:
    rng = random.Random(-7 * seed - 13)
    engine = make_load(seed)
    if rng.random() < 0.5:
        engine = replace(engine, eviction=rng.choice(["swap", "cost"]), has_prefix_cache=True, sliding_window=None)
    num_groups = 1 if engine.sliding_window is None else 2
    block_size = rng.choice([4, 8, 16, 32, 128])
    num_for_one = -(-LONGEST // block_size)
    engine = replace(
        engine,
        block_size=block_size,
        max_model_len=LONGEST,
        num_blocks=num_groups * int(num_for_one * rng.choice([1, 1, 1.2, 1.5, 2, 4])),
        max_num_batched_tokens=max(engine.max_num_seqs, rng.choice([16, 64, 200, 1000])),
        num_partial_tokens=rng.choice([None, 20, 200]),
        events=(),
    )
    spread_s = rng.choice([1.0, 5.0, 30.0])
    return Load(
        engine=engine,
        step_s=rng.choice([0.003, 0.03, 0.3]),
        num_turns=rng.choice([0, 1, 2]),
        spread_s=spread_s,
        max_batch=rng.choice([1, 4, 256]),
        sessions=tuple(_session(rng, number, spread_s) for number in range(rng.choice([1, 1, 2, 3]))),
        num_plain=rng.choice([0, 0, 2, 8]),
        num_evictions=rng.choice([0, 0, 10, 40]),
        num_resets=rng.choice([0, 0, 0, 2]),
    )


def _session(rng: random.Random, number: int, spread_s: float) -> SessionLoad:
    num_texts = rng.choice([0, 3, 10, 30])
    return SessionLoad(
        system=rng.choice(SYSTEMS),
        window_tokens=rng.choice([1, 20, 60, 100, 150, 200, 300]),
        slide_share=rng.choice([0.1, 0.5, 0.5, 0.9]),
        max_waiting=rng.choice([2, 4096, 4096]),
        num_texts=num_texts,
        gap_s=rng.choice([0.0, spread_s / max(num_texts, 1), spread_s / max(num_texts, 1)]),
        longest=rng.choice([0, 5, 12, 12, 40, 200]),
        freezes=tuple(rng.choice(FROZEN) for _ in range(rng.choice([0, 0, 1, 4]))),
        num_askers=rng.choice([2, 5, 15]),
        closes_at_s=rng.uniform(0, spread_s) if rng.random() < 0.2 else None,
        watches=tuple(_watch(rng, number, spread_s) for _ in range(rng.choice([0, 0, 1, 3]))),
    )


def _watch(rng: random.Random, number: int, spread_s: float) -> WatchLoad:
    answers = rng.choice([(), (), *ANSWERS])
    from_s = rng.choice([0.0, rng.uniform(0, spread_s)])
    return WatchLoad(
        question=rng.choice(["Is it so?", "Any over 90?", "What now?", "Why?" * 20]),
        answers=answers,
        min_interval_s=rng.choice([0.0, 0.0, spread_s / 5]),
        priority=rng.choice([0, 0, 1, 2]),
        max_tokens=rng.choice([1, 4, 12]),
        from_s=from_s,
        until_s=from_s + rng.uniform(0, spread_s) if rng.random() < 0.3 else None,
    )
