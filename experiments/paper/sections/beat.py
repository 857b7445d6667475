"""Ours against the paper's ways: every ratio, every target, met or missed."""

from collections.abc import Iterable, Iterator, Sequence

from streamrag.bench.compare import Pool

from ..bound import bound_of
from ..markdown import table, times, triple, yes_no
from ..pictures import draw_ratios
from ..plan import HELD_OUT_SEEDS, Scale, Wanted
from ..points import (
    BEATEN,
    HALF_KV,
    HELD_OUT,
    LIGHT,
    LOADED,
    OVERLOAD,
    PRESSED,
    Point,
)
from ..standing import RANKS, Seconds, Standing, envelope, floor_of, least, seconds_of
from ..targets import TARGETS, Found, Target
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
)
from .included import planning
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
TAIL = ("P50", "P95", "P99")


def wanted(scale: Scale) -> Wanted:
    for point in (*LIGHT, *LOADED, *HELD_OUT):
        for way in (*PUBLISHED_BUDGET, OURS, *OTHER_BUDGET):
            yield point, way
    for point in (*LIGHT, *LOADED):
        yield point, FCFS_SYNC
    for point in PRESSED:
        for way in (*_under_pressure(point, scale), OURS):
            yield point, way
    for point in OVERLOAD:
        for way in (NOT_STREAMING, with_other_budget(NOT_STREAMING), FCFS, OURS):
            yield point, way
    yield LOADED[0], HINTED


def _under_pressure(point: Point, scale: Scale) -> tuple[Way, ...]:
    if scale.has_all_ways:
        return (*UNDER_PRESSURE, *OTHER_UNDER_PRESSURE)
    # Cells that copy take longest.
    is_half = point in HALF_KV
    return tuple(way for way in UNDER_PRESSURE if not (is_half and way in PAPER_SWAPPING and way.policy not in BEST))


def standing(
    report: Report, point: Point, *, any_budget: bool = False, seeds: Iterable[int] | None = None
) -> Standing | None:
    """Ours at a point; with `any_budget`, beside baselines that have the token budget that suits them best at each
    rank. None if it is not simulated yet, or not with these seeds."""

    def seconds(way: Way) -> Seconds | None:
        pool = _only(report.results.pool(point, way), seeds)
        return seconds_of(pool) if pool else None

    mine = _only(report.results.pool(point, OURS), seeds)
    baseline = _only(report.results.pool(point, NOT_STREAMING), seeds)
    if mine is None or baseline is None:
        return None
    same, other = _ways(point)
    not_streaming: list[Seconds] = []
    fcfs: list[Seconds] = []
    envelopes: list[Seconds] = []
    eligible: list[str] = []
    for ways, named in ((same, NOT_STREAMING), (other, with_other_budget(NOT_STREAMING)))[: 1 + any_budget]:
        without = seconds(named)
        if without is None:
            continue
        not_streaming.append(without)
        found = {way.name: value for way in ways if way != named and (value := seconds(way))}
        fcfs += [found[name] for name in (FCFS.name, with_other_budget(FCFS).name) if name in found]
        around, names = envelope(found, without)
        envelopes += [around] if around else []
        eligible += names
    best_without = least(not_streaming)
    assert best_without
    return Standing(
        point,
        mine.seeds,
        seconds_of(mine),
        least(fcfs),
        least(envelopes),
        tuple(eligible),
        best_without,
        floor_of(mine),
        mine.total(lambda d: d.busy_s).value / baseline.total(lambda d: d.busy_s).value,
        seconds(HINTED),
        bound_of(tuple(digest.settings for digest in baseline.digests)),
    )


def _only(pool: Pool | None, seeds: Iterable[int] | None) -> Pool | None:
    if pool is None or seeds is None:
        return pool
    kept = pool.only(seeds)
    return kept if kept.digests else None


def _ways(point: Point) -> tuple[Sequence[Way], Sequence[Way]]:
    """The baselines with the published budget, and those with the other."""
    if point.kind == "pressure":
        return UNDER_PRESSURE, OTHER_UNDER_PRESSURE
    return PUBLISHED_BUDGET, OTHER_BUDGET


def standings(report: Report, points: Iterable[Point], *, any_budget: bool = False) -> list[Standing]:
    """Of the points that are simulated."""
    return [found for point in points if (found := standing(report, point, any_budget=any_budget))]


def write(report: Report) -> str:
    points = (*BEATEN, *OVERLOAD)
    found, best = standings(report, points), standings(report, points, any_budget=True)
    held_out = standings(report, HELD_OUT)
    held_out += [each for point in BEATEN if (each := standing(report, point, seeds=HELD_OUT_SEEDS))]
    published = " in brackets with the token budget that suits the baseline best"
    over = "FCFS, the envelope, not streaming, ours/floor, ours/bound, busy/not streaming, longest/not streaming"
    seeds = ", ".join(map(str, HELD_OUT_SEEDS))
    parts = [
        _explained(report),
        "### Targets\n\n",
        table(
            ["target", "at", "met", "worst figure", "met?", "best budget: worst figure", "met?", "why not"],
            _targets(found, best),
        ),
        "\n" + planning(report.pictures.report.parent),
        "\n### Seconds\n\n`ttft_after_retrieval_s`, P50/P90/P95/P99/longest.\n\n",
        table(["", "seeds", "ours", "FCFS", "envelope", "not streaming", "floor", "bound"], map(_seconds_row, found)),
        f"\n### How many times as fast as\n\nP50/P95/P99;{published}.\n\n",
        table(["", *over.split(", ")], _ratio_rows(found, best)),
        _picture(report, found),
        "\n### What the envelope is made of\n\n",
        table(["", "not worse than not streaming at P99"], map(_envelope_row, found), num_left=2),
        f"\n### What took no part in tuning\n\nRates, then seeds {seeds} of the points above, as far as this scale has "
        "them.\n\n",
        table(
            ["", "seeds", "FCFS over ours", "envelope over ours", "not streaming over ours", "busy"],
            map(_held_out_row, held_out),
        ),
        "\n### An engine that plans no step ahead\n\nThe paper's FCFS on it, P50/P95/P99 in seconds, beside FCFS and "
        "ours on one that does, as vLLM does today.\n\n",
        table(["", FCFS_SYNC.name, FCFS.name, "ours"], _sync_rows(report)),
    ]
    return "".join(parts)


def _explained(report: Report) -> str:
    under_pressure = (
        ""
        if report.scale.has_all_ways
        else " (under memory pressure the published one only, and with half the KV only FCFS and LCAS copy)"
    )
    return (
        "Ours is `SchedulerOptions()`, the same at every point. *FCFS* is the paper's, with recomputation, in the same "
        "simulator. The *envelope* is the best of the paper's policies, and under pressure of the three evictions, "
        "taken apart at each percentile, of those whose P99 is not worse than not streaming's. Baselines have the "
        "published token budget (2,048 a step for crawls, 8,192 for searches), and for *best budget* the better of "
        f"2,048 and 8,192 at each percentile{under_pressure}. The *floor* is the request alone on the engine, and the "
        "*bound* what no schedule gets below that knows the future, evicts nothing and computes nothing in vain, each "
        "percentile taken apart: a schedule may leave the longest requests lying to have a better P95, so that the "
        "bounds of two percentiles are not reached together (the proof: experiments/paper/bound.py). "
        "Percentiles are of all requests of all seeds; `make paper` has few seeds, `make paper-full` ten.\n\n"
    )


def _envelope_row(of: Standing) -> list[str]:
    return [of.point.name, "; ".join(of.eligible) or "none"]


def _targets(found: Sequence[Standing], best: Sequence[Standing]) -> Iterator[list[str]]:
    for target in TARGETS:
        sign = "at least" if target.is_least else "at most"
        of, of_best = target.at(found), target.at(best)
        limits = sorted({each.limit for each in of})
        limit = " or ".join(f"{limit:.3g}" for limit in limits)
        met = f"{sum(each.is_met for each in of)} of {len(of)}"
        text = f"{target.text}: {sign} {limit or '–'}"
        yield [
            text,
            "/".join(target.ranks),
            met if of else "–",
            *_worst(target, of),
            *_worst(target, of_best),
            target.why(of) or target.why_beside_best(of_best),
        ]


def _worst(target: Target, found: Sequence[Found]) -> tuple[str, str]:
    if not found:
        return "not measured", "–"
    worst = target.worst(found)
    return f"{worst.value:.2f} ({worst.rank}, {worst.point.name})", yes_no(all(each.is_met for each in found))


def _seconds_row(of: Standing) -> list[str]:
    def text(seconds: Seconds | None) -> str:
        return triple(seconds[rank] for rank in RANKS) if seconds else "–"

    seeds = ", ".join(map(str, of.seeds))
    return [of.point.name, seeds, *map(text, (of.ours, of.fcfs, of.envelope, of.not_streaming, of.floor, of.bound))]


def _ratio_rows(found: Sequence[Standing], best: Sequence[Standing]) -> Iterator[list[str]]:
    for same, any_budget in zip(found, best, strict=True):
        pairs = [(same.over_fcfs, any_budget.over_fcfs), (same.over_envelope, any_budget.over_envelope)]
        pairs += [(same.over_not_streaming, any_budget.over_not_streaming)]
        texts = [f"{_ratios(a)} [{_ratios(b)}]" for a, b in pairs]
        floor = triple(same.to_floor[rank] for rank in TAIL)
        longest = 1 / same.over_not_streaming["max"]
        bound = triple(same.to_bound[rank] for rank in TAIL)
        yield [same.point.name, *texts, floor, bound, times(same.busy_ratio), times(longest)]


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


def _held_out_row(of: Standing) -> list[str]:
    ratios = map(_ratios, (of.over_fcfs, of.over_envelope, of.over_not_streaming))
    return [of.point.name, ", ".join(map(str, of.seeds)), *ratios, times(of.busy_ratio)]


def _sync_rows(report: Report) -> Iterator[list[str]]:
    for point in (*LIGHT, *LOADED):
        pools = [report.results.pool(point, way) for way in (FCFS_SYNC, FCFS, OURS)]
        yield [point.name, *(triple(seconds_of(pool)[rank] for rank in TAIL) if pool else "–" for pool in pools)]


SECTION = Section("beat", "Against the paper's ways", wanted, write)
