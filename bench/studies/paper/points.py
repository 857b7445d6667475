"""The loads: a workload at a rate of arrivals, with or without memory pressure."""

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple, TypeAlias

from streamrag.trace.values import TracedQuery
from streamrag_bench.cell import CellSettings
from streamrag_bench.workload import load_trace, make_load, num_tokens_after

Kind: TypeAlias = Literal["open", "pressure", "held-out", "overload", "more seeds", "more pressure"]


@dataclass(frozen=True, slots=True)
class Point:
    """What is the same for all that is compared with each other."""

    workload: str
    qps: float
    delay: float = 1.0
    kv_tokens: int | None = None
    """None for the capacity of the hardware profile."""
    kind: Kind = "open"

    @property
    def name(self) -> str:
        memory = "" if self.kv_tokens is None else f", gaps {self.delay:g}x, KV {self.kv_tokens / 1e6:.2f} M"
        return f"{self.workload} {self.qps:g} QPS{memory}"

    @property
    def is_crawler(self) -> bool:
        return self.workload == "crawler"


LADDERS = {
    "crawler": tuple(Point("crawler", qps) for qps in (0.5, 1.0, 2.0, 4.0)),
    "anns": tuple(Point("anns", qps) for qps in (0.25, 0.5, 1.0, 2.0)),
    "anns-last": tuple(Point("anns-last", qps) for qps in (0.25, 0.5, 1.0, 2.0)),
}
"""Rates of figures 8 and 9. Searches in both readings of where their long window stands, see docs/traces.md."""

LIGHT = (Point("crawler", 2.0), Point("anns", 1.0), Point("anns-last", 1.0))
LOADED = (Point("crawler", 4.0), Point("anns", 2.0), Point("anns-last", 2.0))

# The tokens that the streams of one time have sent come to twice the KV cache, in the mean; see `demand`.
TWICE_FULL = (
    Point("crawler", 4.0, 10.0, 690_000, "pressure"),
    Point("anns-last", 2.0, 30.0, 1_390_000, "pressure"),
)
HALF_KV = tuple(replace(point, kv_tokens=(point.kv_tokens or 0) // 2) for point in TWICE_FULL)
PRESSED = TWICE_FULL + HALF_KV

HELD_OUT = tuple(Point(*load, kind="held-out") for load in (("crawler", 3.0), ("anns", 1.5), ("anns-last", 1.5)))
"""Rates that take no part in tuning."""
OVERLOAD = tuple(Point(*load, kind="overload") for load in (("crawler", 6.0), ("crawler", 10.3), ("anns-last", 7.2)))
"""Beyond saturation, which not streaming reaches at 5.15 crawls and 3.6 searches a second; the last are twice that."""

BEATEN = LIGHT + LOADED + PRESSED
"""Where ours is set against the paper's."""

MORE_KINDS: dict[Kind, Kind] = {"open": "more seeds", "pressure": "more pressure"}
"""Where points have more seeds than their first, which only some ways have."""


def more_of(point: Point) -> Point | None:
    """The same load with more seeds."""
    kind = MORE_KINDS.get(point.kind)
    return kind and replace(point, kind=kind)


MORE_SEEDS = tuple(replace(point, kind="more seeds") for point in LIGHT + LOADED)
"""A P99 of 700 requests is seven of them: one seed decides little."""
MORE_PRESSED = tuple(replace(point, kind="more pressure") for point in PRESSED)


class Demand(NamedTuple):
    """What a load wants of the KV cache if nothing is ever evicted."""

    residency_s: float
    """From a stream's first chunk to its end, in the mean."""
    num_tokens: float
    """Tokens that the streams of one time have sent, in the mean: by Little's law, the rate of arrivals times the
    integral of a stream's tokens over its residency."""
    published_formula: float
    """Tokens per query times duration of retrieval times QPS, as the paper reckons (section 6.4)."""


@cache
def demand(point: Point, seed: int = 1) -> Demand:
    """From the load alone, with nothing simulated."""
    settings = CellSettings("virtual", point.workload, "streaming", qps=point.qps, delay=point.delay, seed=seed)
    trace = load_trace(settings)
    queries = make_load(settings, trace)
    num = len(queries)
    retrieval_s = point.delay * sum(query.end_s for query in trace.queries) / num
    return Demand(
        sum(query.end_s - query.events[0].at_s for query in queries) / num,
        point.qps * sum(map(_token_seconds, queries)) / num,
        point.qps * retrieval_s * sum(map(num_tokens, queries)) / num,
    )


@cache
def queries_of(cell: CellSettings) -> tuple[TracedQuery, ...]:
    """What a cell's clients ask, in order of arrival."""
    return make_load(cell, load_trace(cell))


def _token_seconds(query: TracedQuery) -> float:
    total, num_tokens, before_s = 0.0, 0, 0.0
    for event in query.events:
        total += num_tokens * (event.at_s - before_s)
        num_tokens, before_s = num_tokens_after(event, num_tokens), event.at_s
    return total + num_tokens * (query.end_s - before_s)


def num_tokens(query: TracedQuery) -> int:
    """Length of its last context."""
    num = 0
    for event in query.events:
        num = num_tokens_after(event, num)
    return num
