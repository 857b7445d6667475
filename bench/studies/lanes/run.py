"""Lanes beside as many engines that compute prompts and answers both, in virtual time.

    python -m studies.lanes.run [--json FILE] [--short] [--processes N]

Each engine has two H200 (`h200-llama8b-tp2`). The KV of a complete prompt, 128 KiB a token, crosses the links of both
its lanes: one transfer at a time on each link. A decode lane is sent the blocks that it does not have, and begins with
the prompt's last token, as with NIXL. The engines are lean models, without a scheduler of vLLM's. `soonest` routes.

links       lanes for each link, beside engines that do both
documents   popular documents, which decode lanes find in their prefix caches, or are sent again

Both sides are tuned in the same way: engines that do both have the best of four step budgets for each load and number,
and lanes have the best of three splits for each link. The best has the least P95 of the last token;
of those within 5 % of it, the least P95 of the first one. Prefill lanes have the step budget that Stream2LLM published
for the load. Seconds are from the end of retrieval; tables are in Markdown.
"""

import argparse
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from streamrag.engine.costs.profile_files import load_profile
from streamrag_bench.cell import CellSettings
from streamrag_bench.summary import percentile
from streamrag_bench.workload import fit_contexts, load_trace, make_load, token_budget
from studies.lanes.figures import decimal, study_table, without_repeats
from studies.lanes.play import Outcome, Way, play, queries_of
from studies.results_file import write_results
from studies.routing.loads import Query, rag

PROFILE = "h200-llama8b-tp2"
KV_BYTES_PER_TOKEN = 131_072
LINKS = {"NVLink": 450e9, "400 Gb/s": 50e9, "100 Gb/s": 12.5e9}
"""Bytes per second."""
NUMBERS = (2, 4, 8, 16, 32, 64)
RATES = {"crawler": 4.0, "anns": 2.0, "documents": 4.0}
"""Queries a second for each engine."""
ANSWERS = (50, 500)
NUM_QUERIES = 60
"""For each engine."""
DOCUMENTS_BUDGET = 8_192
BUDGETS = (8_192, 2_048, 1_024, 512)
"""Tokens of a step from which engines that do both get the best. With 256, prompts waited for seconds (P95) in short
runs of searches."""
NEARLY = 0.05
"""Share by which two P95s of the last token may differ and count as equal. Else a small step budget wins by a hundredth
of a second, and its first token comes late."""
NAMES = {"crawler": "crawls", "anns": "searches"}
"""Loads, as the studies call them."""


@dataclass(frozen=True)
class Row:
    """One run. Seconds."""

    load: str
    num_engines: int
    num_answer: int  # 0: the load's own
    way: str  # "both", or the link of lanes
    num_prefill: int  # 0: all do both
    reuses: bool
    budget: int  # tokens of a step
    first_p50_s: float
    first_p95_s: float
    last_p50_s: float
    last_p95_s: float
    per_token_p50_s: float
    per_token_p95_s: float
    sent_share: float  # of the prompts' blocks, those that crossed a link


@dataclass(frozen=True)
class Cell:
    """One load for so many engines."""

    load: str
    num_answer: int
    num_engines: int
    num_queries: int  # for each engine
    seed: int = 1

    def settings(self) -> CellSettings:
        return CellSettings(
            clock="virtual",
            workload=self.load,
            arm="streaming",
            qps=RATES[self.load] * self.num_engines,
            num_queries=self.num_queries * self.num_engines,
            num_output_tokens=self.num_answer,
            profile=PROFILE,
            seed=self.seed,
        )

    def queries(self) -> list[Query]:
        if self.load == "documents":
            return rag(RATES[self.load] * self.num_engines, self.num_queries * self.num_engines, self.seed)
        settings = self.settings()
        traced = fit_contexts(settings, make_load(settings, load_trace(settings)), None).queries
        return queries_of(traced, self.num_answer)

    @property
    def budget(self) -> int:
        """The published step budget of the load."""
        return DOCUMENTS_BUDGET if self.load == "documents" else token_budget(self.settings())


def run(
    cell: Cell,
    queries: Sequence[Query],
    num_prefill: int,
    link: str = "both",
    *,
    reuses: bool = True,
    budget: int | None = None,
) -> Row:
    """Play the queries of a cell in one way.

    link: a name of `LINKS`, or "both" for engines that do both.
    budget: tokens of a step; None: as published.
    """
    budget = budget or cell.budget
    way = Way(cell.num_engines, budget, num_prefill, LINKS.get(link, 1.0), KV_BYTES_PER_TOKEN, reuses)
    outcome = play(queries, way, load_profile(PROFILE))
    what = (cell.load, cell.num_engines, cell.num_answer, link, num_prefill, reuses, budget)
    return Row(*what, *_figures(outcome))


def _figures(outcome: Outcome) -> Iterator[float]:
    for of in ("first_s", "last_s", "per_token_s"):
        of_queries = [getattr(timing, of) for timing in outcome.timings]
        yield percentile(of_queries, 0.5)
        yield percentile(of_queries, 0.95)
    num_sent = sum(timing.num_sent for timing in outcome.timings)
    yield num_sent / max(num_sent + sum(timing.num_reused for timing in outcome.timings), 1)


def splits(num_engines: int) -> list[int]:
    """Return numbers of prefill lanes: about a quarter, a half and three quarters of the engines."""
    return sorted({min(max(round(num_engines * share), 1), num_engines - 1) for share in (0.25, 0.5, 0.75)})


def best(rows: Iterable[Row]) -> Row:
    """Return the row with the least P95 of the last token; of those that nearly have it, the one with the least P95 of
    the first token. Splits of lanes and step budgets of engines that do both are chosen alike."""
    tried = list(rows)
    limit_s = (1 + NEARLY) * min(row.last_p95_s for row in tried)
    return min((row for row in tried if row.last_p95_s <= limit_s), key=lambda row: row.first_p95_s)


def rows_of(cell: Cell) -> list[Row]:
    """Return all rows of a cell: engines that do both with each step budget, and lanes with each link."""
    one = partial(run, cell, cell.queries())
    both = [one(0, budget=budget) for budget in BUDGETS]
    of_links = [best(one(num, link) for num in splits(cell.num_engines)) for link in LINKS]
    if cell.load == "documents":
        resent = [one(row.num_prefill, row.way, reuses=False) for row in of_links]
        return [*both, *(row for pair in zip(of_links, resent, strict=True) for row in pair)]
    return [*both, *of_links]


# --------------------------------------------------------------------------------------------------------------- tables

FIGURES = ("first token", "last token", "ms a token")


def best_of_each(rows: Sequence[Row]) -> list[Row]:
    """Return the best row of each way that is in a table: step budgets of engines that do both compete."""
    found: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        key = row.load, row.num_answer, row.num_engines, row.way, row.reuses
        found.setdefault(key, []).append(row)
    return [best(of_key) for of_key in found.values()]


def links_table(rows: Sequence[Row]) -> str:
    """Return engines that do both with their best step budget, and lanes with each link."""
    return study_table(
        ("load, answer", "engines", "way", "tokens of a step", "prefill lanes", *FIGURES),
        without_repeats(
            (
                [*_what(row), row.way, f"{row.budget:,}", str(row.num_prefill or ""), *_figures_of(row)]
                for row in best_of_each(rows)
                if row.load != "documents"
            ),
            2,
        ),
    )


def budgets_table(rows: Sequence[Row]) -> str:
    """Return engines that do both with each step budget, of which the other tables have the best."""
    chosen = best_of_each(rows)
    return study_table(
        ("load, answer", "engines", "tokens of a step", "chosen", *FIGURES),
        without_repeats(
            (
                [*_what(row), f"{row.budget:,}", "yes" if row in chosen else "", *_figures_of(row)]
                for row in rows
                if row.way == "both"
            ),
            2,
        ),
    )


def documents_table(rows: Sequence[Row]) -> str:
    """Return what it brings that a decode lane is not sent the blocks that it has."""
    lines = []
    for row in best_of_each(rows):
        if row.load == "documents":
            way = row.way if row.reuses else f"{row.way}, all sent"
            sent = f"{100 * row.sent_share:.0f} %" if row.num_prefill else ""
            what = (str(row.num_engines), way, f"{row.budget:,}", str(row.num_prefill or ""), sent)
            lines.append([*what, *list(_figures_of(row))[:2]])
    head = ("engines", "way", "tokens of a step", "prefill lanes", "blocks sent", *FIGURES[:2])
    return study_table(head, without_repeats(lines, 1))


def _what(row: Row) -> tuple[str, str]:
    load = NAMES.get(row.load, row.load)
    return f"{load}, {row.num_answer}" if row.num_answer else load, str(row.num_engines)


def _figures_of(row: Row) -> Iterator[str]:
    """Yield P50 / P95 of seconds to the first and the last token, and of milliseconds a token."""
    yield f"{decimal(row.first_p50_s, 3)} / {decimal(row.first_p95_s)}"
    yield f"{decimal(row.last_p50_s)} / {decimal(row.last_p95_s)}"
    yield f"{decimal(1e3 * row.per_token_p50_s, 1)} / {decimal(1e3 * row.per_token_p95_s, 1)}"


def report(rows: Sequence[Row]) -> str:
    """Return all tables, with a title each."""
    tables = {
        "Lanes beside engines that do both: P50 / P95": links_table(rows),
        "Engines that do both, with each step budget": budgets_table(rows),
    }
    if any(row.load == "documents" for row in rows):
        tables["Popular documents: decode lanes are not sent the blocks that they have, or all"] = documents_table(rows)
    return "\n".join(f"## {title}\n\n{each}" for title, each in tables.items())


def cells_of(*, is_short: bool) -> list[Cell]:
    """Return all cells, in the order of the tables."""
    numbers, num_queries = ((2, 4), NUM_QUERIES // 3) if is_short else (NUMBERS, NUM_QUERIES)
    made = [
        Cell(load, answer, num, num_queries) for load, answer, num in product(("crawler", "anns"), ANSWERS, numbers)
    ]
    return [*made, *(Cell("documents", 0, num, num_queries) for num in ((4,) if is_short else (4, 16)))]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    parser.add_argument("--short", action="store_true", help="2 and 4 engines, a third of the queries")
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="(%(default)s)")
    arguments = parser.parse_args()
    cells, done = cells_of(is_short=arguments.short), dict[Cell, list[Row]]()
    by_size = sorted(cells, key=lambda cell: cell.num_engines)  # so that a run that is cut short has most of it
    rows: list[Row] = []
    with ProcessPoolExecutor(arguments.processes) as pool:
        for cell, of_cell in zip(by_size, pool.map(rows_of, by_size), strict=True):
            done[cell] = of_cell
            rows = [row for each in cells for row in done.get(each, ())]
            if arguments.json:
                write_results(arguments.json, rows, command="make -C bench lanes", short=arguments.short)
            print(f"{cell.load}, {cell.num_answer} tokens, {cell.num_engines} engines", file=sys.stderr, flush=True)
    print(report(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())
