"""One HTML page that compares results of the public benchmark."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from streamrag_bench.public.results import METRICS, PublicResult
from streamrag_bench.report.html import Cell, HtmlTable, figure_text, render
from streamrag_bench.report.plots import draw_distributions
from streamrag_bench.summary import PERCENTILES, ratio


def make_page(results: Sequence[PublicResult]) -> str:
    """Return the page of at least one result as HTML."""
    pictures = {
        words: draw_distributions([(r.name, r.is_simulated, r.values(metric)) for r in results], words)
        for metric, words in METRICS.items()
        if metric.endswith("after_retrieval_s")
    }
    return render(
        "public.html",
        kinds=" and ".join(sorted({result.kind for result in results})),
        notes=list(_notes(results)),
        tables=[(words, _table(results, metric)) for metric, words in METRICS.items()],
        pictures=pictures.items(),
        runs=[(f"{number}. {result.name}", _facts(result)) for number, result in enumerate(results, start=1)],
    )


def _notes(results: Sequence[PublicResult]) -> Iterator[str]:
    """Yield what a reader must know first: simulated figures, different loads, failures, short answers."""
    for result in results:
        if result.is_simulated:
            yield f"{result.name} is simulated, not measured; the hardware {result.hardware} was not used."
        if different := [name for name, value in _load(result).items() if value != _load(results[0])[name]]:
            names = ", ".join(different)
            yield f"{result.name} has another load than {results[0].name} ({names}): do not compare the two."
        if result.num_failed:
            yield f"{result.name}: {result.num_failed:,} of {len(result.queries):,} queries failed: infinite times."
        if result.num_short_answers:
            yield f"{result.name}: {result.num_short_answers:,} answers were shorter than the load says."


def _load(result: PublicResult) -> dict[str, Any]:
    return {**asdict(result.load), "seeds": result.seeds, "num_contexts_cut": result.num_contexts_cut}


def _table(results: Sequence[PublicResult], metric: str) -> HtmlTable:
    """Return the table of a metric, with a row for each result, and ratios to the first one."""
    first = results[0].percentiles(metric)
    rows = []
    for result in results:
        cells = [Cell(result.name, result.kind)]
        for name in PERCENTILES:
            value = result.percentiles(metric).get(name, math.nan)
            share = ratio(value, first.get(name, math.nan))
            has_ratio = result is not results[0] and math.isfinite(share)
            cells.append(Cell(figure_text(value), f"{figure_text(share)}x" if has_ratio else "", is_number=True))
        rows.append([*cells, Cell(f"{result.num_failed:,}", is_number=True)])
    return HtmlTable(["", *(f"{name.upper()}, s" for name in PERCENTILES), "failed"], rows)


def _facts(result: PublicResult) -> str:
    """Return engine, hardware, model, load and provenance as one text."""
    names = ("engine", "kind", "hardware", "model")
    facts = result.provenance | {name: getattr(result, name) for name in names} | _load(result)
    return "; ".join(f"{name}: {value}" for name, value in facts.items())
