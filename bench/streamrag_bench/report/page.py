"""The report of a benchmark: one self-contained HTML page with embedded plots."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from streamrag.engine.recompute_or_swap import FATES
from streamrag.support.versions import __version__
from streamrag_bench.grid import describe_load, describe_qps
from streamrag_bench.report import plots
from streamrag_bench.report.comparison import BASELINE, Figure, LoadComparison, Pool, compare
from streamrag_bench.report.html import Cell, HtmlTable, cell, render
from streamrag_bench.report.verdict import NO_VERDICT, verdicts
from streamrag_bench.summary import PERCENTILES, Digest, Slos, spread

COPIED = {"num_blocks_saved": 1, "num_blocks_loaded": 1, "num_bytes_out": 1e9, "num_bytes_in": 1e9}
"""Fields of `CopyTotals`, with the unit that the report divides each by."""


def make_report(digests: Iterable[Digest], *, slos: Slos, failed: Mapping[str, str] | None = None) -> str:
    """Return the page of at least one digest as HTML. `failed` maps the names of failed cells to their errors."""
    comparisons = compare(digests)
    all_digests = [digest for c in comparisons for pool in c.pools.values() for digest in pool.digests]
    return render(
        clock="simulated in virtual time" if comparisons[0].load.clock == "virtual" else "measured in wall time",
        num_cells=len(all_digests),
        num_requests=sum(len(digest.ttft_s) for digest in all_digests),
        simulation=_simulation([digest for digest in all_digests if digest.settings.clock == "virtual"]),
        failed=failed or {},
        no_verdict=NO_VERDICT,
        verdicts=[verdict for comparison in comparisons for verdict in verdicts(comparison)],
        loads=[_load(comparison, slos) for comparison in comparisons],
        provenance=_provenance(all_digests),
    )


def _simulation(digests: Sequence[Digest]) -> tuple[float, float, float] | None:
    """Return the simulated seconds, the core seconds spent on them, and the ratio; None without simulations."""
    simulated_s, wall_s = (sum(digest.completion_s for digest in digests), sum(digest.wall_s for digest in digests))
    return (simulated_s, wall_s, simulated_s / wall_s) if wall_s > 0 else None


def _load(comparison: LoadComparison, slos: Slos) -> dict[str, Any]:
    """Return the values of the template's section on one load: its title, tables, and plots as SVG."""
    return {
        "title": describe_load(comparison.load),
        "speed_ups": _speed_ups(comparison),
        "ccdf": plots.draw_ccdf(comparison),
        "ttft_by_qps": plots.draw_ttft_by_qps(comparison),
        "limits": ", ".join(f"{name} ≤ {limit:g} s" for name, limit in slos.items()),
        "goodput": _goodput(comparison, slos),
        "work": _work(comparison),
        "arrivals": _arrivals(comparison),
    }


def _table(
    comparison: LoadComparison,
    groups: Sequence[tuple[str, Sequence[str]]],
    row: Callable[[str, Pool], list[Cell]],
    head: Callable[[float | None], list[Cell]] = lambda qps: [],
) -> HtmlTable:
    """Return a table with a `head` row for each rate of arrivals, and below it a `row` for each variant with results.

    groups: titles over the columns after load and arm, with the names of the columns below each.
    """
    width = 1 + sum(len(names) for _, names in groups)
    rows: list[list[Cell]] = []
    for qps in comparison.qps:
        first = [Cell(describe_qps(qps), is_group=True), *head(qps)]
        rows.append(first + [Cell("")] * (1 + width - len(first)))
        pools = [(variant, comparison.pools.get((variant, qps))) for variant in comparison.variants]
        rows += [[Cell(""), *row(variant, pool)] for variant, pool in pools if pool]
    names = [name for _, group in groups for name in group]
    return HtmlTable(["load", "arm", *names], rows, [("", 2), *((title, len(names)) for title, names in groups)])


def _speed_ups(comparison: LoadComparison) -> HtmlTable:
    """Return the table of TTFTs, speed-ups and ratios, with floors in head rows, and notes on unanswered queries."""

    def row(variant: str, pool: Pool) -> list[Cell]:
        num_unanswered = sum(digest.num_unfinished for digest in pool.digests)
        note = f"{num_unanswered:,} never answered, and not counted" if num_unanswered else ""
        ups = [comparison.speed_up(variant, pool.settings.qps, name) for name in PERCENTILES]
        return [
            Cell(variant, note),
            *(cell(pool.figure(lambda d: d.ttft_after_retrieval_s, name)) for name in PERCENTILES),
            *(Cell("1", is_number=True) if variant == BASELINE else cell(up, unit="x") for up in ups),
            *(cell(pool.ratio_to_floor(name), unit="x") for name in PERCENTILES),
            cell(pool.figure(lambda d: d.ttft_s, "p50")),
        ]

    def head(qps: float | None) -> list[Cell]:
        floors = [comparison.floors(qps).figure(lambda d: d.floor_s, name) for name in PERCENTILES]
        return [Cell("floor: each request alone"), *(cell(Figure(*[floor.value] * 3)) for floor in floors)]

    labels = tuple(name.upper() for name in PERCENTILES)
    groups = [
        ("ttft_after_retrieval_s, seconds", labels),
        ("speed-up", labels),
        ("ratio to the floor", labels),
        ("ttft_s", ("P50",)),
    ]
    return _table(comparison, groups, row, head)


def _goodput(comparison: LoadComparison, slos: Slos) -> HtmlTable | None:
    """Return the table of goodput by variant and rate, as means over seeds; None without objectives."""
    if not slos:
        return None

    def at(variant: str, qps: float | None) -> Cell:
        pool = comparison.pools.get((variant, qps))
        return cell(pool.total(lambda d: d.goodput(slos) or 0.0) if pool else None)

    rows = [[Cell(variant), *(at(variant, qps) for qps in comparison.qps)] for variant in comparison.variants]
    return HtmlTable(["arm", *map(describe_qps, comparison.qps)], rows)


def _work(comparison: LoadComparison) -> HtmlTable:
    """Return the table of preemptions, tokens, copies and the engine's time; counts are "unknown" without records."""
    digests = [digest for pool in comparison.pools.values() for digest in pool.digests]
    fates = [fate for fate in reversed(FATES) if any(fate in (digest.num_preemptions or {}) for digest in digests)]
    has_copies = any(digest.copy_totals for digest in digests)
    of_tokens = ["lost in them", "recomputed", "tax", "invalidated", *(["loaded"] if has_copies else [])]
    groups: list[tuple[str, Sequence[str]]] = [("preemptions", fates), ("tokens", of_tokens)]
    if has_copies:
        groups += [("blocks", ("saved", "loaded")), ("GB", ("out", "in"))]
    num_counts = sum(len(names) for _, names in groups)

    def row(variant: str, pool: Pool) -> list[Cell]:
        counts = _counts(pool, fates, has_copies=has_copies) or [Cell("unknown"), *[Cell("")] * (num_counts - 1)]
        busy = pool.total(lambda d: 100 * d.busy_s / d.completion_s if d.completion_s else math.nan)
        return [Cell(variant), *counts, cell(busy, unit=" %"), cell(pool.total(lambda d: d.completion_s))]

    return _table(comparison, [*groups, ("engine", ("busy", "last end, s"))], row)


def _counts(pool: Pool, fates: Sequence[str], *, has_copies: bool) -> list[Cell]:
    """Return cells with means over seeds of preemptions, tokens and copies; [] if a seed has no engine records."""
    if any(digest.num_preemptions is None for digest in pool.digests):
        return []

    def of_fate(fate: str) -> Cell:
        return cell(pool.total(lambda d: (d.num_preemptions or {}).get(fate, 0)))

    def of_copies(name: str, unit: float) -> Cell:
        return cell(pool.total(lambda d: getattr(d.copy_totals, name, math.nan) / unit))

    counts = [
        *map(of_fate, fates),
        cell(pool.total(lambda d: d.num_tokens_lost)),
        cell(pool.total(lambda d: sum(d.num_recomputed))),
        cell(pool.total(lambda d: 100 * d.recompute_tax), unit=" %"),
        cell(pool.total(lambda d: sum(d.num_invalidated))),
    ]
    if has_copies:
        counts += [cell(pool.total(lambda d: d.num_loaded)), *(of_copies(*each) for each in COPIED.items())]
    return counts


def _arrivals(comparison: LoadComparison) -> dict[str, Any]:
    """Return "note" and "table" on gaps, chunks, tokens and retrievals of the cell with the most complete records.

    One cell stands for all, because all arms have the same load. The table leaves out rows without values.
    """
    digests = [digest for pool in comparison.pools.values() for digest in pool.digests]
    one = max(digests, key=lambda d: (len(d.gaps_s) > 0, len(d.num_tokens) > 0, len(d.num_chunks)))
    listed: list[tuple[str, Sequence[float]]] = [
        ("gap between chunks, seconds", one.gaps_s),
        ("chunks per query", one.num_chunks),
        ("tokens of the complete prompt", one.num_tokens),
        ("retrieval, seconds", one.retrieval_s),
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
    note = f"For one cell, {describe_qps(one.settings.qps)}, seed {one.settings.seed}; all arms have the same load."
    if not one.gaps_s:
        note += " Gaps are reported by streaming cells only, and none here has more than one chunk."
    return {"note": note, "table": HtmlTable(["", "count", "mean", "P50", "P95", "P99", "max"], rows)}


def _provenance(digests: Iterable[Digest]) -> list[tuple[str, str]]:
    """Return sorted pairs of a name and its distinct values over all cells, at most 20, joined by semicolons."""
    found: dict[str, set[str]] = {"report by": {f"streamrag {__version__}"}}
    for digest in digests:
        found.setdefault("seeds", set()).add(str(digest.settings.seed))
        _collect(found, "", digest.provenance)
    return [(name, "; ".join(sorted(values)[:20])) for name, values in sorted(found.items())]


def _collect(found: dict[str, set[str]], prefix: str, values: Mapping[str, Any]) -> None:
    """Add each value as text to the set of its dotted name in `found`; a nested mapping adds the values within."""
    for name, value in values.items():
        if isinstance(value, Mapping):
            _collect(found, f"{prefix}{name}.", value)
        else:
            found.setdefault(prefix + name, set()).add(str(value))
