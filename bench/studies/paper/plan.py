"""Which cells there are: every way that a section wants at a point, with the seeds and queries of the scale."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from streamrag_bench.cell import CellSettings

from .points import Kind, Point
from .ways import Way

HELD_OUT_SEEDS = (8, 9, 10)
"""Take no part in tuning."""


class Size(NamedTuple):
    """Of the points of one kind."""

    seeds: tuple[int, ...]
    num_crawls: int
    """Of the 4,322 that are published."""
    num_searches: int | None = None
    """None for all 500 that are published."""


@dataclass(frozen=True, slots=True)
class Scale:
    """How much is simulated."""

    sizes: Mapping[Kind, Size]

    def seeds(self, point: Point) -> tuple[int, ...]:
        return self.sizes[point.kind].seeds

    def num_queries(self, point: Point) -> int | None:
        size = self.sizes[point.kind]
        return size.num_crawls if point.is_crawler else size.num_searches


SHORT = Scale(
    {
        "open": Size((1,), 700),
        "pressure": Size((1,), 1_000),
        "held-out": Size(HELD_OUT_SEEDS, 700),
        "overload": Size((1,), 600, 300),
        "more seeds": Size(tuple(range(2, 8)), 700),
        "more pressure": Size((2, 3, 4), 1_000),
    },
)
Wanted: TypeAlias = Iterable[tuple[Point, Way]]
Plan: TypeAlias = Mapping[tuple[Point, Way], tuple[CellSettings, ...]]
"""One cell for each seed."""


def make_plan(scale: Scale, wanted: Wanted) -> Plan:
    """What sections want, each once."""
    return {
        (point, way): tuple(way.cell(point, seed, scale.num_queries(point)) for seed in scale.seeds(point))
        for point, way in dict.fromkeys(wanted)
    }


def in_order(plan: Plan) -> list[CellSettings]:
    """One seed after the other; in each, the longest first, so that no core stands idle at the end."""
    by_turn = [cell for cells in plan.values() for cell in cells]
    return sorted(by_turn, key=lambda cell: (cell.seed, -expected_s(cell)))


S_PER_CRAWL, S_PER_SEARCH = 0.0065, 0.010
COPYING_CRAWL, COPYING_SEARCH = 4.0, 2.2
"""So many times as long where memory is short and KV is copied out and back. Measured on a 2-core machine, roughly."""


def expected_s(cell: CellSettings) -> float:
    """Seconds of one core that a cell takes, roughly."""
    is_crawler = cell.workload.startswith("crawler")
    num_queries = cell.num_queries or (4_322 if is_crawler else 500)
    seconds = num_queries * (S_PER_CRAWL if is_crawler else S_PER_SEARCH)
    if cell.arm == "no-streaming":
        return seconds / 2
    if cell.kv_tokens and cell.eviction != "recompute":
        return seconds * (COPYING_CRAWL if is_crawler else COPYING_SEARCH)
    return seconds


def total_s(cells: Sequence[CellSettings]) -> float:
    """Seconds of one core, roughly."""
    return sum(map(expected_s, cells))
