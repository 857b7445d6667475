"""Comparisons of cells: pooled over seeds, with speed-ups over the arm that does not stream."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from streamrag_bench.cell import ARMS, CellSettings
from streamrag_bench.grid import load_of, variant_name
from streamrag_bench.summary import PERCENTILES, Digest, percentile, ratio
from streamrag_bench.summary import mean as mean

BASELINE = "no-streaming"

Values: TypeAlias = Callable[[Digest], Sequence[float]]
"""A function that returns one value per request of a cell."""

Statistic: TypeAlias = Callable[[Sequence[float]], float]


class Figure(NamedTuple):
    """A statistic over all seeds, with its minimum and maximum over single seeds."""

    value: float
    low: float
    high: float


def _figure(value: float, by_seed: Sequence[float]) -> Figure:
    """Return `value` with the range of the finite values in `by_seed`."""
    finite = [one for one in by_seed if math.isfinite(one)]
    return Figure(value, min(finite, default=math.nan), max(finite, default=math.nan))


def _statistic(name: str) -> Statistic:
    """Return a function from values to their mean, or to the percentile of this name."""
    return mean if name == "mean" else lambda values: percentile(values, PERCENTILES[name])


@dataclass(frozen=True, slots=True)
class Pool:
    """A non-empty group of cells that differ only in their seed, ordered by seed."""

    digests: tuple[Digest, ...]

    @property
    def settings(self) -> CellSettings:
        """Settings of the first cell; ignore their seed."""
        return self.digests[0].settings

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(digest.settings.seed for digest in self.digests)

    def only(self, seeds: Iterable[int]) -> "Pool":
        wanted = set(seeds)
        return Pool(tuple(digest for digest in self.digests if digest.settings.seed in wanted))

    def values(self, of: Values) -> list[float]:
        """Return the values of all cells, one cell after the other."""
        return [value for digest in self.digests for value in of(digest)]

    def figure(self, of: Values, name: str) -> Figure:
        """Return a statistic of the values; `name` is one of `PERCENTILES`, or "mean"."""
        statistic = _statistic(name)
        return _figure(statistic(self.values(of)), [statistic(of(digest)) for digest in self.digests])

    def total(self, of: Callable[[Digest], float]) -> Figure:
        """Return the mean over seeds of a value that each cell has once."""
        by_seed = [of(digest) for digest in self.digests]
        return _figure(mean(by_seed), by_seed)

    def ratio_to_floor(self, name: str) -> float:
        """Return the ratio of a percentile of `ttft_after_retrieval_s` to the same percentile of the floor."""
        return ratio(self.figure(_after, name).value, self.figure(_floor, name).value)


def _after(digest: Digest) -> Sequence[float]:
    return digest.ttft_after_retrieval_s


def _floor(digest: Digest) -> Sequence[float]:
    return digest.floor_s


@dataclass(frozen=True, slots=True)
class LoadComparison:
    """All cells of one load, by variant and rate of arrivals."""

    load: CellSettings
    variants: tuple[str, ...]
    qps: tuple[float | None, ...]
    pools: dict[tuple[str, float | None], Pool]

    def floors(self, qps: float | None) -> Pool:
        """Return the pool with the most floors at this rate; floors do not depend on the arm."""
        pools = [pool for (_, at), pool in self.pools.items() if at == qps]
        return max(pools, key=lambda pool: len(pool.values(_floor)))

    def speed_up(self, variant: str, qps: float | None, name: str) -> Figure | None:
        """Return the ratio of baseline to variant in statistic `name` of `ttft_after_retrieval_s`, with its range.

        Only seeds that both pools have are counted; None if there are none, or a pool is missing.
        """
        pool, baseline = self.pools.get((variant, qps)), self.pools.get((BASELINE, qps))
        if pool is None or baseline is None or not (common := set(pool.seeds) & set(baseline.seeds)):
            return None
        pool, baseline = pool.only(common), baseline.only(common)
        statistic = _statistic(name)
        by_seed = [
            ratio(statistic(_after(before)), statistic(_after(after)))
            for before, after in zip(baseline.digests, pool.digests, strict=True)
        ]
        return _figure(ratio(statistic(baseline.values(_after)), statistic(pool.values(_after))), by_seed)


def compare(digests: Iterable[Digest]) -> list[LoadComparison]:
    """Return a comparison for each load, in order of appearance, with variants ordered by arm, and rates ascending."""
    by_load: dict[CellSettings, dict[tuple[str, float | None], list[Digest]]] = {}
    for digest in digests:
        settings = digest.settings
        groups = by_load.setdefault(load_of(settings), {})
        groups.setdefault((variant_name(settings), settings.qps), []).append(digest)
    return [_comparison(load, groups) for load, groups in by_load.items()]


def _comparison(load: CellSettings, groups: dict[tuple[str, float | None], list[Digest]]) -> LoadComparison:
    """Return a load's comparison: each group's digests as a pool, ordered by seed; the variants, ordered by arm; and
    the rates, ascending after None."""
    pools = {
        key: Pool(tuple(sorted(digests, key=lambda digest: digest.settings.seed))) for key, digests in groups.items()
    }
    arms = {variant: ARMS.index(pool.settings.arm) for (variant, _), pool in pools.items()}
    rates = {qps for _, qps in pools}
    return LoadComparison(
        load=load,
        variants=tuple(sorted(arms, key=lambda variant: arms[variant])),
        qps=tuple(sorted(rates, key=lambda qps: -1.0 if qps is None else qps)),
        pools=pools,
    )
