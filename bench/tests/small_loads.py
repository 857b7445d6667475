"""Small loads, made by hand or drawn at random."""

import random

from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedEvent, TracedQuery, TracedUpdate
from streamrag_bench.cell import CellSettings
from streamrag_bench.simulate import run_cell

PROFILE = "h200-llama8b-tp2"


def chunk(key: str, num_tokens: int) -> TracedChunk:
    return TracedChunk(key, num_tokens)


def appending(query_id: str, arrival_s: float, *sizes: int, gap_s: float = 0.5) -> TracedQuery:
    """A chunk every `gap_s`; retrieval ends with the last."""
    events = tuple(
        TracedAppend(gap_s * (i + 1), chunk(f"{query_id}-{i}", num_tokens)) for i, num_tokens in enumerate(sizes)
    )
    return TracedQuery(query_id, arrival_s, "", events, end_s=events[-1].at_s)


def updating(query_id: str, arrival_s: float, *pools: tuple[str, ...], size: int = 700) -> TracedQuery:
    """A pool of chunks of `size` tokens every 0.3 s; retrieval ends 0.2 s after the last."""
    events = tuple(
        TracedUpdate(0.3 * (i + 1), tuple(chunk(f"{query_id}-{name}", size) for name in pool))
        for i, pool in enumerate(pools)
    )
    return TracedQuery(query_id, arrival_s, "", events, end_s=events[-1].at_s + 0.2)


def random_query(query_id: str, rng: random.Random, *, can_update: bool = True) -> TracedQuery:
    events: list[TracedEvent] = []
    at_s = 0.0
    pool = [chunk(f"{query_id}-{i}", rng.randrange(1, 4_000)) for i in range(6)]
    for i in range(rng.randrange(1, 6)):
        at_s += rng.choice([0.001, 0.01, 0.1, 1.0]) * rng.random()
        if can_update and rng.random() < 0.5:
            events.append(TracedUpdate(at_s, tuple(rng.sample(pool, rng.randrange(1, 6)))))
        else:
            events.append(TracedAppend(at_s, chunk(f"{query_id}-more-{i}", rng.randrange(1, 4_000))))
    return TracedQuery(query_id, 0.0, "", tuple(events), end_s=at_s + rng.choice([0, 0.001, 0.5]))


APPENDS = Trace(tuple(appending(f"q{i}", 0.2 * i, 900, 1_500 + 10 * i, 2_500, 300) for i in range(8)))
UPDATES = Trace(tuple(updating(f"u{i}", 0.2 * i, ("a", "b", "c"), ("a", "d", "b"), ("a", "d", "e")) for i in range(8)))


def settings(**changes: object) -> CellSettings:
    """Settings of an engine with room for all of such a load; one with the profile's capacity takes a second to
    make."""
    values = {"clock": "virtual", "workload": "crawler", "arm": "streaming", "profile": PROFILE, "kv_tokens": 200_000}
    return CellSettings(**{**values, **changes})  # type: ignore[arg-type]


def outcomes() -> str:
    """When the queries of a load of appends and updates had their first tokens."""
    rng = random.Random(2)
    trace = Trace(tuple(random_query(f"q{i}", rng) for i in range(30)))
    cells = [run_cell(settings(arm=arm, qps=20.0, kv_tokens=60_000), trace=trace) for arm in ("warming", "streaming")]
    return str([([r.first_token_s for r in cell.requests], cell.busy_s) for cell in cells])
