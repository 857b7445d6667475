"""Sending every update of a search, only late ones, or only the last: what is computed in vain, and who waits.

Each load is replayed in virtual time: its updates go through the real `DelayedUpdates`, with the median of the other
queries as the forecast of the end, and what comes out, and when, goes to vLLM's own scheduler with the costs of a
profile. The final context of each query is compared with that of the source itself. The same updates are also put in
the order "stable".

    search      traces/search-python-docs: DiskANN and ranking by words, stretched four times (32 queries)
    anns        the generated load of the paper's search, short gaps at the end
    anns-last   the same with its long gap at the end
"""

import argparse
import asyncio
import json
import statistics
import sys
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamrag import Chunk, DelayedUpdates, Hint, Update, UpdateMode
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.core import SourceEvent
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery, TracedUpdate
from streamrag_bench.cell import CellResult, CellSettings
from streamrag_bench.provenance import versions
from streamrag_bench.simulate import run_cell
from streamrag_bench.trace.generate import LongWindow, generate
from streamrag_bench.trace.statistics import num_common_tokens

ROOT = Path(__file__).resolve().parent.parent
SEARCH = ROOT / "traces" / "search-python-docs.jsonl.gz"
PROFILE = "h200-llama8b-tp2"
BUDGETS = {"anns": 8_192, "anns-last": 8_192}
BUDGET = 2_048
RATES = {"search": (0.5, 8.0), "anns": (0.2, 3.0), "anns-last": (0.2, 3.0)}
"""Queries a second: alone, and on an engine that is busy most of the time."""
ARMS = ("always", "delayed", "last")
LEAD_S = {"search": 0.11, "anns": 0.2, "anns-last": 0.2}
"""About the time of prefilling a whole context."""
MODES = {"rank": UpdateMode(), "stable": UpdateMode("stable")}
NUM_QUERIES = 60
NUM_SEEDS = 1


@dataclass(frozen=True)
class Load:
    """Queries of one kind."""

    name: str
    queries: tuple[TracedQuery, ...]


class Replayed:
    """The updates of one recorded query, when they came."""

    name = "replayed"

    def __init__(self, query: TracedQuery) -> None:
        self._query = query

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        now = asyncio.get_running_loop().time
        began_s = now()
        for event in self._query.events:
            await asyncio.sleep(began_s + event.at_s - now())
            yield Update(tuple(map(as_chunk, chunks_of(event))), event.hint)
        await asyncio.sleep(began_s + self._query.end_s - now())


def chunks_of(event: TracedUpdate | TracedAppend) -> tuple[TracedChunk, ...]:
    return event.chunks if isinstance(event, TracedUpdate) else (event.chunk,)


def as_chunk(chunk: TracedChunk) -> Chunk:
    """Its text is its key, and its title the number of its tokens."""
    return Chunk(chunk.key, chunk.uri, str(chunk.num_tokens), chunk.passage)


def as_traced(chunk: Chunk) -> TracedChunk:
    return TracedChunk(chunk.text, int(chunk.title))


# ------------------------------------------------------------------------------------------------------- the loads


def search() -> Load:
    return Load("search", read_trace(SEARCH).queries)


def generated(name: str, long_window: LongWindow) -> Load:
    return Load(name, generate("anns", NUM_QUERIES, 1, 1.0, long_window=long_window).queries)


# ------------------------------------------------------------------------------------------------------- the arms


def sent(load: Load, arm: str) -> tuple[TracedQuery, ...]:
    """The queries with the updates that this arm sends, when it sends them."""
    if arm == "always":
        return load.queries
    if arm == "last":
        return tuple(map(only_last, load.queries))
    return tuple(run_virtual(delayed(with_forecast(query, load), LEAD_S[load.name])) for query in load.queries)


def only_last(query: TracedQuery) -> TracedQuery:
    last = query.events[-1]
    return replace(query, events=(TracedUpdate(query.end_s, chunks_of(last)),))


def with_forecast(query: TracedQuery, load: Load) -> TracedQuery:
    """With the median of what remained at each update of the other queries."""
    others = [other for other in load.queries if other is not query]
    events = []
    for number, event in enumerate(query.events):
        rest_s = [other.end_s - other.events[number].at_s for other in others if len(other.events) > number]
        events.append(replace(event, hint=Hint(end_s=statistics.median(rest_s)) if rest_s else None))
    return replace(query, events=tuple(events))


async def delayed(query: TracedQuery, lead_s: float) -> TracedQuery:
    now = asyncio.get_running_loop().time
    began_s = now()
    events = []
    async for event in DelayedUpdates(Replayed(query), lead_s, clock=now).stream(query.query_id):
        assert isinstance(event, Update)
        events.append(TracedUpdate(now() - began_s, tuple(map(as_traced, event.chunks)), event.hint))
    return replace(query, events=tuple(events), end_s=max(query.end_s, events[-1].at_s))


def ordered(query: TracedQuery, mode: UpdateMode) -> TracedQuery:
    """The contexts that this mode makes of its updates."""
    context: tuple[Chunk, ...] = ()
    events = []
    for event in query.events:
        context = mode.fold(context, Update(tuple(map(as_chunk, chunks_of(event)))))
        events.append(TracedUpdate(event.at_s, tuple(map(as_traced, context)), event.hint))
    return replace(query, events=tuple(events))


def settings(name: str, qps: float, seed: int) -> CellSettings:
    return CellSettings(
        clock="virtual",
        workload=name,
        arm="streaming",
        qps=qps,
        seed=seed,
        profile=PROFILE,
        max_num_batched_tokens=BUDGETS.get(name, BUDGET),
    )


# ---------------------------------------------------------------------------------------------------- the figures


def keys(query: TracedQuery) -> list[str]:
    return [chunk.key for chunk in chunks_of(query.events[-1])]


def measure(load: Load, arm: str, order: str, qps: float) -> dict[str, Any]:
    cells: list[CellResult] = []
    num_updates = num_shared = num_before = num_moved = 0
    for seed in range(1, NUM_SEEDS + 1):
        queries = sent(load, arm)
        for whole, query in zip(load.queries, queries, strict=True):
            assert keys(query) == keys(whole), f"{arm} changes the final context of {query.query_id}"
        moved = tuple(ordered(query, MODES[order]) for query in queries)
        for before, after in zip(queries, moved, strict=True):
            assert sorted(keys(before)) == sorted(keys(after))
            num_moved += keys(before) != keys(after)
            num_updates += len(after.events)
            for a, b in zip(after.events, after.events[1:], strict=False):
                num_before += sum(chunk.num_tokens for chunk in chunks_of(a))
                num_shared += num_common_tokens(chunks_of(a), chunks_of(b))
        cells.append(run_cell(settings(load.name, qps, seed), trace=Trace(moved)))
    requests = [request for cell in cells for request in cell.requests]
    waits = sorted(request.ttft_after_retrieval_s for request in requests)
    records = [request.record for request in requests if request.record]
    return {
        "load": load.name,
        "qps": qps,
        "arm": arm,
        "order": order,
        "num_queries": len(requests),
        "updates_per_query": num_updates / len(requests),
        "invalidated_per_query": statistics.mean(record.num_invalidated for record in records),
        "computed_per_query": statistics.mean(record.num_computed for record in records),
        "busy_s_per_query": sum(cell.busy_s for cell in cells) / len(requests),
        "busy_share": sum(cell.busy_s for cell in cells) / sum(cell.completion_s for cell in cells),
        "ttft_after_retrieval_s": {
            "mean": statistics.mean(waits),
            "p50": waits[len(waits) // 2],
            "p95": waits[int(0.95 * len(waits))],
        },
        "shared_of_previous": num_shared / num_before if num_before else None,
        "share_reordered": num_moved / len(requests),
        "is_final_context_identical": True,
    }


def displacement(load: Load) -> dict[str, Any]:
    """How far passages stand from their rank in stable order, every update having been sent."""
    moved, is_first, in_top = [], [], []
    for query in load.queries:
        ranked, stable = keys(query), keys(ordered(query, MODES["stable"]))
        moved += [abs(stable.index(key) - rank) for rank, key in enumerate(ranked)]
        is_first.append(ranked[:1] == stable[:1])
        in_top.append(len({*ranked[:5]} & {*stable[:5]}) / max(len(ranked[:5]), 1))
    retrieval_s = [query.end_s for query in load.queries]
    return {
        "load": load.name,
        "num_queries": len(load.queries),
        "retrieval_s": statistics.mean(retrieval_s),
        "places_moved": statistics.mean(moved),
        "share_with_the_best_first": statistics.mean(is_first),
        "share_of_best_five_in_front_five": statistics.mean(in_top),
    }


def print_rows(rows: Sequence[dict[str, Any]], console: Console) -> None:
    names = (
        "load",
        "queries/s",
        "arm",
        "order",
        "updates",
        "invalidated",
        "computed",
        "busy ms",
        "busy",
        "TTFT mean ms",
    )
    table = Table(*names, "p50", "p95", "kept", "moved")
    for row in rows:
        waits = row["ttft_after_retrieval_s"]
        kept = row["shared_of_previous"]
        table.add_row(
            row["load"],
            f"{row['qps']:g}",
            row["arm"],
            row["order"],
            f"{row['updates_per_query']:.2f}",
            f"{row['invalidated_per_query']:,.0f}",
            f"{row['computed_per_query']:,.0f}",
            f"{1e3 * row['busy_s_per_query']:.1f}",
            f"{row['busy_share']:.0%}",
            *(f"{1e3 * waits[name]:.1f}" for name in ("mean", "p50", "p95")),
            "" if kept is None else f"{kept:.0%}",
            f"{row['share_reordered']:.0%}",
        )
    console.print(table)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    parser.add_argument("--only", action="append", choices=tuple(RATES), help="these loads only")
    arguments = parser.parse_args()
    made: dict[str, Callable[[], Load]] = {
        "search": search,
        "anns": lambda: generated("anns", "first"),
        "anns-last": lambda: generated("anns-last", "last"),
    }
    names = arguments.only or [*made]
    console = Console(width=180)
    rows, orders = [], []
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(names) * len(ARMS) * len(MODES) * 2)
        for name in names:
            load = made[name]()
            orders.append(displacement(load))
            for qps in RATES[name]:
                for arm in ARMS:
                    for order in MODES:
                        progress.update(task, description=f"{name}, {qps:g}/s, {arm}, {order}")
                        rows.append(measure(load, arm, order, qps) | {"date": date.today().isoformat()})
                        progress.advance(task)
    print_rows(rows, console)
    for each in orders:
        console.print(*(f"{name}: {value:.2f}" if name != "load" else value for name, value in each.items()), sep="  ")
    if arguments.json:
        as_json = {
            "versions": versions(),
            "profile": PROFILE,
            "num_seeds": NUM_SEEDS,
            "rows": rows,
            "orders": orders,
        }
        arguments.json.write_text(json.dumps(as_json, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
