"""Write the tables about drafts and copies into their pages, from the results files, without running anything.

    python experiments/answer_ahead_tables.py

`make bench-ahead`, `bench-ahead-simulated` and `bench-copies` do this at their end.
`tests/experiments/test_answer_ahead_pages.py` compares the pages with the files.
"""

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeAlias

from page_tables import table, with_tables

from streamrag.support.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "experiments" / "results"

WAYS = ("off", "sync", "ahead")
RANKS = ("p50", "p95", "p99")
MOST_WORSE = 0.02
"""The target: no percentile is later than without drafts by a larger share."""
SIMULATED_TARGETS = {"crawler": 3.0, "anns": 2.0, "anns-last": 2.0}
"""How many times sooner the last token should come at P50, at 1 and 2 QPS, with answers of 200 tokens."""

Summary: TypeAlias = Mapping[str, Any]
Loads: TypeAlias = Mapping[str, Summary]


def ratio(row: Summary, name: str, rank: str, over: str = "sync") -> float:
    """Return how many times sooner a token comes than `over`."""
    return float(row[f"{name.partition('_')[0]}_{over}_{rank}"] / max(row[f"{name}_{rank}"], 1e-9))


def worse(row: Summary, over: str) -> Iterator[str]:
    """Yield the percentiles that are more than `MOST_WORSE` worse with drafts than `over`."""
    for name in ("first", "last"):
        for rank in RANKS:
            change = row[f"{name}_ahead_{rank}"] / row[f"{name}_{over}_{rank}"] - 1
            if change > MOST_WORSE:
                yield f"{name} {rank.upper()} {change:+.1%}"


def figure(value: float) -> str:
    """Return a figure with three digits, or with three decimals."""
    return f"{value:#.3g}" if 0.1 <= value < 99.95 else f"{value:.{3 if value < 0.1 else 0}f}"


def triple(row: Summary, name: str) -> str:
    """Return P50, P95 and P99."""
    return " / ".join(figure(row[f"{name}_{rank}"]) for rank in RANKS)


def load_cells(name: str, row: Summary) -> list[str]:
    """Return a load, and how many queries of how many seeds its row is of."""
    return [name, f"{row['num_queries']:,} ({row['num_seeds']})"]


LOAD_HEAD = ["load, simulated", "queries (seeds)"]


def targets_table(found: Loads) -> str:
    """Return the targets and what was reached by drafts of modelled quality."""
    rows = []
    for name, row in found.items():
        workload, qps, *_ = name.split(" ")
        if name == f"{workload} {qps} QPS, 200 tokens" and qps in ("1", "2"):
            least, reached = SIMULATED_TARGETS[workload], ratio(row, "last_ahead", "p50")
            met = "yes" if reached >= least else "**no**"
            rows.append([f"last token at P50, {name}", f"{least:g}x sooner", f"{reached:.2f}x", met])
    modelled = [row for name, row in found.items() if not name.endswith("always right")]
    num_all = 2 * len(RANKS) * len(modelled)
    for over in ("sync", "off"):
        num_worse = sum(len(list(worse(row, over))) for row in modelled)
        met = "**no**" if num_worse else "yes"
        later = f"percentiles over {MOST_WORSE:.0%} later than {over}"
        rows.append([f"{later}, all loads", "none", f"{num_worse} of {num_all}", met])
    return table(["target", "wanted", "reached", "met"], rows)


def ratios_table(found: Loads) -> str:
    """Return seconds to the last token, ratios and bounds."""
    head = [*LOAD_HEAD, "last token, sync", "with drafts", "P50", "P95", "P99", "bound, idle", "bound, decoding"]
    return table(
        head,
        (
            [
                *load_cells(name, row),
                triple(row, "last_sync"),
                triple(row, "last_ahead"),
                *(f"{ratio(row, 'last_ahead', rank):.2f}x" for rank in RANKS),
                *(f"{ratio(row, f'last_bound_{kind}', 'p50'):.1f}x" for kind in ("idle", "decode")),
            ]
            for name, row in found.items()
        ),
    )


def drafts_table(found: Loads) -> str:
    """Return what became of drafts, and what they cost."""
    head = [*LOAD_HEAD, "complete", "drafted", "verified", "accepted", "wasted", "engine time", "idle", "held"]
    return table(
        head,
        (
            [
                *load_cells(name, row),
                f"{row['complete']:.0%}",
                *(
                    f"{row[f'num_{kind}'] / row['num_tokens']:.2f}"
                    for kind in ("drafted", "verified", "accepted", "wasted")
                ),
                f"{row['draft_s'] / row['busy_s_ahead']:.0%}",
                f"{row['idle_share']:.0%}",
                f"{row['held_share']:.0%}",
            ]
            for name, row in found.items()
        ),
    )


def first_table(found: Loads) -> str:
    """Return seconds to the first token in each way, and which percentiles are worse with drafts."""
    head = [*LOAD_HEAD, *(f"first token, {way}" for way in WAYS), "queries with a later last token"]
    head += ["worse than sync", "worse than off"]
    return table(
        head,
        (
            [*load_cells(name, row), *(triple(row, f"first_{way}") for way in WAYS), f"{row['later_share']:.0%}"]
            + [", ".join(worse(row, over)) or "none" for over in ("sync", "off")]
            for name, row in found.items()
        ),
    )


def measured_table(found: Loads) -> str:
    """Return seconds from the end of retrieval, without and with drafts; in bold what misses the target."""
    columns = [(token, percent) for token in ("first", "last") for percent in (50, 95)]
    head = ["retrieval", *(f"{token} token, P{percent}" for token, percent in columns)]
    head += ["bound, last P50", "whole draft right", "same tokens"]

    def cell(row: Summary, token: str, percent: int) -> str:
        before, after = (row[f"{token}_s_p{percent}_{way}"] for way in ("without", "ahead"))
        change = after / before - 1
        return f"{before:.3f}, {after:.3f}" + (f" **{change:+.1%}**" if change > MOST_WORSE else "")

    return table(
        head,
        (
            [name, *(cell(row, *column) for column in columns), f"{row['bound_s']:.2f}"]
            + [f"{row[f'num_{what}']} of {row['num_pairs']}" for what in ("complete", "equal")]
            for name, row in found.items()
        ),
    )


def copies_table(found: Mapping[str, Loads]) -> str:
    """Return what each way to speculate gives, by halves of the answers."""
    head = ["speculation", "answers", "tokens a step", "accepted of verified", "seconds an answer", "ratio"]
    head += ["same tokens"]

    def cells(half: str, way: str, row: Summary) -> Iterator[str]:
        yield from (way, half)
        yield f"{row['tokens_per_step']:.1f}"
        yield f"{row['num_accepted']} of {row['num_verified']}" if row["num_verified"] else ""
        yield f"{row['decode_s_mean']:.2f}"
        yield f"{row['ratio']:.1f}x"
        yield f"{row['num_equal']} of {row['num_answers']}"

    return table(head, ([*cells(half, way, row)] for half, ways in found.items() for way, row in ways.items()))


SIMULATED_TABLES: dict[str, Callable[[Loads], str]] = {
    "targets": targets_table,
    "ratios": ratios_table,
    "drafts": drafts_table,
    "first": first_table,
}


def pages() -> dict[Path, dict[str, str]]:
    """Return the tables of each page by name, from the results files."""
    simulated, measured = (
        json.loads((RESULTS / f"{name}.json").read_text())["loads"]
        for name in ("answer_ahead_simulated", "answer_ahead")
    )
    copies = json.loads((RESULTS / "copies.json").read_text())["halves"]
    return {
        ROOT / "experiments" / "studies" / "answer-ahead.md": {
            name: make(simulated) for name, make in SIMULATED_TABLES.items()
        },
        ROOT / "docs" / "answer-ahead.md": {"measured": measured_table(measured), "copies": copies_table(copies)},
    }


def main() -> None:
    for page, tables in pages().items():
        write_atomic(page, with_tables(page.read_text(), tables))


if __name__ == "__main__":
    main()
