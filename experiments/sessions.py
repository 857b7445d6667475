"""What a session's questions take while its context grows, and what its data and its watched questions cost.

    python experiments/sessions.py [--tables NAMES] [--cycles N] [--sessions N] [--json FILE] [--model FOLDER]

Tables, after the evaluation of arXiv 2605.13784, on a real engine (`sessions_simulated.py` has the same on GPUs):

growing    100 samples of prices, then cycles of 55 more and one of six questions. The same questions of the same text,
           token for token, asked of a session; as a plain request, on an engine with vLLM's prefix caching; as one that
           finds nothing cached; and of vLLM's own streaming sessions, on vLLM's own scheduler (see session_arms.py).
           The data come before the question does; how long taking them in took is told below.
ingestion  questions one after the other while data stream in, at several rates, up to more than can be taken in
window     share of the window that goes at a time
flash      watched questions: how often the answer is there when it is asked for, and in what time
many       many sessions on one engine: what each holds

Random weights unless a model is given: the answers mean nothing, the work is real. With `--tables` the figures of the
others stay in the file.
"""

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from session_arms import BESIDE, CACHED, INSIDE, SESSION, UNCACHED, Asked, StockSession, Text, ask, ask_plain
from session_load import NUM_FIRST, NUM_MORE, QUESTIONS, samples
from session_loads import Row, asked_evenly, asked_while, filled

from streamrag import AnswerChunk, Pipeline, Prompt, SamplingParams, VllmBackend, from_passages
from streamrag.backends.vllm.client.measured import running_engine
from streamrag.bench.summary import percentile
from streamrag.files import write_whole
from streamrag.testing import make_tiny_llama

RATES = (0, 1, 10, 100, 1_000)
RATE_S = 10.0
MAX_WAITING = 1_024
SHARES = (0.1, 0.25, 0.5, 0.75)
NUM_OUTPUT_TOKENS = 8
PARAMS = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
BLOCK_SIZE, KV_BYTES = 32, 2 << 30
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 5,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_model_len": 32_768,
}

console = Console(highlight=False, width=None if Console().is_terminal else 120)
Done = Callable[[], None]


@dataclass(frozen=True)
class Cycle:
    """What comes, and what is asked, as tokens."""

    new: tuple[int, ...]
    tail: tuple[int, ...]
    prompt: tuple[int, ...]


def of_cycle(number: int) -> list[str]:
    """Its samples; the first has the hundred before it as well."""
    lines = samples(NUM_FIRST + (number + 1) * NUM_MORE)
    return lines[NUM_FIRST + number * NUM_MORE if number else 0 :]


async def plain(backend: VllmBackend, token_ids: tuple[int, ...]) -> Asked:
    """A request of its own, with a record of what was computed for it."""

    async def prompts() -> AsyncIterator[Prompt]:
        yield Prompt(token_ids, 0, is_complete=True)

    began_s, first_s, cached = time.monotonic(), 0.0, 0
    ids: list[int] = []
    async for event in backend.generate(prompts(), PARAMS):
        if isinstance(event, AnswerChunk):
            first_s = first_s or time.monotonic() - began_s
            ids += event.token_ids
            cached = event.record.num_from_cache if event.record else cached
    return Asked(first_s, time.monotonic() - began_s, len(token_ids), cached, tuple(ids))


async def growing(pipeline: Pipeline, backend: VllmBackend, num_cycles: int, done: Done) -> tuple[Row, list[Cycle]]:
    """The arms on our scheduler."""
    arms: dict[str, list[Asked]] = {SESSION: [], CACHED: [], UNCACHED: []}
    cycles: list[Cycle] = []
    took_in: list[float] = []
    text = Text(backend.model)
    async with pipeline.session(window_tokens=28_000) as session:
        for number in range(num_cycles):
            new, began_s = text.add(of_cycle(number)), time.monotonic()
            for line in of_cycle(number):
                version = await session.append(line)
            await ask(session, f"Warm {number}?", PARAMS, at_least=version)
            took_in.append(time.monotonic() - began_s)
            question = QUESTIONS[number % len(QUESTIONS)]
            arms[SESSION].append(await ask(session, question, PARAMS))
            cycles.append(Cycle(new, text.tail(question), text.complete(question)))
            done()
    for name in (CACHED, UNCACHED):
        await forgotten(backend)
        for cycle in cycles:
            if name == UNCACHED:
                await forgotten(backend)
            arms[name].append(await plain(backend, cycle.prompt))
            done()
    return {"arms": arms, "took_in_s": took_in}, cycles


async def growing_stock(model: Path, cycles: Sequence[Cycle], done: Done) -> dict[str, list[Asked]]:
    """The arms on vLLM's own scheduler, an engine of its own; of the first, contexts have all questions and answers."""
    args = {
        "max_model_len": MODEL["max_model_len"],
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": KV_BYTES,
        "enable_logging_iteration_details": False,
    }
    arms: dict[str, list[Asked]] = {INSIDE: [], BESIDE: []}
    async with running_engine(str(model), args, policy=None) as client:
        for name, asked in arms.items():
            await client.reset_prefix_cache()
            async with StockSession(client) as stock:
                for cycle in cycles:
                    stock.put(cycle.new)
                    await stock.settled()
                    if name == INSIDE:
                        asked.append(await stock.ask(cycle.tail, NUM_OUTPUT_TOKENS))
                    else:
                        asked.append(await ask_plain(client, name, cycle.prompt, NUM_OUTPUT_TOKENS))
                    done()
    return arms


def show_growing(arms: dict[str, list[Asked]], took_in_s: Sequence[float]) -> None:
    table = Table(title="A question while the context grows (milliseconds)")
    for column in ("", "P50 first", "P95 first", "P50 last", "P95 last", "longest/shortest", "computed, P50", "same"):
        table.add_column(column, justify="left" if not column else "right")
    for name, asked in arms.items():
        firsts, lasts = [a.first_s for a in asked], [a.last_s for a in asked]
        third = max(len(asked) // 3, 1)
        computed = [a.num_tokens - a.num_cached for a in asked if a.num_cached is not None]
        table.add_row(
            name,
            *(f"{1e3 * percentile(v, q):.1f}" for v in (firsts, lasts) for q in (0.5, 0.95)),
            f"{median(firsts[-third:]) / median(firsts[:third]):.2f}",
            f"{median(computed):,.0f}" if computed else "",
            f"{num_same(asked, arms[SESSION])} of {len(asked)}",
        )
    console.print(table)
    sizes = [a.num_tokens for a in arms[SESSION]]
    console.print(
        f"   {len(sizes)} questions, {sizes[0]:,} to {sizes[-1]:,} tokens; same: answers with the session's tokens; "
        f"taking in {NUM_MORE} samples: {1e3 * median(took_in_s[1:] or took_in_s):.1f} ms\n"
    )
    for name in set(arms) - {INSIDE}:
        assert num_same(arms[name], arms[SESSION]) == len(sizes), f"{name}: not the same answers"


def num_same(one: Sequence[Asked], other: Sequence[Asked]) -> int:
    return sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True))


async def ingestion(pipeline: Pipeline, done: Done) -> list[Row]:
    rows = []
    for rate in RATES:
        async with pipeline.session(window_tokens=8_000, max_waiting=MAX_WAITING) as session:
            await filled(session, 200)
            rows.append(await asked_while(session, rate, RATE_S, PARAMS))
        done()
    table = Table(title=f"Questions one after the other while data stream in, {RATE_S:g} s")
    for column in ("samples/s", "questions", "P50 first, ms", "P99", "behind P50", "P99, ms", "dropped", "slid"):
        table.add_column(column, justify="right")
    for row in rows:
        times = (f"{1e3 * row[key]:.1f}" for key in ("p50_first_s", "p99_first_s"))
        late = (f"{row['p50_behind']:.0f}", f"{1e3 * row['p99_behind_s']:.0f}")
        counts = (f"{row['num_dropped']} of {row['num_appended']}", str(row["num_slid"]))
        table.add_row(str(row["rate"]), str(row["num_asked"]), *times, *late, *counts)
    console.print(table, "")
    return rows


async def window(pipeline: Pipeline, backend: VllmBackend, done: Done) -> list[Row]:
    """A window of 4,000 tokens, which 270 samples go through, 20 a second."""
    rows = []
    for share in SHARES:
        async with pipeline.session(window_tokens=4_000, slide_share=share) as session:
            await filled(session, 130)
            before_s = cpu_s(backend)
            row = await asked_evenly(session, 20, 13.5, 40, PARAMS)
            rows.append({"slide_share": share, "engine_cpu_s": cpu_s(backend) - before_s, **row})
        done()
    table = Table(title="Share of a window of 4,000 tokens that goes at a time; 20 samples a second, 3 questions")
    for column in ("slide_share", "engine's CPU s", "tokens kept", "P50 first, ms", "P99", "behind P99, ms", "slid"):
        table.add_column(column, justify="right")
    for row in rows:
        times = (f"{1e3 * row[key]:.1f}" for key in ("p50_first_s", "p99_first_s", "p99_behind_s"))
        kept = (f"{row['engine_cpu_s']:.1f}", f"{row['mean_tokens']:,.0f}")
        table.add_row(f"{row['slide_share']:g}", *kept, *times, str(row["num_slid"]))
    console.print(table, "")
    return rows


def cpu_s(backend: VllmBackend) -> float:
    """Of the engine's process, so far, all threads."""
    used = 0
    for pid in backend.process_ids:
        behind_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        used += int(behind_name[11]) + int(behind_name[12])
    return used / os.sysconf("SC_CLK_TCK")


async def flash(pipeline: Pipeline, done: Done) -> Row:
    hits: list[float] = []
    misses: list[float] = []
    async with pipeline.session(window_tokens=8_000) as session:
        watches = [session.watch(question, params=PARAMS) for question in QUESTIONS[:5]]
        for cycle, line in enumerate(samples(60)):
            await session.append(line)
            await asyncio.sleep(0.25)
            asked = await ask(session, QUESTIONS[cycle % len(QUESTIONS)], PARAMS)
            (hits if asked.num_cached == asked.num_tokens else misses).append(asked.last_s)
        num_ahead = sum(watch.num_answered for watch in watches)
        done()
    console.print(
        f"Five of six questions are watched, a sample every 250 ms: {len(hits)} of {len(hits) + len(misses)} were "
        f"answered before they were asked, in {1e3 * median(hits or [0]):.2f} ms; the others took "
        f"{1e3 * median(misses or [0]):.1f} ms to the last token; {num_ahead} answers were computed ahead.\n"
    )
    return {"hits_s": hits, "misses_s": misses, "num_ahead": num_ahead}


async def many(pipeline: Pipeline, num_sessions: int, done: Done) -> Row:
    lines = samples(50)
    async with AsyncExitStack() as stack:
        before = resident_bytes()
        sessions = [await stack.enter_async_context(pipeline.session(window_tokens=2_000)) for _ in range(num_sessions)]
        for line in lines:
            for session in sessions:
                await session.append(line)
        began_s = time.monotonic()
        await asyncio.gather(*(ask(session, "Ready?", PARAMS, at_least=len(lines)) for session in sessions))
        ready_s = time.monotonic() - began_s
        took = [await ask(session, QUESTIONS[0], PARAMS) for session in sessions]
        held = (resident_bytes() - before) / num_sessions
        done()
    console.print(
        f"{num_sessions} sessions of {took[0].num_tokens:,} tokens on one engine: all stood after {ready_s:.1f} s; "
        f"a question takes {1e3 * median(a.first_s for a in took):.1f} ms to its first token (P50), "
        f"{1e3 * percentile([a.first_s for a in took], 0.99):.1f} (P99); {held / 1024:.0f} KiB each in this process.\n"
    )
    return {"num": num_sessions, "ready_s": ready_s, "first_s": [a.first_s for a in took], "bytes_each": held}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def forgotten(backend: VllmBackend) -> None:
    while not await backend.reset_prefix_cache():  # noqa: ASYNC110 - nobody says when a stream is gone
        await asyncio.sleep(0.01)


TABLES = ("growing", "ingestion", "window", "flash", "many")


async def measure(model: Path, chosen: Sequence[str], num_cycles: int, num_sessions: int) -> Row:
    backend = VllmBackend(
        model,
        max_model_len=MODEL["max_model_len"],
        dtype="float32",
        kv_cache_bytes=KV_BYTES,
        engine_args={"block_size": BLOCK_SIZE},
    )
    totals = {"growing": 5 * num_cycles, "ingestion": len(RATES), "window": len(SHARES), "flash": 1, "many": 1}
    results: Row = {}
    cycles: list[Cycle] = []
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=sum(totals[name] for name in chosen))

        def done() -> None:
            progress.advance(task)

        async with Pipeline(from_passages(lambda query: []), backend) as pipeline:
            if "growing" in chosen:
                results["growing"], cycles = await growing(pipeline, backend, num_cycles, done)
            if "ingestion" in chosen:
                results["ingestion"] = await ingestion(pipeline, done)
            if "window" in chosen:
                results["window"] = await window(pipeline, backend, done)
            if "flash" in chosen:
                results["flash"] = await flash(pipeline, done)
            if "many" in chosen:
                results["many"] = await many(pipeline, num_sessions, done)
        if cycles:
            found = results["growing"]
            found["arms"] |= await growing_stock(model, cycles, done)
            show_growing(found["arms"], found["took_in_s"])
            found["arms"] = {name: [_plain(a) for a in asked] for name, asked in found["arms"].items()}
    return results


def _plain(asked: Asked) -> Row:
    return {name: value for name, value in asdict(asked).items() if name != "token_ids"}


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = ",".join(TABLES)
    parser.add_argument("--tables", default=every, metavar="NAMES", help="which; default: %(default)s")
    parser.add_argument("--cycles", type=int, default=15, metavar="N", help="default: %(default)s")
    parser.add_argument("--sessions", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="in place of one with random weights")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args(argv)
    chosen = arguments.tables.split(",")
    if unknown := set(chosen) - set(TABLES):
        parser.error(f"--tables: there is no {', '.join(sorted(unknown))}; choose from {every}")
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make_tiny_llama(Path(folder) / "model", **MODEL)
        results = asyncio.run(measure(model, chosen, arguments.cycles, arguments.sessions))
    if arguments.json:
        before = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        kept = {name: figures for name, figures in before.items() if name in TABLES}
        write_whole(arguments.json, json.dumps({**kept, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
