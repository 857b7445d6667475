"""The report of a comparison: a table and sentences, as text, JSON or one HTML page."""

import math
from collections.abc import Sequence
from typing import Any

from rich.table import Table

from streamrag_bench.compare.interval import CONFIDENCE, Interval
from streamrag_bench.compare.pairs import ARMS, FIRST_TOKEN, MEASURES, AskedPair, ComparedGroup
from streamrag_bench.compare.picture import QueryRow, draw_queries
from streamrag_bench.compare.words import verdict
from streamrag_bench.provenance import versions
from streamrag_bench.report.canvas import as_svg
from streamrag_bench.report.html import Cell, HtmlTable, render

COLUMNS = ("streaming", "without", "ratio", f"{CONFIDENCE:.0%} interval", "")


def table_rows(group: ComparedGroup, names: Sequence[str] = tuple(MEASURES)) -> list[tuple[str, ...]]:
    """Return a row for each measure: its name, both medians in seconds, the ratio, the interval, the word for it."""
    rows: list[tuple[str, ...]] = []
    for name in names:
        low, middle, high = found = group.interval(name)
        streaming, waiting = (f"{seconds:.2f}" for seconds in group.medians(MEASURES[name]))
        span = f"{low:.2f} to {high:.2f}" if len(group.rounds) > 1 else "none"
        rows.append((name, streaming, waiting, f"{middle:.2f}", span, found.word))
    return rows


def make_table(groups: Sequence[ComparedGroup], names: Sequence[str] = tuple(MEASURES)) -> Table:
    """Return a table of the groups for a terminal."""
    common = "first token, " if names == FIRST_TOKEN else ""  # stands in the heading then
    table = Table(common.rstrip(", "), *COLUMNS, box=None, pad_edge=False)
    for group in groups:
        for name, *figures in table_rows(group, names):
            label = name.removeprefix(common)
            table.add_row(f"{group.name}, {label}" if len(groups) > 1 else label, *figures)
    return table


def as_json(groups: Sequence[ComparedGroup], others_share: float | None, sentences: Sequence[str]) -> dict[str, Any]:
    """Return the intervals, the verdict and the numbers of each pair."""
    return {
        "format": 1,
        "sentences": sentences,
        "others_share": others_share,
        "versions": versions(),
        "groups": [
            {
                "name": group.name,
                "num_rounds": len(group.rounds),
                "intervals": {name: _interval_json(group.interval(name)) for name in MEASURES},
                "pairs": [pair.rows() for pair in group.pairs],
            }
            for group in groups
        ],
    }


def _interval_json(found: Interval) -> dict[str, Any]:
    """Return the interval and its word; null for the ends of the interval of one round, which has none."""
    ends = {name: value if 0 < value < math.inf else None for name, value in found._asdict().items()}
    return {**ends, "word": found.word}


def make_page(groups: Sequence[ComparedGroup], sentences: Sequence[str]) -> str:
    """Return the page as HTML, with a picture of the pair in the middle of each group."""
    tables = [
        (
            group.name,
            HtmlTable(("", *COLUMNS), [[Cell(text, is_number=bool(n)) for n, text in enumerate(row)] for row in rows]),
        )
        for group in groups
        if (rows := table_rows(group))
    ]
    shown = [(group.name, _median_rows(group)) for group in groups]
    picture = as_svg(draw_queries(shown, title="From the question to the last token"))
    facts = [(name, version) for name, version in versions().items()]
    return render("compare.html", sentences=sentences, tables=tables, picture=picture, facts=facts)


def _median_rows(group: ComparedGroup) -> list[QueryRow]:
    """Return the two rows of the pair whose ratio after retrieval is the median; of an even number, the lower one."""
    measure = MEASURES[FIRST_TOKEN[1]]
    by_ratio: list[AskedPair] = sorted(group.pairs, key=lambda pair: pair.ratio(measure))
    pair = by_ratio[(len(by_ratio) - 1) // 2]
    return [QueryRow(arm, events) for arm, events in zip(ARMS, (pair.streaming, pair.waiting), strict=True)]


def sentences_of(groups: Sequence[ComparedGroup]) -> list[str]:
    """Return the verdicts on all groups."""
    return [sentence for group in groups for sentence in verdict(group)]
