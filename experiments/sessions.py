"""What a session's questions take while its context grows, and what its data and its watched questions cost.

    python experiments/sessions.py [--tables NAMES] [--cycles N] [--sessions N] [--json FILE] [--model FOLDER]

Tables, after the evaluation of arXiv 2605.13784, on a real engine (`sessions_simulated.py` has the same on GPUs):

growing    100 samples of prices, then cycles of 55 more and one of six questions. The same questions of the same text,
           token for token, asked of a session; as a plain request, on an engine with vLLM's prefix caching; and as one
           that finds nothing cached. The data come before the question does; how long taking them in took is told
           below.
stock      the same on vLLM's own scheduler: a plain request, and vLLM's own streaming sessions (see session_arms.py)
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
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from session_arms import ask
from session_growing import Done, Row, growing, growing_stock
from session_load import QUESTIONS, samples
from session_loads import asked_evenly, asked_while, filled

from streamrag import Pipeline, SamplingParams, VllmBackend, from_passages
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import ModelInfo
from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama
from streamrag_bench.measured_engine import running_engine
from streamrag_bench.summary import percentile

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
    """Two windows' worth of samples go through a small one."""
    rows = []
    for share in SHARES:
        async with pipeline.session(window_tokens=2_000, slide_share=share) as session:
            await filled(session, 65)
            before_s = cpu_s(backend)
            row = await asked_evenly(session, 10, 13.5, 14, PARAMS)
            rows.append({"slide_share": share, "engine_cpu_s": cpu_s(backend) - before_s, **row})
        done()
    table = Table(title="Share of a window of 2,000 tokens that goes at a time; 10 samples and a question a second")
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
        sessions = [  # the same data behind the same text would be one session's KV for all
            await stack.enter_async_context(pipeline.session(system=f"You watch {i}.", window_tokens=2_000))
            for i in range(num_sessions)
        ]
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


TABLES = ("growing", "stock", "ingestion", "window", "flash", "many")


async def measure(model: Path, chosen: Sequence[str], num_cycles: int, num_sessions: int) -> Row:
    backend = VllmBackend(
        model,
        max_model_len=MODEL["max_model_len"],
        dtype="float32",
        kv_cache_bytes=KV_BYTES,
        engine_args={"block_size": BLOCK_SIZE},
    )
    totals = {"growing": 3 * num_cycles, "stock": 3 * num_cycles, "ingestion": len(RATES), "window": len(SHARES)}
    results: Row = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=sum(totals.get(name, 1) for name in chosen))

        def done() -> None:
            progress.advance(task)

        if set(chosen) != {"stock"}:
            async with Pipeline(from_passages(lambda query: []), backend) as pipeline:
                if "growing" in chosen:
                    results["growing"] = await growing(pipeline, backend, num_cycles, PARAMS, done)
                if "ingestion" in chosen:
                    results["ingestion"] = await ingestion(pipeline, done)
                if "window" in chosen:
                    results["window"] = await window(pipeline, backend, done)
                if "flash" in chosen:
                    results["flash"] = await flash(pipeline, done)
                if "many" in chosen:
                    results["many"] = await many(pipeline, num_sessions, done)
        if "stock" in chosen:
            info = ModelInfo(str(model), HuggingFaceTokenizer(model), MODEL["max_model_len"])
            args = {
                "block_size": BLOCK_SIZE,
                "dtype": "float32",
                "kv_cache_memory_bytes": KV_BYTES,
                "max_model_len": info.max_model_len,
            }
            async with running_engine(str(model), args, policy=None) as client:
                results["stock"] = await growing_stock(client, info, num_cycles, NUM_OUTPUT_TOKENS, done)
    return results


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
    load_average = dict.fromkeys(chosen, os.getloadavg()[1])  # of five minutes: times are upper bounds where it is high
    if arguments.json and arguments.json.exists():
        before = json.loads(arguments.json.read_text())
        load_average = before.get("load_average", {}) | load_average
        results = before | results
    results["load_average"] = load_average
    if arguments.json:
        write_atomic(arguments.json, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
