"""Sending every update, the last one only, or those that are worth it: what is computed in vain, and who waits.

Each load is replayed in virtual time: its updates go through the real `SelectiveUpdates`, calibrated on other queries
of the same kind, and what comes out, and when, goes to vLLM's own scheduler with the costs of a profile. The final
context of each query is compared with that of the source itself. The same updates are also put in the order "stable".

    search      traces/search-python-docs: DiskANN and ranking by words, stretched four times (32 queries, two halves,
                each calibrated on the other)
    anns        the generated load of the paper's search, short gaps at the end
    anns-last   the same with its long gap at the end
    docs        searches in this repository's documentation, recorded live: VectorSource, real embeddings; asked are
                sentences of its passages, and calibrated on are others (--index)
    ranked      the same, each stage ranked again by words (--index)
    hybrid      the same documentation, by keywords, vectors and late interaction, recorded live: a HybridSource as it
                is, slow because reranking is; asked are 40 questions that people might ask, and calibrated is as
                `streamrag index calibrate --rerank late-interaction` does it (--index)
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from documentation_questions import QUESTIONS
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamrag import (
    Calibration,
    Chunk,
    Hint,
    HybridSource,
    SelectiveUpdates,
    Source,
    Startable,
    Update,
    UpdateMode,
    VectorSource,
    calibrate,
)
from streamrag.bench.cell import CellResult, CellSettings
from streamrag.bench.provenance import versions
from streamrag.bench.report.calibration_picture import draw_calibration
from streamrag.bench.simulate import run_cell
from streamrag.bench.virtual_time import run_virtual
from streamrag.core import SourceEvent
from streamrag.sources.emission.calibration_queries import LeaveOneOut, draw_sentences
from streamrag.sources.emission.selective_updates import estimate_tokens
from streamrag.support.files import write_atomic
from streamrag.trace.generate import LongWindow, generate
from streamrag.trace.read import read_trace
from streamrag.trace.statistics import num_common_tokens
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery, TracedUpdate

ROOT = Path(__file__).resolve().parent.parent
SEARCH = ROOT / "traces" / "search-python-docs.jsonl.gz"
PROFILE = "h200-llama8b-tp2"
BUDGETS = {"anns": 8_192, "anns-last": 8_192}
BUDGET = 2_048
RATES = {
    "search": (0.5, 8.0),
    "anns": (0.2, 3.0),
    "anns-last": (0.2, 3.0),
    "docs": (0.5, 20.0),
    "ranked": (0.5, 20.0),
    "hybrid": (0.5, 20.0),
}
"""Queries a second: alone, and on an engine that is busy most of the time."""
ARMS = ("always", "last", "worth, whole", "worth")
MODES = {"rank": UpdateMode(), "stable": UpdateMode("stable")}
NUM_QUERIES = 60
NUM_SEEDS = 1
K = 10
NUM_CANDIDATES = 40
SENT: dict[tuple[str, str, float, int], tuple[TracedQuery, ...]] = {}
"""What has been worked out, for the other order."""


@dataclass(frozen=True)
class Load:
    """Queries, and for each the calibration that its updates are sent by."""

    name: str
    queries: tuple[tuple[TracedQuery, Calibration], ...]


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


class ReplayedAll:
    """Whichever query is asked for, by its id."""

    name = "replayed"

    def __init__(self, queries: Sequence[TracedQuery]) -> None:
        self._queries = {query.query_id: query for query in queries}

    def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        return Replayed(self._queries[query]).stream(query)


def chunks_of(event: TracedUpdate | TracedAppend) -> tuple[TracedChunk, ...]:
    return event.chunks if isinstance(event, TracedUpdate) else (event.chunk,)


def as_chunk(chunk: TracedChunk) -> Chunk:
    """Its text is its key, and its title the number of its tokens."""
    return Chunk(chunk.key, chunk.uri, str(chunk.num_tokens), chunk.passage)


def as_traced(chunk: Chunk) -> TracedChunk:
    return TracedChunk(chunk.text, int(chunk.title))


# ------------------------------------------------------------------------------------------------------- the loads


def calibrated(queries: Sequence[TracedQuery]) -> Calibration:
    """In virtual time: as if these queries had been asked."""

    async def ask() -> Calibration:
        source = ReplayedAll(queries)
        now = asyncio.get_running_loop().time
        return await calibrate(source, [query.query_id for query in queries], clock=now)

    return run_virtual(ask())


def search() -> Load:
    return halves("search", read_trace(SEARCH).queries)


def halves(name: str, queries: Sequence[TracedQuery]) -> Load:
    even, odd = calibrated(queries[::2]), calibrated(queries[1::2])
    return Load(name, tuple((query, odd if number % 2 == 0 else even) for number, query in enumerate(queries)))


def generated(name: str, long_window: LongWindow) -> Load:
    asked, others = (
        [counting_down(q) for q in generate("anns", NUM_QUERIES, seed, 1.0, long_window=long_window).queries]
        for seed in (1, 2)
    )
    calibration = calibrated(others)
    return Load(name, tuple((query, calibration) for query in asked))


def counting_down(query: TracedQuery) -> TracedQuery:
    """With hints: as if each search had 26 stages, the most that any has, and changed nothing in the last ones."""
    events = tuple(replace(each, hint=Hint(num_chunks=25 - number)) for number, each in enumerate(query.events))
    return replace(query, events=events)


async def live(name: str, index: Path, progress: Progress) -> tuple[Load, int]:
    """Searches as they are, and in how many `SelectiveUpdates` gave another final context, live, which must be none."""
    from record_traces import Reranked

    def opened(k: int) -> Source:
        if name == "docs":
            return VectorSource(index, k=k)
        if name == "hybrid":
            return HybridSource(index, k=k, candidates=NUM_CANDIDATES, reranker="late-interaction")
        return Reranked([VectorSource(index, k=num, ladder=(2 * num,)) for num in (K, 2 * K, 4 * K, 8 * K)], K)

    source, places = opened(K), draw_sentences(index, NUM_QUERIES, 1)
    asked, searched = [*draw_sentences(index, NUM_QUERIES, 2)], source
    if name == "hybrid":
        asked, searched = [*QUESTIONS], LeaveOneOut(opened(K + 1), places, K)
    task = progress.add_task(f"{name}: searching", total=len(places) + 2 * len(asked))
    async with started(searched):
        calibration = await calibrate(searched, [*places], on_progress=lambda *_: progress.advance(task))
    async with started(source):
        held = SelectiveUpdates(source, calibration, PROFILE)
        queries, num_others = [], 0
        for number, text in enumerate(asked):
            query = await recorded(source, f"{name}-{number}", text)
            again = await recorded(held, f"{name}-{number}", text)
            num_others += keys(query) != keys(again)
            queries.append((query, calibration))
            progress.advance(task, 2)
    progress.remove_task(task)
    return Load(name, tuple(queries)), num_others


@asynccontextmanager
async def started(source: Source) -> AsyncIterator[None]:
    assert isinstance(source, Startable)
    await source.start(lambda line: None)
    try:
        yield
    finally:
        await source.aclose()


async def recorded(source: Source, query_id: str, text: str) -> TracedQuery:
    began_s = time.perf_counter()
    events = []
    async for event in source.stream(text):
        assert isinstance(event, Update)
        chunks = tuple(TracedChunk(chunk.text, estimate_tokens(chunk)) for chunk in event.chunks)
        events.append(TracedUpdate(time.perf_counter() - began_s, chunks, event.hint))
    return TracedQuery(query_id, 0.0, text, tuple(events), time.perf_counter() - began_s)


# ------------------------------------------------------------------------------------------------------- the arms


def sent(load: Load, arm: str, qps: float, seed: int) -> tuple[TracedQuery, ...]:
    """The queries with the updates that this arm sends, when it sends them."""
    if arm == "always":
        return tuple(query for query, _ in load.queries)
    if arm == "last":
        return tuple(only_last(query) for query, _ in load.queries)
    key = load.name, arm, qps, seed
    if key not in SENT:
        SENT[key] = run_virtual(_sent(load, arm == "worth, whole", qps, seed))
    return SENT[key]


def only_last(query: TracedQuery) -> TracedQuery:
    last = query.events[-1]
    return replace(query, events=(TracedUpdate(query.end_s, chunks_of(last)),))


async def _sent(load: Load, is_whole: bool, qps: float, seed: int) -> tuple[TracedQuery, ...]:
    """All of them together, as they arrive: a source counts how many of its retrievals run at once."""
    from streamrag.bench.workload import make_load

    loop = asyncio.get_running_loop()
    trace = Trace(tuple(query for query, _ in load.queries))
    arrivals = {q.query_id: q.arrival_s for q in make_load(settings(load.name, qps, seed), trace)}
    sources: dict[int, SelectiveUpdates] = {}
    for _, calibration in load.queries:
        sources.setdefault(
            id(calibration),
            SelectiveUpdates(
                ReplayedAll(trace.queries),
                calibration,
                PROFILE,
                max_num_batched_tokens=BUDGETS.get(load.name, BUDGET),
                others=lambda: sum(each.num_streams for each in sources.values()) - 1,
                whole_only=is_whole,
                count_tokens=lambda chunk: int(chunk.title),
                clock=loop.time,
            ),
        )

    async def ask(query: TracedQuery, source: Source) -> TracedQuery:
        await asyncio.sleep(arrivals[query.query_id])
        began_s = loop.time()
        events = []
        async for event in source.stream(query.query_id):
            assert isinstance(event, Update)
            events.append(TracedUpdate(loop.time() - began_s, tuple(map(as_traced, event.chunks)), event.hint))
        return replace(query, events=tuple(events), end_s=max(query.end_s, events[-1].at_s))

    async with asyncio.TaskGroup() as tasks:
        asked = [tasks.create_task(ask(query, sources[id(calibration)])) for query, calibration in load.queries]
    return tuple(task.result() for task in asked)


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
        queries = sent(load, arm, qps, seed)
        for (whole, _), query in zip(load.queries, queries, strict=True):
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
    for query, _ in load.queries:
        ranked, stable = keys(query), keys(ordered(query, MODES["stable"]))
        moved += [abs(stable.index(key) - rank) for rank, key in enumerate(ranked)]
        is_first.append(ranked[:1] == stable[:1])
        in_top.append(len({*ranked[:5]} & {*stable[:5]}) / max(len(ranked[:5]), 1))
    retrieval_s = [query.end_s for query, _ in load.queries]
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
    parser.add_argument("--plot", type=Path, metavar="PNG", help="where to draw the calibration of the trace")
    parser.add_argument("--index", type=Path, metavar="INDEX", help="of the documentation, for live searches")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="of the loads that are done, for the next run")
    parser.add_argument("--only", action="append", choices=tuple(RATES), help="these loads only")
    arguments = parser.parse_args()
    made: dict[str, Callable[[], Load]] = {
        "search": search,
        "anns": lambda: generated("anns", "first"),
        "anns-last": lambda: generated("anns-last", "last"),
    }
    searched = ("docs", "ranked", "hybrid") if arguments.index else ()
    names = [name for name in arguments.only or (*made, *searched) if name in made or name in searched]
    console = Console(width=180)
    rows, orders = [], []
    columns = (TextColumn("{task.description:28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(names) * len(ARMS) * len(MODES) * 2)
        for name in names:
            kept = arguments.keep / f"{name}.json" if arguments.keep else None
            if kept and kept.exists():
                measured = json.loads(kept.read_text())
                rows += measured["rows"]
                orders.append(measured["order"])
                progress.advance(task, len(measured["rows"]))
                continue
            if name in made:
                load = made[name]()
            else:
                load, num_others = asyncio.run(live(name, arguments.index, progress))
                assert num_others == 0, f"{num_others} of {len(load.queries)} live searches had another final context"
            orders.append(displacement(load))
            of_load = []
            for qps in RATES[name]:
                for arm in ARMS:
                    for order in MODES:
                        progress.update(task, description=f"{name}, {qps:g}/s, {arm}, {order}")
                        of_load.append(measure(load, arm, order, qps) | {"date": date.today().isoformat()})
                        progress.advance(task)
            rows += of_load
            if kept:
                kept.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(kept, json.dumps({"rows": of_load, "order": orders[-1]}))
    print_rows(rows, console)
    for each in orders:
        console.print(*(f"{name}: {value:.2f}" if name != "load" else value for name, value in each.items()), sep="  ")
    if arguments.plot:
        draw_calibration(arguments.plot, calibrated(read_trace(SEARCH).queries))
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
