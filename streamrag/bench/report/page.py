"""A benchmark as one HTML page that needs nothing else: pictures are inside, nothing is fetched."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from streamrag.bench.grid import describe_load, describe_qps
from streamrag.bench.report import plots
from streamrag.bench.report.canvas import require_matplotlib
from streamrag.bench.report.comparison import BASELINE, Comparison, Figure, Pool, compare
from streamrag.bench.report.html import Cell, Table, cell, render, require_jinja
from streamrag.bench.summary import PERCENTILES, Digest, Slos, spread
from streamrag.engine.eviction import FATES
from streamrag.versions import __version__

COPIED = {"num_blocks_saved": 1, "num_blocks_loaded": 1, "num_bytes_out": 1e9, "num_bytes_in": 1e9}
"""Fields of `CopyTotals`, and the unit that the report counts each in."""


def make_report(digests: Iterable[Digest], *, slos: Slos, failed: Mapping[str, str] | None = None) -> str:
    """The page, as HTML; `failed` maps the names of cells that have no result to why.

    Raises MissingDependencyError without matplotlib or Jinja.
    """
    comparisons = compare(digests)
    shown = [digest for c in comparisons for pool in c.pools.values() for digest in pool.digests]
    return render(
        clock="virtual time" if comparisons[0].load.clock == "virtual" else "wall time",
        num_cells=len(shown),
        num_requests=sum(len(digest.ttft_s) for digest in shown),
        simulation=_simulation([digest for digest in shown if digest.settings.clock == "virtual"]),
        failed=failed or {},
        loads=[_load(comparison, slos) for comparison in comparisons],
        provenance=_provenance(comparisons),
    )


def require_report() -> None:
    """Raises MissingDependencyError without matplotlib or Jinja."""
    require_matplotlib()
    require_jinja()


def _simulation(digests: Sequence[Digest]) -> tuple[float, float, float] | None:
    """Seconds that were simulated, seconds of one core that it took, and their ratio."""
    simulated_s, wall_s = (sum(digest.completion_s for digest in digests), sum(digest.wall_s for digest in digests))
    return (simulated_s, wall_s, simulated_s / wall_s) if wall_s > 0 else None


def _load(comparison: Comparison, slos: Slos) -> dict[str, Any]:
    return {
        "title": describe_load(comparison.load),
        "speed_ups": _speed_ups(comparison),
        "ccdf": plots.draw_ccdf(comparison),
        "ttft_by_qps": plots.draw_ttft_by_qps(comparison),
        "times": plots.draw_times(comparison),
        "limits": ", ".join(f"{name} ≤ {limit:g} s" for name, limit in slos.items()),
        "goodput": _goodput(comparison, slos),
        "invalidated": plots.draw_invalidated(comparison),
        "preemptions": _preemptions(comparison),
        "arrivals": _arrivals(comparison),
    }


def _rows(comparison: Comparison) -> Iterable[tuple[float | None, str, Pool]]:
    for qps in comparison.qps:
        for variant in comparison.variants:
            if pool := comparison.pools.get((variant, qps)):
                yield qps, variant, pool


def _speed_ups(comparison: Comparison) -> Table:
    rows: list[list[Cell]] = []
    shown: float | str | None = ""
    for qps, variant, pool in _rows(comparison):
        if qps != shown:
            shown = qps
            rows.append(_floor_row(comparison, qps))
        after = [cell(pool.figure(lambda d: d.ttft_after_retrieval_s, name)) for name in PERCENTILES]
        from_arrival = cell(pool.figure(lambda d: d.ttft_s, "p50"))
        ups = [comparison.speed_up(variant, qps, name) for name in PERCENTILES]
        speed_ups = [Cell("1", is_number=True) if variant == BASELINE else cell(up, unit="x") for up in ups]
        ratios = [cell(pool.ratio_to_floor(name), unit="x") for name in PERCENTILES]
        rows.append([Cell(""), Cell(variant, _unanswered(pool)), *after, *speed_ups, *ratios, from_arrival])
    groups = [
        ("", 2),
        ("ttft_after_retrieval_s, seconds", 3),
        ("speed-up", 3),
        ("ratio to the floor", 3),
        ("ttft_s", 1),
    ]
    names = [*("P50", "P95", "P99") * 3, "P50"]
    return Table(["load", "arm", *names], rows, groups)


def _unanswered(pool: Pool) -> str:
    num = sum(digest.num_unfinished for digest in pool.digests)
    return f"{num:,} never answered, and not counted" if num else ""


def _floor_row(comparison: Comparison, qps: float | None) -> list[Cell]:
    pools = [pool for at, _, pool in _rows(comparison) if at == qps]
    pool = max(pools, key=lambda pool: len(pool.values(lambda d: d.floor_s)))  # of any arm: the load is the same
    floors = [cell(_without_spread(pool.figure(lambda d: d.floor_s, name))) for name in PERCENTILES]
    return [Cell(describe_qps(qps), is_group=True), Cell("floor: each request alone"), *floors, *[Cell("")] * 7]


def _without_spread(figure: Figure) -> Figure:
    """Without the spread over seeds: floors are not measured under load."""
    return Figure(figure.value, figure.value, figure.value)


def _goodput(comparison: Comparison, slos: Slos) -> Table | None:
    if not slos:
        return None
    rows = [
        [Cell(variant), *(_goodput_at(comparison, variant, qps, slos) for qps in comparison.qps)]
        for variant in comparison.variants
    ]
    return Table(["arm", *map(describe_qps, comparison.qps)], rows)


def _goodput_at(comparison: Comparison, variant: str, qps: float | None, slos: Slos) -> Cell:
    pool = comparison.pools.get((variant, qps))
    return cell(pool.total(lambda d: d.goodput(slos) or 0.0) if pool else None)


def _preemptions(comparison: Comparison) -> Table:
    digests = [digest for _, _, pool in _rows(comparison) for digest in pool.digests]
    fates = sorted({fate for digest in digests for fate in digest.num_preemptions or {}})
    known = [*reversed(FATES)]
    fates = sorted(fates, key=lambda fate: known.index(fate) if fate in known else len(known))
    has_copies = any(digest.copy_totals for digest in digests)
    of_tokens = ["lost in them", "recomputed", "tax", "invalidated", *(["loaded"] if has_copies else [])]
    of_copies = ["saved", "loaded", "out", "in"] if has_copies else []
    names = [*fates, *of_tokens, *of_copies, "busy"]
    rows = []
    shown: float | str | None = ""
    for qps, variant, pool in _rows(comparison):
        if qps != shown:
            shown = qps
            rows.append([Cell(describe_qps(qps), is_group=True), *[Cell("")] * (1 + len(names))])
        counts = _counts(pool, fates, has_copies=has_copies) or [Cell("not told"), *[Cell("")] * (len(names) - 2)]
        busy = cell(pool.total(lambda d: 100 * d.busy_s / d.completion_s if d.completion_s else math.nan), unit=" %")
        rows.append([Cell(""), Cell(variant), *counts, busy])
    num_copies = len(of_copies) // 2
    groups = [("preemptions", len(fates)), ("tokens", len(of_tokens)), ("blocks", num_copies), ("GB", num_copies)]
    return Table(["load", "arm", *names], rows, [("", 2), *groups, ("engine", 1)])


def _counts(pool: Pool, fates: Sequence[str], *, has_copies: bool) -> list[Cell]:
    """Nothing where the engine does not tell."""
    if any(digest.num_preemptions is None for digest in pool.digests):
        return []
    counts = [
        *(cell(pool.total(lambda d, fate=fate: (d.num_preemptions or {}).get(fate, 0))) for fate in fates),  # type: ignore[misc]
        cell(pool.total(lambda d: d.num_tokens_lost)),
        cell(pool.total(lambda d: sum(d.num_recomputed))),
        cell(pool.total(lambda d: 100 * d.recompute_tax), unit=" %"),
        cell(pool.total(lambda d: sum(d.num_invalidated))),
    ]
    if has_copies:
        counts.append(cell(pool.total(lambda d: d.num_loaded)))
        for name, unit in COPIED.items():
            counts.append(cell(pool.total(lambda d, n=name, u=unit: getattr(d.copy_totals, n, math.nan) / u)))  # type: ignore[misc]
    return counts


def _arrivals(comparison: Comparison) -> dict[str, Any]:
    """What arrived in one cell, if possible of an engine that told about chunks: all variants have the same load."""
    digests = [digest for pool in comparison.pools.values() for digest in pool.digests]
    chosen = max(digests, key=lambda d: (len(d.gaps_s) > 0, len(d.num_tokens) > 0, len(d.num_chunks)))
    listed: list[tuple[str, Sequence[float]]] = [
        ("gap between chunks, seconds", chosen.gaps_s),
        ("chunks per query", chosen.num_chunks),
        ("tokens of the complete prompt", chosen.num_tokens),
        ("retrieval, seconds", chosen.retrieval_s),
    ]
    rows = [
        [
            Cell(name),
            Cell(f"{len(values):,}", is_number=True),
            *map(cell, [sum(values) / len(values), *spread(values).values(), max(values)]),
        ]
        for name, values in listed
        if values
    ]
    note = (
        f"Of one cell, {describe_qps(chosen.settings.qps)}, seed {chosen.settings.seed}; all arms have the same load."
    )
    if not chosen.gaps_s:
        note += " Gaps are told by streaming cells only, and there is none here with more than one chunk."
    return {
        "picture": plots.draw_arrivals(chosen.gaps_s, chosen.num_chunks, chosen.num_tokens),
        "note": note,
        "table": Table(["", "how many", "mean", "P50", "P95", "P99", "most"], rows),
    }


def _provenance(comparisons: Sequence[Comparison]) -> list[tuple[str, str]]:
    found: dict[str, set[str]] = {"report by": {f"streamrag {__version__}"}}
    for comparison in comparisons:
        for pool in comparison.pools.values():
            found.setdefault("seeds", set()).update(map(str, pool.seeds))
            for digest in pool.digests:
                _collect(found, "", digest.provenance)
    return [(name, "; ".join(sorted(values)[:20])) for name, values in sorted(found.items())]


def _collect(found: dict[str, set[str]], prefix: str, values: Mapping[str, Any]) -> None:
    for name, value in values.items():
        if isinstance(value, Mapping):
            _collect(found, f"{prefix}{name}.", value)
        else:
            found.setdefault(prefix + name, set()).add(str(value))
