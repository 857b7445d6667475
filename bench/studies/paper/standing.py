"""Where ours stands at a point: beside the paper's ways, not streaming, and the floor, at each percentile."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from streamrag_bench.report.comparison import Pool
from streamrag_bench.summary import percentile

from .points import Point

RANKS: Mapping[str, float] = {"P50": 0.50, "P90": 0.90, "P95": 0.95, "P99": 0.99, "max": 1.0}
Seconds: TypeAlias = Mapping[str, float]
"""`ttft_after_retrieval_s` by rank, of all requests of all seeds."""


def seconds_of(pool: Pool) -> Seconds:
    values = sorted(pool.values(lambda d: d.ttft_after_retrieval_s))
    return {rank: percentile(values, fraction) for rank, fraction in RANKS.items()}


def floor_of(pool: Pool) -> Seconds:
    values = sorted(pool.values(lambda d: d.floor_s))
    return {rank: percentile(values, fraction) for rank, fraction in RANKS.items()}


def least(ways: Iterable[Seconds]) -> Seconds | None:
    """The best of all, taken apart at each rank; None of none."""
    found = list(ways)
    return {rank: min(seconds[rank] for seconds in found) for rank in RANKS} if found else None


def envelope(ways: Mapping[str, Seconds], not_streaming: Seconds) -> tuple[Seconds | None, tuple[str, ...]]:
    """The best of `ways` at each rank, of those whose P99 is not worse than not streaming's; and their names."""
    fit = {name: seconds for name, seconds in ways.items() if seconds["P99"] <= not_streaming["P99"]}
    return least(fit.values()), tuple(fit)


def ratios(of: Seconds | None, to: Seconds | None) -> Seconds:
    """NaN where there is nothing to divide."""
    if of is None or to is None:
        return dict.fromkeys(RANKS, math.nan)
    return {rank: of[rank] / to[rank] if to[rank] > 0 else math.nan for rank in RANKS}


@dataclass(frozen=True, slots=True)
class Standing:
    """Ours at one point. What stands in front of it has its ratio to ours: more than 1 is better for us."""

    point: Point
    seeds: tuple[int, ...]
    ours: Seconds
    fcfs: Seconds | None
    """The paper's FCFS with recomputation."""
    envelope: Seconds | None
    eligible: tuple[str, ...]
    """The ways that the envelope is made of."""
    not_streaming: Seconds
    floor: Seconds
    busy_ratio: float
    """Time in which the engine computed, over that of not streaming with the published token budget."""
    busy_ratio_same: float = math.nan
    """The same over not streaming with our token budget; NaN where that is not known."""
    hinted: Seconds | None = None
    """Ours, on a load whose chunks tell what is still to come."""
    bound: Seconds | None = None
    """What no schedule gets below, see `bound`."""
    makers: Mapping[str, str] = field(default_factory=dict)
    """By rank, the way that is the envelope there."""

    @property
    def busiest(self) -> float:
        """The harder of the two busy ratios."""
        return max(ratio for ratio in (self.busy_ratio, self.busy_ratio_same) if not math.isnan(ratio))

    @property
    def over_fcfs(self) -> Seconds:
        return ratios(self.fcfs, self.ours)

    @property
    def over_envelope(self) -> Seconds:
        return ratios(self.envelope, self.ours)

    @property
    def hinted_over_envelope(self) -> Seconds:
        return ratios(self.envelope, self.hinted)

    @property
    def over_not_streaming(self) -> Seconds:
        return ratios(self.not_streaming, self.ours)

    @property
    def to_floor(self) -> Seconds:
        """At least about 1; less is better for us."""
        return ratios(self.ours, self.floor)

    @property
    def to_bound(self) -> Seconds:
        """At least 1."""
        return ratios(self.ours, self.bound)
