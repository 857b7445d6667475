"""Lanes beside as many engines that compute prompts and answers both, in virtual time, with routers and speculation.

    python experiments/lanes_simulated.py [--json FILE] [--short] [--processes N]

Each engine has two H200 (`h200-llama8b-tp2`). The KV of a complete prompt, 128 KiB a token, crosses the links of both
its lanes: one transfer at a time on each link. A decode lane is sent the blocks that it does not have, and begins with
the prompt's last token, as with NIXL. The engines are those of `simulated_lanes.py`, without a scheduler of vLLM's;
`lanes_whole.py` has these, and takes a hundred times as long.

links       lanes for each link, beside engines that do both; routed by `soonest`, nothing is drafted
arms        routers and depths of speculation, for engines that do both, and for lanes with 400 Gb/s
documents   popular documents, which decode lanes find in their prefix caches, or are sent again

"prefill" is the number of prefill lanes: for each link, the best of three splits by the P95 of the last token. Seconds
from the end of retrieval.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path

from lane_play import Layout, Outcome, Way, play, queries_of
from results_file import write_results
from rich.console import Console
from rich.table import Table
from routing.loads import Query, rag
from simulated_lanes import LaneOptions

from streamrag.bench.cell import CellSettings
from streamrag.bench.summary import percentile
from streamrag.bench.workload import fit_contexts, load_trace, make_load, token_budget
from streamrag.engine.costs.profile_files import load_profile

PROFILE = "h200-llama8b-tp2"
KV_BYTES_PER_TOKEN = 131_072
LINKS = {"NVLink": 450e9, "400 Gb/s": 50e9, "100 Gb/s": 12.5e9}
"""Bytes per second."""
LINK = "400 Gb/s"
"""The link of all comparisons but that of links."""
NUMBERS = (2, 4, 8, 16, 32, 64)
RATES = {"crawler": 4.0, "anns": 2.0, "documents": 4.0}
"""Queries a second for each engine."""
ANSWERS = (50, 500)
NUM_QUERIES = 60
"""For each engine."""
ACCEPTANCE = 0.71
"""Of a drafted token whose predecessors were right: Llama 3.1 8B with EAGLE-3, MT-Bench. vLLM's own
`tests/v1/spec_decode/test_acceptance_length.py` expects .7296, .5208 and .3545 up to positions 1, 2 and 3, which is
.73, .71 and .68 for each."""
ARMS = (
    ("soonest", "none"),
    ("round robin", "none"),
    ("random", "none"),
    ("FlowGuard", "none"),
    ("soonest", "fixed 5"),
    ("soonest", "SpecuStream"),
    ("FlowGuard", "SpecuStream"),
)
"""(router, depth of speculation)."""
DOCUMENTS_BUDGET = 8_192

console = Console(highlight=False, width=None if Console().is_terminal else 160)


@dataclass(frozen=True)
class Row:
    """One run. Seconds."""

    load: str
    num_engines: int
    num_answer: int  # 0: the load's own
    way: str  # "both", or the link of lanes
    num_prefill: int  # 0: all do both
    router: str
    rule: str
    reuses: bool
    first_p50_s: float
    first_p95_s: float
    last_p50_s: float
    last_p95_s: float
    per_token_p50_s: float
    per_token_p95_s: float
    sent_share: float  # of the prompts' blocks, those that crossed a link
    accepted_share: float  # of the drafted tokens


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

    def options(self, rule: str) -> LaneOptions:
        budget = DOCUMENTS_BUDGET if self.load == "documents" else token_budget(self.settings())
        return LaneOptions(load_profile(PROFILE), budget, rule, ACCEPTANCE, seed=self.seed)


def run(
    cell: Cell,
    queries: Sequence[Query],
    num_prefill: int,
    link: str = "both",
    *,
    router: str = "soonest",
    rule: str = "none",
    reuses: bool = True,
) -> Row:
    """Play the queries of a cell in one way. `link`: a name of `LINKS`, or "both" for engines that do both."""
    layout: Layout = "both" if link == "both" else "lanes"
    link_bytes_s = LINKS.get(link, 1.0)
    way = Way(layout, cell.num_engines, num_prefill, link_bytes_s, KV_BYTES_PER_TOKEN, router, reuses)
    outcome = play(queries, way, cell.options(rule))
    what = (cell.load, cell.num_engines, cell.num_answer, link, num_prefill, router, rule, reuses)
    return Row(*what, *_figures(outcome))


def _figures(outcome: Outcome) -> Iterator[float]:
    for of in ("first_s", "last_s", "per_token_s"):
        of_queries = [getattr(timing, of) for timing in outcome.timings]
        yield percentile(of_queries, 0.5)
        yield percentile(of_queries, 0.95)
    num_sent = sum(timing.num_sent for timing in outcome.timings)
    yield num_sent / max(num_sent + sum(timing.num_reused for timing in outcome.timings), 1)
    yield outcome.num_right / max(outcome.num_drafted, 1)


def splits(num_engines: int) -> list[int]:
    """Return numbers of prefill lanes: about a quarter, a half and three quarters of the engines."""
    return sorted({min(max(round(num_engines * share), 1), num_engines - 1) for share in (0.25, 0.5, 0.75)})


def best_split(cell: Cell, one: Callable[..., Row], link: str) -> Row:
    """Return the row of the best split of the engines by the P95 of the last token."""
    return min((one(num, link) for num in splits(cell.num_engines)), key=lambda row: row.last_p95_s)


def rows_of(cell: Cell) -> list[Row]:
    """Return all rows of a cell."""
    one = partial(run, cell, cell.queries())
    of_links = [best_split(cell, one, link) for link in LINKS]
    num_prefill = next(row.num_prefill for row in of_links if row.way == LINK)
    if cell.load == "documents":
        resent = [one(row.num_prefill, row.way, reuses=False) for row in of_links]
        return [one(0), *(row for pair in zip(of_links, resent, strict=True) for row in pair)]
    arms = [(router, rule) for router, rule in ARMS if (router, rule) != ARMS[0]]
    return [
        one(0),
        *of_links,
        *(one(0, router=router, rule=rule) for router, rule in arms),
        *(one(num_prefill, LINK, router=router, rule=rule) for router, rule in arms),
    ]


# --------------------------------------------------------------------------------------------------------------- tables


def links_table(rows: Sequence[Row]) -> Table:
    """Return engines that do both, and lanes with each link: seconds, and milliseconds a token after the first."""
    head = ("load", "engines", "answer", "way", "prefill", "first P50", "P95", "last P50", "P95", "ms/token P50", "P95")
    table = Table(*head, title="Lanes and engines that do both; routed by soonest, nothing is drafted")
    for row in rows:
        if row.load != "documents" and (row.router, row.rule) == ARMS[0]:
            table.add_row(*_what(row), row.way, str(row.num_prefill or ""), *_seconds(row))
    return table


def arms_table(rows: Sequence[Row]) -> Table:
    """Return seconds to the first and the last token (P95) and ms/token (P50), a column for each arm."""
    names = [router if rule == "none" else f"{router}, {rule}" for router, rule in ARMS]
    title = f"Routers and speculation: first P95 / last P95, s; ms/token P50. Lanes with {LINK}"
    table = Table("load", "engines", "answer", "way", *names, title=title)
    found = {(row.load, row.num_engines, row.num_answer, row.way, row.router, row.rule): row for row in rows}
    for load, num_engines, num_answer, way in dict.fromkeys(key[:4] for key in found):
        if load != "documents" and way in ("both", LINK):
            of_arms = [found[load, num_engines, num_answer, way, *arm] for arm in ARMS]
            cells = [f"{r.first_p95_s:.2f} / {r.last_p95_s:.2f}; {1e3 * r.per_token_p50_s:.1f}" for r in of_arms]
            table.add_row(load, str(num_engines), str(num_answer), "lanes" if way == LINK else way, *cells)
    return table


def documents_table(rows: Sequence[Row]) -> Table:
    """Return what it brings that a decode lane is not sent the blocks that it has."""
    head = ("engines", "way", "prefill", "sent", "first P50", "P95", "last P50", "P95", "ms/token P50", "P95")
    table = Table(*head, title="Popular documents: blocks that a decode lane has are not sent, or all are")
    for row in rows:
        if row.load == "documents":
            way = row.way if row.reuses else f"{row.way}, all sent"
            sent = f"{row.sent_share:.0%}" if row.num_prefill else ""
            table.add_row(str(row.num_engines), way, str(row.num_prefill or ""), sent, *_seconds(row))
    return table


def _what(row: Row) -> tuple[str, str, str]:
    return row.load, str(row.num_engines), str(row.num_answer)


def _seconds(row: Row) -> Iterator[str]:
    yield from (f"{each:.3f}" for each in (row.first_p50_s, row.first_p95_s, row.last_p50_s, row.last_p95_s))
    yield from (f"{1e3 * each:.1f}" for each in (row.per_token_p50_s, row.per_token_p95_s))


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
                write_results(arguments.json, rows, command="make bench-lanes", short=arguments.short)
            print(f"{cell.load}, {cell.num_answer} tokens, {cell.num_engines} engines", file=sys.stderr, flush=True)
    for table in (links_table(rows), arms_table(rows), documents_table(rows)):
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
