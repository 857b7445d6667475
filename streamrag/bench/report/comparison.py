"""Cells side by side: pooled over seeds, and set against those that do not stream."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from streamrag.bench.cell import ARMS, CellSettings
from streamrag.bench.grid import load_of, variant_name
from streamrag.bench.summary import PERCENTILES, Digest, percentile

BASELINE = "no-streaming"

Values: TypeAlias = Callable[[Digest], Sequence[float]]
"""Values of a cell to look at, one for each request."""

Statistic: TypeAlias = Callable[[Sequence[float]], float]


class Figure(NamedTuple):
    """A statistic of all requests of all seeds, and the least and the most of it that one seed has alone."""

    value: float
    low: float
    high: float


def _figure(value: float, alone: Sequence[float]) -> Figure:
    """Return `value` with the range of `alone`, its values by seed. A seed without an answer does not count."""
    known = [one for one in alone if math.isfinite(one)]
    return Figure(value, min(known, default=math.nan), max(known, default=math.nan))


def mean(values: Sequence[float]) -> float:
    """Return the arithmetic mean; NaN of no values."""
    return math.fsum(values) / len(values) if values else math.nan


def _statistic(name: str) -> Statistic:
    return mean if name == "mean" else lambda values: percentile(values, PERCENTILES[name])


@dataclass(frozen=True, slots=True)
class Pool:
    """Cells that differ in their seed only, in order of the seed; at least one."""

    digests: tuple[Digest, ...]

    @property
    def settings(self) -> CellSettings:
        """Settings of the first cell; the seed tells nothing."""
        return self.digests[0].settings

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(digest.settings.seed for digest in self.digests)

    def only(self, seeds: Iterable[int]) -> "Pool":
        """Return the cells of these seeds."""
        kept = set(seeds)
        return Pool(tuple(digest for digest in self.digests if digest.settings.seed in kept))

    def values(self, of: Values) -> list[float]:
        """Return the values of all requests of all seeds."""
        return [value for digest in self.digests for value in of(digest)]

    def figure(self, of: Values, name: str) -> Figure:
        """Return a statistic of the values: `name` is one of `PERCENTILES`, or "mean"."""
        statistic = _statistic(name)
        alone = [statistic(of(digest)) for digest in self.digests]
        return _figure(statistic(self.values(of)), alone)

    def total(self, of: Callable[[Digest], float]) -> Figure:
        """Return the mean over seeds of a value that each cell has once."""
        alone = [of(digest) for digest in self.digests]
        return _figure(mean(alone), alone)

    def ratio_to_floor(self, name: str) -> float:
        """Return the ratio of a percentile of `ttft_after_retrieval_s` to the same percentile of the floor."""
        floor = self.figure(_floor, name).value
        return self.figure(_after, name).value / floor if floor > 0 else math.nan


def _after(digest: Digest) -> Sequence[float]:
    return digest.ttft_after_retrieval_s


def _floor(digest: Digest) -> Sequence[float]:
    return digest.floor_s


@dataclass(frozen=True, slots=True)
class Comparison:
    """All cells of one load: variants at rates of arrivals."""

    load: CellSettings
    variants: tuple[str, ...]
    qps: tuple[float | None, ...]
    pools: dict[tuple[str, float | None], Pool]

    def floors(self, qps: float | None) -> Pool:
        """Return a pool that has all floors of a rate of arrivals: any arm's, because the load is the same."""
        pools = [pool for (_, at), pool in self.pools.items() if at == qps]
        return max(pools, key=lambda pool: len(pool.values(_floor)))

    def speed_up(self, variant: str, qps: float | None, name: str) -> Figure | None:
        """Return the percentile of `ttft_after_retrieval_s` without streaming over that of the variant.

        Only seeds that both have count; None where they have none in common.
        """
        pool, baseline = self.pools.get((variant, qps)), self.pools.get((BASELINE, qps))
        if pool is None or baseline is None:
            return None
        common = set(pool.seeds) & set(baseline.seeds)
        if not common:
            return None
        pool, baseline = pool.only(common), baseline.only(common)
        statistic = _statistic(name)
        alone = [
            _over(statistic(_after(before)), statistic(_after(after)))
            for before, after in zip(baseline.digests, pool.digests, strict=True)
        ]
        pooled = _over(statistic(baseline.values(_after)), statistic(pool.values(_after)))
        return _figure(pooled, alone)


def _over(before: float, after: float) -> float:
    return before / after if after > 0 else math.nan


def compare(digests: Iterable[Digest]) -> list[Comparison]:
    """Make a comparison of each load; variants in the order of `ARMS`, then as they came; rates from low to high."""
    by_load: dict[CellSettings, dict[tuple[str, float | None], list[Digest]]] = {}
    for digest in digests:
        settings = digest.settings
        groups = by_load.setdefault(load_of(settings), {})
        groups.setdefault((variant_name(settings), settings.qps), []).append(digest)
    return [_comparison(load, groups) for load, groups in by_load.items()]


def _comparison(load: CellSettings, groups: dict[tuple[str, float | None], list[Digest]]) -> Comparison:
    pools = {
        key: Pool(tuple(sorted(digests, key=lambda digest: digest.settings.seed))) for key, digests in groups.items()
    }
    arms = {variant: ARMS.index(pool.settings.arm) for (variant, _), pool in pools.items()}
    rates = {qps for _, qps in pools}
    return Comparison(
        load=load,
        variants=tuple(sorted(arms, key=lambda variant: arms[variant])),
        qps=tuple(sorted(rates, key=lambda qps: -1.0 if qps is None else qps)),
        pools=pools,
    )
