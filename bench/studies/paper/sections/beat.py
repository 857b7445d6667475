"""Ours against the paper's ways: every ratio, every target, met or missed."""

import math
from collections.abc import Iterable, Iterator, Sequence

from streamrag_bench.report.comparison import Pool

from ..bound import bound_of
from ..markdown import table, times, triple, yes_no
from ..pictures import draw_ratios
from ..plan import Scale, Wanted
from ..points import BEATEN, HALF_KV, HELD_OUT, LIGHT, LOADED, OVERLOAD, PRESSED, Point
from ..standing import RANKS, Seconds, Standing, envelope, floor_of, least, seconds_of
from ..targets import TARGETS, Found, Target, place
from ..ways import (
    FCFS,
    FCFS_SYNC,
    HINTED,
    NOT_STREAMING,
    OURS,
    PAPER_SWAPPING,
    PAPER_WAYS,
    Way,
    paper,
    with_other_budget,
    with_our_budget,
)
from .planning_cost import planning
from .section import Report, Section

PUBLISHED_BUDGET = (NOT_STREAMING, *PAPER_WAYS)
OTHER_BUDGET = tuple(map(with_other_budget, PUBLISHED_BUDGET))
UNDER_PRESSURE = (*PUBLISHED_BUDGET, *PAPER_SWAPPING)
BEST = ("fcfs", "lcas")
OTHER_UNDER_PRESSURE = tuple(
    map(
        with_other_budget,
        (NOT_STREAMING, FCFS, paper("LCAS"), *(way for way in PAPER_SWAPPING if way.policy in BEST)),
    )
)
OTHER_LIGHT = tuple(map(with_other_budget, (NOT_STREAMING, FCFS, paper("LCAS"))))
OTHER_PRESSED = tuple(map(with_other_budget, (NOT_STREAMING, FCFS, paper("FCFS", "cost"), paper("LCAS", "cost"))))
"""With few seeds: what is best with the published budget."""
TAIL = ("P50", "P95", "P99")

EXPLAINED = """\
Ours is `SchedulerOptions()`, the same at every point, with 8,192 tokens a step at most: `VllmBackend` leaves \
`max_num_batched_tokens` to vLLM unless told, so give it 8192. *FCFS* is the paper's, with recomputation, in the same \
simulator. The *envelope* is the best of the paper's policies, and under pressure of the three evictions, taken apart \
at each percentile, of those whose P99 is not worse than not streaming's. Baselines have the published token budget \
(2,048 a step for crawls, 8,192 for searches), and for *best budget* the better of 2,048 and 8,192 at each percentile \
(of not streaming, FCFS and LCAS only where load is light, under memory pressure and at rates that took no part in \
tuning; with half the KV only FCFS and LCAS copy). The *floor* is the request alone on the engine, and the *bound* \
what no schedule gets below that knows the future, evicts nothing and computes nothing in vain, each percentile taken \
apart: a schedule may leave the longest requests lying to have a better P95, so that the bounds of two percentiles \
are not reached together (the proof: bound.py). Percentiles are of all requests of all seeds. All have the first \
seed. The others have not streaming, ours, FCFS, LCAS, at 4 crawls a second LCAS as coded, and under pressure FCFS \
and LCAS by cost, with the published budget: what the envelope consists of with the first seed, or nearly, see below. \
What rests on one seed says so.

"""


def wanted(scale: Scale) -> Wanted:
    for point in (*LIGHT, *LOADED, *HELD_OUT):
        for way in (*PUBLISHED_BUDGET, OURS, *(OTHER_BUDGET if point in LOADED else OTHER_LIGHT)):
            yield point, way
    for point in (*LIGHT, *LOADED):
        yield point, FCFS_SYNC
    for point in PRESSED:
        for way in (*_under_pressure(point), OURS):
            yield point, way
    for point in OVERLOAD:
        for way in (NOT_STREAMING, with_other_budget(NOT_STREAMING), FCFS, OURS):
            yield point, way
    yield LOADED[0], HINTED


def _under_pressure(point: Point) -> tuple[Way, ...]:
    # Cells that copy take longest.
    is_half = point in HALF_KV
    same = (way for way in UNDER_PRESSURE if not (is_half and way in PAPER_SWAPPING and way.policy not in BEST))
    return (*same, *OTHER_PRESSED)


def standing(
    report: Report,
    point: Point,
    *,
    any_budget: bool = False,
    has_more_seeds: bool = True,
) -> Standing | None:
    """Ours at a point; with `any_budget`, beside baselines that have the token budget that suits them best at each
    rank. With `has_more_seeds`, of all seeds, where ours and not streaming have them, beside the ways that have them
    too. None if it is not simulated yet."""
    find = report.results.all_seeds if has_more_seeds else report.results.pool

    def seconds(way: Way) -> Seconds | None:
        pool = find(point, way)
        return seconds_of(pool) if pool else None

    mine, baseline = find(point, OURS), find(point, NOT_STREAMING)
    if mine is None or baseline is None:
        if has_more_seeds:
            return standing(report, point, any_budget=any_budget, has_more_seeds=False)
        return None
    same, other = _ways(point)
    not_streaming: list[Seconds] = []
    fcfs: list[Seconds] = []
    eligible: dict[str, Seconds] = {}
    for ways, named in ((same, NOT_STREAMING), (other, with_other_budget(NOT_STREAMING)))[: 1 + any_budget]:
        without = seconds(named)
        if without is None:
            continue
        not_streaming.append(without)
        found = {way.name: value for way in ways if way != named and (value := seconds(way))}
        fcfs += [found[name] for name in (FCFS.name, with_other_budget(FCFS).name) if name in found]
        eligible |= {name: found[name] for name in envelope(found, without)[1]}
    best_without = least(not_streaming)
    assert best_without
    waiting = find(point, with_our_budget(NOT_STREAMING, point))
    return Standing(
        point,
        mine.seeds,
        seconds_of(mine),
        least(fcfs),
        least(eligible.values()),
        tuple(eligible),
        best_without,
        floor_of(mine),
        _busy_s(mine) / _busy_s(baseline),
        _busy_s(mine) / _busy_s(waiting) if waiting else math.nan,
        seconds(HINTED),
        bound_of(tuple(digest.settings for digest in baseline.digests)),
        {rank: min(eligible, key=lambda name: eligible[name][rank]) for rank in RANKS if eligible},
    )


def _busy_s(pool: Pool) -> float:
    return pool.total(lambda d: d.busy_s).value


def _ways(point: Point) -> tuple[Sequence[Way], Sequence[Way]]:
    """The baselines with the published budget, and those with the other."""
    if point.kind == "pressure":
        return UNDER_PRESSURE, OTHER_UNDER_PRESSURE
    return PUBLISHED_BUDGET, OTHER_BUDGET


def standings(report: Report, points: Iterable[Point], *, any_budget: bool = False) -> list[Standing]:
    """Of the points that are simulated. Under memory pressure the other budget may have been tried with one seed."""
    found = []
    for point in points:
        has_more_seeds = not (any_budget and point.kind == "pressure")
        of = standing(report, point, any_budget=any_budget, has_more_seeds=has_more_seeds)
        found += [of] if of else []
    return found


def write(report: Report) -> str:
    points = (*BEATEN, *OVERLOAD)
    found, best = standings(report, points), standings(report, points, any_budget=True)
    held_out, held_out_best = standings(report, HELD_OUT), standings(report, HELD_OUT, any_budget=True)
    first = [each for point in points if (each := standing(report, point, has_more_seeds=False))]
    over = "FCFS, the envelope, not streaming, ours/floor, ours/bound, busy/not streaming, longest/not streaming"
    columns = ["seeds", "FCFS over ours", "envelope over ours", "not streaming over ours", "ours/floor", "busy"]
    head = ["target", "at", "met", "worst figure", "met?", "best budget: worst figure", "met?"]
    head += ["took no part in tuning: worst figure", "met?", "why not"]
    brackets = (
        "In brackets with the token budget that suits the baseline best; under memory pressure, where that was tried "
        "with one seed, beside ours with that seed."
    )
    parts = [
        EXPLAINED,
        "### Targets\n\n",
        table(head, _targets(found, best, held_out, held_out_best)),
        "\n" + planning(report.pictures.report.parent.parent),
        "\n### Seconds\n\n`ttft_after_retrieval_s`, P50/P90/P95/P99/longest.\n\n",
        table(["", "seeds", "ours", "FCFS", "envelope", "not streaming", "floor", "bound"], map(_seconds_row, found)),
        f"\n### How many times as fast as\n\nP50/P95/P99. {brackets} Busy time is over that of not streaming with the "
        "published budget, and for crawls also with as many tokens a step as ours has.\n\n",
        table(["", *over.split(", ")], _ratio_rows(found, best)),
        _picture(report, found),
        "\n### What the envelope is made of\n\nOf the first seed, with which all ways were simulated; below, which of "
        "them it is at P50/P95/P99, and which of those with all seeds make the envelope above.\n\n",
        table(
            ["", "not worse than not streaming at P99", "it is, with the first seed", "and with all"],
            _envelope_rows(first, found),
            num_left=4,
        ),
        "\n### What took no part in tuning\n\nRates with seeds that took no part either. P50/P95/P99; in brackets with "
        "the token budget that suits the baseline best, of not streaming, FCFS and LCAS.\n\n",
        table(["", *columns], _held_out_rows(held_out, held_out_best)),
        "\n### An engine that plans no step ahead\n\nThe paper's FCFS on it, P50/P95/P99 in seconds, beside FCFS and "
        f"ours on one that does, as vLLM does today; seeds {', '.join(map(str, report.scale.seeds(LOADED[0])))}.\n\n",
        table(["", FCFS_SYNC.name, FCFS.name, "ours"], _sync_rows(report)),
    ]
    return "".join(parts)


def _envelope_rows(first: Sequence[Standing], found: Sequence[Standing]) -> Iterator[list[str]]:
    pooled = {each.point: each for each in found}
    for one in first:
        names = (_makers(one), _makers(pooled[one.point]))
        yield [one.point.name, "; ".join(one.eligible) or "none", *names]


def _makers(of: Standing) -> str:
    return " / ".join(of.makers[rank] for rank in TAIL) if of.makers else "–"


def _targets(
    found: Sequence[Standing],
    best: Sequence[Standing],
    held_out: Sequence[Standing],
    held_out_best: Sequence[Standing],
) -> Iterator[list[str]]:
    for target in TARGETS:
        sign = "at least" if target.is_least else "at most"
        of, of_best, later = target.at(found), target.at(best), target.at(held_out)
        limits = sorted({each.limit for each in of})
        limit = " or ".join(f"{limit:.3g}" for limit in limits)
        met = f"{sum(each.is_met for each in of)} of {len(of)}"
        text = f"{target.text}: {sign} {limit or '–'}"
        beside_best = target.why_beside_best([*of, *later], [*of_best, *target.at(held_out_best)])
        yield [
            text,
            "/".join(target.ranks),
            met if of else "–",
            *_worst(target, of),
            *_worst(target, of_best),
            *(_worst(target, later) if later else ("–", "–")),
            "; ".join(filter(None, (target.why([*of, *later]), beside_best))),
        ]


def _worst(target: Target, found: Sequence[Found]) -> tuple[str, str]:
    if not found:
        return "not measured", "–"
    worst = target.worst(found)
    value = f"{worst.value:.3f}" if worst.value < 1 else f"{worst.value:.2f}"
    return f"{value} ({place(worst)})", yes_no(all(each.is_met for each in found))


def _seconds_row(of: Standing) -> list[str]:
    def text(seconds: Seconds | None) -> str:
        return triple(seconds[rank] for rank in RANKS) if seconds else "–"

    return [
        of.point.name,
        _seeds(of),
        *map(text, (of.ours, of.fcfs, of.envelope, of.not_streaming, of.floor, of.bound)),
    ]


def _seeds(of: Standing) -> str:
    return ", ".join(map(str, of.seeds))


def _ratio_rows(found: Sequence[Standing], best: Sequence[Standing]) -> Iterator[list[str]]:
    for same, any_budget in zip(found, best, strict=True):
        floor = triple(same.to_floor[rank] for rank in TAIL)
        longest = 1 / same.over_not_streaming["max"]
        bound = triple(same.to_bound[rank] for rank in TAIL)
        yield [same.point.name, *_over(same, any_budget), floor, bound, _busy(same), times(longest)]


def _over(same: Standing, any_budget: Standing) -> Iterator[str]:
    of = [(each.over_fcfs, each.over_envelope, each.over_not_streaming) for each in (same, any_budget)]
    for published, best in zip(*of, strict=True):
        yield f"{_ratios(published)} [{_ratios(best)}]"


def _busy(of: Standing) -> str:
    ratios = dict.fromkeys(ratio for ratio in (of.busy_ratio, of.busy_ratio_same) if math.isfinite(ratio))
    return ", ".join(map(times, ratios))


def _ratios(seconds: Seconds) -> str:
    return triple(seconds[rank] for rank in TAIL)


def _picture(report: Report, found: Sequence[Standing]) -> str:
    shown = [each for each in found if each.point.kind != "overload"]
    if not shown:
        return ""
    titles = ("the paper's FCFS over ours", "the envelope over ours", "not streaming over ours")
    ratios = [[each.over_fcfs for each in shown], [each.over_envelope for each in shown]]
    ratios += [[each.over_not_streaming for each in shown]]
    bars = [[{rank: seconds[rank] for rank in TAIL} for seconds in panel] for panel in ratios]
    figure = draw_ratios(titles, [each.point.name for each in shown], bars)
    return "\n" + report.pictures.add("beat", figure, "How many times as fast as the paper's ways ours is")


def _held_out_rows(found: Sequence[Standing], best: Sequence[Standing]) -> Iterator[list[str]]:
    for same, any_budget in zip(found, best, strict=True):
        yield [same.point.name, _seeds(same), *_over(same, any_budget), _ratios(same.to_floor), _busy(same)]


def _sync_rows(report: Report) -> Iterator[list[str]]:
    for point in (*LIGHT, *LOADED):
        pools = [report.results.pool(point, way) for way in (FCFS_SYNC, FCFS, OURS)]
        yield [point.name, *(triple(seconds_of(pool)[rank] for rank in TAIL) if pool else "–" for pool in pools)]


SECTION = Section("beat", "Against the paper's ways", wanted, write)
