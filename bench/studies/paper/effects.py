"""What the paper reports as found, and whether it shows here: by rules, with figures, and likely reasons if not."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from .markdown import table, yes_no
from .points import LADDERS, LOADED, TWICE_FULL, Point
from .published import COMPLETION_TOLERANCE, INVALIDATED_SHARE, INVALIDATED_TOKENS, SPEED_UPS
from .results import Results
from .standing import seconds_of
from .ways import FCFS, FCFS_SYNC, NOT_STREAMING, PAPER_WAYS, Way, paper, without_prefix_cache


class Verdict(NamedTuple):
    """Whether an effect shows, by which figures, and why not if they tell."""

    shows: bool
    figures: str
    reason: str = ""


Look: TypeAlias = Callable[[Results], Verdict | None]
"""Gives None as long as it is not simulated."""


@dataclass(frozen=True)
class Effect:
    """One of the paper's findings."""

    claim: str
    source: str
    look: Look
    reason: str
    """Likely, if it does not show."""


ARRIVAL, LCAS, LCAS_CODED, MCPS = paper("vLLM-S"), paper("LCAS"), paper("LCAS as coded"), paper("MCPS")
CRAWLER, SEARCH = LOADED[0], LOADED[2]
GROWS_BY = 2
"""Published: from 3.9 to 11 times."""
CLOSE_BEHIND = 0.8
"""Published: .84 (3.16 and 2.64 times as fast as vLLM-S). At least so fast, and not as much faster."""
GENERATED = "the loads are generated: their published percentiles hold, but not how long and large chunks meet"


def ratio(
    results: Results, point: Point, rank: str, of: Way, over: Way, *, has_more_seeds: bool = False
) -> float | None:
    """How many times as fast `of` is as `over`."""
    find = results.all_seeds if has_more_seeds else results.pool
    pool, other = find(point, of), find(point, over)
    return seconds_of(other)[rank] / seconds_of(pool)[rank] if pool and other else None


def _speed(point: Point, rank: str, of: Way, over: Way, holds: Callable[[float], bool]) -> Look:
    def look(results: Results) -> Verdict | None:
        found = ratio(results, point, rank, of, over)
        return None if found is None else Verdict(holds(found), f"{found:.2f}x {over.name} at {rank}, {point.name}")

    return look


def _worse(point: Point) -> Look:
    return _speed(point, "P99", without_prefix_cache(ARRIVAL), NOT_STREAMING, lambda found: found < 1)


def _rescued(point: Point) -> Look:
    return _speed(point, "P99", without_prefix_cache(FCFS), NOT_STREAMING, lambda found: found > 1)


def _grows(results: Results) -> Verdict | None:
    found = {p.qps: ratio(results, p, "P50", FCFS, NOT_STREAMING) for p in LADDERS["crawler"]}
    known = [value for value in found.values() if value is not None]
    if len(known) < len(found):
        return None
    text = ", ".join(f"{value:.1f}x at {qps:g} QPS" for qps, value in zip(found, known, strict=True))
    shows = known[-1] > GROWS_BY * known[0]
    on_theirs = ratio(results, CRAWLER, "P50", FCFS_SYNC, NOT_STREAMING)
    if on_theirs is None:
        return Verdict(shows, f"P50: {text}")
    (least, most), (_, loaded) = (
        (each.least, each.most)
        for each in SPEED_UPS
        if (each.workload, each.rank) == ("crawler", "P50") and each.qps != 1
    )
    return Verdict(
        shows,
        f"P50: {text}; with no step planned ahead {on_theirs:.1f}x at {CRAWLER.qps:g} QPS, published {loaded:g}x",
        f"at {CRAWLER.qps:g} QPS mainly the step that vLLM plans ahead today: {on_theirs:.1f}x without, published "
        f"{loaded:g}x; at 0.5 and 1 QPS ours is too quick, {known[0]:.1f}x and {known[1]:.1f}x beside "
        f"{least:g}–{most:g}x: 20 ms more in every answer would explain it, and what stands around their engine is "
        "not simulated",
    )


def _mcps_poor(results: Results) -> Verdict | None:
    mine, theirs = (ratio(results, CRAWLER, "P95", way, ARRIVAL) for way in (MCPS, FCFS))
    if mine is None or theirs is None:
        return None
    return Verdict(mine < 1, f"{mine:.2f}x vLLM-S at P95 where FCFS is {theirs:.2f}x, {CRAWLER.name}")


def _lcas(results: Results) -> Verdict | None:
    pool = results.all_seeds(CRAWLER, LCAS)
    pooled = ratio(results, CRAWLER, "P95", LCAS, FCFS, has_more_seeds=True)
    first, coded = (ratio(results, CRAWLER, "P95", way, FCFS) for way in (LCAS, LCAS_CODED))
    if pool is None or pooled is None or first is None or coded is None:
        return None
    seeds = f"seeds {pool.seeds[0]}–{pool.seeds[-1]}" if len(pool.seeds) > 1 else f"seed {pool.seeds[0]}"
    figures = f"as the text has it {pooled:.2f}x FCFS at P95 ({seeds}; seed {pool.seeds[0]} alone {first:.2f}x)"
    return Verdict(
        CLOSE_BEHIND < pooled < 1 / CLOSE_BEHIND, f"{figures}, as coded {coded:.2f}x, {CRAWLER.name}; published 0.84x"
    )


def _converge(results: Results) -> Verdict | None:
    point = LADDERS["anns-last"][2]
    found = [ratio(results, point, "P95", way, NOT_STREAMING) for way in PAPER_WAYS]
    known = [value for value in found if value is not None]
    if len(known) < len(found):
        return None
    return Verdict(
        min(known) > 0.9 * max(known) and min(known) > 1.5, f"{min(known):.2f}–{max(known):.2f}x at P95, {point.name}"
    )


def _parity(results: Results) -> Verdict | None:
    worst = 0.0
    for point in (CRAWLER, SEARCH):
        before = results.pool(point, NOT_STREAMING)
        for way in PAPER_WAYS:
            pool = results.pool(point, way)
            if pool is None or before is None:
                return None
            ended, begun = (each.total(lambda d: d.completion_s).value for each in (pool, before))
            worst = max(worst, abs(ended / begun - 1))
    # A trace of a thousand queries ends sooner than theirs: the last requests weigh more.
    return Verdict(worst <= 2 * COMPLETION_TOLERANCE, f"at most {worst:.1%} off, {CRAWLER.name} and {SEARCH.name}")


def _invalidated(results: Results) -> Verdict | None:
    shares = []
    for point in LADDERS["anns-last"]:
        pool = results.pool(point, FCFS)
        if pool is None:
            return None
        values = pool.values(lambda d: d.num_invalidated)
        shares.append(sum(value > INVALIDATED_TOKENS for value in values) / len(values))
    return Verdict(min(shares) > INVALIDATED_SHARE, f"{min(shares):.0%}–{max(shares):.0%} under FCFS, anns-last")


def _swap_loses(point: Point) -> Look:
    def look(results: Results) -> Verdict | None:
        swap = ratio(results, point, "P99", paper("FCFS", "swap"), without_prefix_cache(FCFS))
        return None if swap is None else Verdict(swap < 1, f"swap is {swap:.2f}x recompute at P99, {point.name}")

    return look


def _lcas_preempts(results: Results) -> Verdict | None:
    found = []
    for way in (LCAS, LCAS_CODED, FCFS):
        pool = results.pool(TWICE_FULL[0], without_prefix_cache(way) if way is not LCAS_CODED else way)
        if pool is None:
            return None
        found.append(sum(sum((d.num_preemptions or {}).values()) for d in pool.digests))
    text, coded, fcfs = found
    return Verdict(
        max(text, coded) > 2 * fcfs, f"LCAS {text:,}, as coded {coded:,}, FCFS {fcfs:,}, {TWICE_FULL[0].name}"
    )


SHORT_OF_MEMORY = "memory is not short for long enough: see over-subscription"
THRASH = "partial prompts that evict each other without end leave no time for complete ones"

EFFECTS = (
    Effect(
        "Streaming is several times as fast at the median, and the more so the higher the load",
        "6.2, figure 8",
        _grows,
        GENERATED,
    ),
    Effect(
        "FCFS is 3 times as fast as naive streaming at P95 near saturation",
        "6.2",
        _speed(CRAWLER, "P95", FCFS, ARRIVAL, lambda found: found > 1.5),
        f"few seeds near saturation, where single seeds differ by a factor of ten; {GENERATED}",
    ),
    Effect(
        "LCAS comes close behind FCFS",
        "6.2",
        _lcas,
        "newest first starves whoever is overtaken",
    ),
    Effect(
        "MCPS falls behind even naive streaming on crawls",
        "6.2",
        _mcps_poor,
        "longest first hurts only where there is a queue, and few seeds have one",
    ),
    Effect(
        "All streaming policies converge on searches at 1 QPS, 2.5 times as fast at P95",
        "6.2",
        _converge,
        GENERATED,
    ),
    Effect(
        "Naive streaming is worse than not streaming at P99 under pressure, crawls",
        "6.4, table 3",
        _worse(TWICE_FULL[0]),
        SHORT_OF_MEMORY,
    ),
    Effect(
        "Naive streaming is worse than not streaming at P99 under pressure, searches",
        "6.4, table 3",
        _worse(TWICE_FULL[1]),
        SHORT_OF_MEMORY,
    ),
    Effect(
        "FCFS stays faster than not streaming at P99 under pressure, crawls",
        "6.4, table 3",
        _rescued(TWICE_FULL[0]),
        THRASH,
    ),
    Effect(
        "FCFS stays faster than not streaming at P99 under pressure, searches",
        "6.4, table 3",
        _rescued(TWICE_FULL[1]),
        THRASH,
    ),
    Effect(
        "Swapping alone is slower than recomputing alone, crawls",
        "6.4, table 3",
        _swap_loses(TWICE_FULL[0]),
        "they copy block by block on the compute stream; here all of a step in one go, at 50 GB/s and beside it",
    ),
    Effect(
        "LCAS preempts several times as often as FCFS",
        "6.4, table 4",
        _lcas_preempts,
        "a step evicts here only what its grants need, and KV that nobody has overwritten is no loss",
    ),
    Effect(
        "Completion times are the same",
        "A.2, figure 10",
        _parity,
        "the trace is shorter, so that its end weighs more",
    ),
    Effect(
        "More than 10 % of the searches invalidate over 10,000 tokens at every rate",
        "A.1, figure 11",
        _invalidated,
        GENERATED,
    ),
)


def rows(results: Results, effects: Iterable[Effect] = EFFECTS) -> Iterator[list[str]]:
    for effect in effects:
        found = effect.look(results)
        if found is None:
            yield [effect.claim, effect.source, "–", "not simulated yet", ""]
        else:
            yield [
                effect.claim,
                effect.source,
                yes_no(found.shows),
                found.figures,
                "" if found.shows else found.reason or effect.reason,
            ]


def as_table(results: Results) -> str:
    return table(["the paper finds", "where", "shows here?", "figures", "likely reason"], rows(results), num_left=5)
