"""What a session's questions take while its context grows, and what its data and its watched questions cost.

    python experiments/sessions.py [--cycles N] [--sessions N] [--json FILE] [--model FOLDER]

Four tables, after the evaluation of arXiv 2605.13784, on a real engine:

1. 100 samples of prices, then cycles of 55 more and one of six questions. The same questions of the same text, token
   for token, asked of a session; as a plain request, on an engine with vLLM's prefix caching; and as one that finds
   nothing cached. The data come before the question does; how long taking them in took is told below.
2. Questions one after the other while data stream in, at several rates.
3. A watched question: how often its answer is there when it is asked for, and in what time.
4. Many sessions on one engine: what each holds.

Random weights unless a model is given: the answers mean nothing, the work is real.
"""

import argparse
import asyncio
import json
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from streamrag import AnswerChunk, Chunk, Pipeline, Prompt, SamplingParams, VllmBackend, from_passages
from streamrag.bench.summary import percentile
from streamrag.files import write_whole
from streamrag.sessions import Session
from streamrag.sessions.buffer import Numbered
from streamrag.sessions.prompts import SESSION_TEMPLATE, SessionPrompts
from streamrag.testing import make_tiny_llama

NUM_FIRST, NUM_MORE = 100, 55
QUESTIONS = (
    "Is the price rising?",
    "Is volatility rising?",
    "What was the highest price of the last ten samples?",
    "Is volume above its mean?",
    "Did the last sample close below its open?",
    "What is the trend over all samples?",
)
RATES = (1, 10, 100)
RATE_S = 10.0
PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 5,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_model_len": 32_768,
}

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass
class Asked:
    """One question: seconds to its first token and to its last, and what it was of."""

    first_s: float
    last_s: float
    num_tokens: int
    num_cached: int
    token_ids: tuple[int, ...] = field(repr=False)


def samples(num: int) -> list[str]:
    """Prices, as in the paper: open, high, low, close, volume."""
    rng = random.Random(0)
    price, lines = 100.0, []
    for i in range(num):
        opened, price = price, price * (1 + rng.gauss(0, 0.002))
        high, low = max(opened, price) * 1.001, min(opened, price) * 0.999
        lines.append(f"{i} {opened:.1f} {high:.1f} {low:.1f} {price:.1f} {rng.randrange(1000, 9000)}")
    return lines


async def ask(session: Session, question: str, **options: Any) -> Asked:
    stream = session.ask(question, params=PARAMS, **options)
    async for _ in stream:
        pass
    answer = stream.result
    cached = answer.record.num_from_cache if answer.record else answer.num_prompt_tokens
    return Asked(answer.timings.ttft_s, answer.timings.total_s, answer.num_prompt_tokens, cached, answer.token_ids)


async def plain(backend: VllmBackend, token_ids: tuple[int, ...]) -> Asked:
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


async def growing(
    pipeline: Pipeline, backend: VllmBackend, num_cycles: int, done: Callable[[], None]
) -> dict[str, Any]:
    """Table 1."""
    lines = samples(NUM_FIRST + num_cycles * NUM_MORE)
    arms: dict[str, list[Asked]] = {"session": [], "plain, prefix cache": [], "plain, nothing cached": []}
    prompts: list[tuple[int, ...]] = []
    took_in: list[float] = []
    data: list[int] = []
    async with pipeline.session(window_tokens=28_000) as session:
        texts = SessionPrompts(backend.model, SESSION_TEMPLATE)
        for cycle in range(num_cycles):
            batch = lines[: NUM_FIRST + NUM_MORE] if cycle == 0 else lines[NUM_FIRST + cycle * NUM_MORE :][:NUM_MORE]
            numbered = [Numbered(len(prompts) + 1, Chunk(line, "")) for line in batch]  # the format has no number in it
            data += [token_id for piece in texts.pieces(numbered) for token_id in piece.token_ids]
            began_s = time.monotonic()
            for line in batch:
                version = await session.append(line)
            await ask(session, f"Warm {cycle}?", at_least=version)
            took_in.append(time.monotonic() - began_s)
            question = QUESTIONS[cycle % len(QUESTIONS)]
            arms["session"].append(await ask(session, question))
            prompts.append(texts.complete(texts.head + tuple(data), question))
            done()
    for name, is_cached in (("plain, prefix cache", True), ("plain, nothing cached", False)):
        await forgotten(backend)
        for token_ids in prompts:
            if not is_cached:
                await forgotten(backend)
            arms[name].append(await plain(backend, token_ids))
            done()
    for name, asked in arms.items():
        same = sum(a.token_ids == b.token_ids for a, b in zip(asked, arms["session"], strict=True))
        assert same == num_cycles, f"{name}: only {same} of {num_cycles} answers are the same"
    table = Table(title="1. A question while the context grows (milliseconds)")
    for column in ("", "P50 first", "P95 first", "P50 last", "P95 last", "longest/shortest context", "computed, P50"):
        table.add_column(column, justify="left" if not column else "right")
    for name, asked in arms.items():
        firsts, lasts = [a.first_s for a in asked], [a.last_s for a in asked]
        third = max(len(asked) // 3, 1)
        ratio = median(firsts[-third:]) / median(firsts[:third])
        table.add_row(
            name,
            *(f"{1e3 * percentile(v, q):.1f}" for v in (firsts, lasts) for q in (0.5, 0.95)),
            f"{ratio:.2f}",
            f"{median(a.num_tokens - a.num_cached for a in asked):,.0f}",
        )
    console.print(table)
    sizes = [a.num_tokens for a in arms["session"]]
    console.print(
        f"   {num_cycles} questions, {sizes[0]:,} to {sizes[-1]:,} tokens, the same answers in all three; "
        f"taking in {NUM_MORE} samples: {1e3 * median(took_in[1:] or took_in):.1f} ms\n"
    )
    return {"arms": {name: [_plain(a) for a in asked] for name, asked in arms.items()}, "took_in_s": took_in}


async def under_load(pipeline: Pipeline, done: Callable[[], None]) -> list[dict[str, Any]]:
    """Table 2."""
    rows = []
    for rate in (0, *RATES):
        async with pipeline.session(window_tokens=8_000) as session:
            for line in samples(200):
                version = await session.append(line)
            await ask(session, "Ready?", at_least=version)
            asked: list[Asked] = []
            stale: list[int] = []
            feeding = asyncio.create_task(feed(session, rate))
            end_s = time.monotonic() + RATE_S
            while time.monotonic() < end_s:
                stale.append(session.state.num_appended - session.state.version)
                asked.append(await ask(session, f"Question {len(asked)}?"))
            feeding.cancel()
            state = session.state
        rows.append(
            {
                "rate": rate,
                "num_asked": len(asked),
                "p50_s": median(a.first_s for a in asked),
                "p99_s": percentile([a.first_s for a in asked], 0.99),
                "stale": median(stale),
                "num_dropped": state.num_dropped,
                "num_slid": state.num_slid,
            }
        )
        done()
    table = Table(title="2. Questions one after the other while data stream in")
    for column in (
        "samples/s",
        "questions",
        "P50 first, ms",
        "P99 first, ms",
        "samples behind, P50",
        "dropped",
        "slid",
    ):
        table.add_column(column, justify="right")
    for row in rows:
        table.add_row(
            str(row["rate"]),
            str(row["num_asked"]),
            f"{1e3 * row['p50_s']:.1f}",
            f"{1e3 * row['p99_s']:.1f}",
            f"{row['stale']:.0f}",
            str(row["num_dropped"]),
            str(row["num_slid"]),
        )
    console.print(table, "")
    return rows


async def feed(session: Session, rate: int) -> None:
    """So many samples a second, until cancelled."""
    lines = samples(2_000)
    began_s, num_sent = time.monotonic(), 0
    while rate:
        await session.append(lines[num_sent % len(lines)])
        num_sent += 1
        await asyncio.sleep(max(began_s + num_sent / rate - time.monotonic(), 0))


async def watched(pipeline: Pipeline, done: Callable[[], None]) -> dict[str, Any]:
    """Table 3."""
    hits: list[float] = []
    misses: list[float] = []
    async with pipeline.session(window_tokens=8_000) as session:
        watches = [session.watch(question, params=PARAMS) for question in QUESTIONS[:5]]
        for cycle, line in enumerate(samples(60)):
            await session.append(line)
            await asyncio.sleep(0.25)
            asked = await ask(session, QUESTIONS[cycle % len(QUESTIONS)])
            is_hit = asked.num_cached == asked.num_tokens
            (hits if is_hit else misses).append(asked.last_s)
        num_ahead = sum(watch.num_answered for watch in watches)
        done()
    console.print(
        f"3. Five of six questions are watched, a sample every 250 ms: {len(hits)} of {len(hits) + len(misses)} were "
        f"answered before they were asked, in {1e3 * median(hits or [0]):.2f} ms; the others took "
        f"{1e3 * median(misses or [0]):.1f} ms to the last token; {num_ahead} answers were computed ahead.\n"
    )
    return {"hits_s": hits, "misses_s": misses, "num_ahead": num_ahead}


async def many(pipeline: Pipeline, num_sessions: int, done: Callable[[], None]) -> dict[str, Any]:
    """Table 4."""
    lines = samples(50)
    async with AsyncExitStack() as stack:
        before = resident_bytes()
        sessions = [await stack.enter_async_context(pipeline.session(window_tokens=2_000)) for _ in range(num_sessions)]
        for line in lines:
            for session in sessions:
                await session.append(line)
        began_s = time.monotonic()
        await asyncio.gather(*(ask(session, "Ready?", at_least=len(lines)) for session in sessions))
        ready_s = time.monotonic() - began_s
        took = [await ask(session, QUESTIONS[0]) for session in sessions]
        held = (resident_bytes() - before) / num_sessions
        done()
    console.print(
        f"4. {num_sessions} sessions of {took[0].num_tokens:,} tokens on one engine: all stood after {ready_s:.1f} s; "
        f"a question takes {1e3 * median(a.first_s for a in took):.1f} ms to its first token (P50), "
        f"{1e3 * percentile([a.first_s for a in took], 0.99):.1f} (P99); {held / 1024:.0f} KiB each in this process.\n"
    )
    return {"num": num_sessions, "ready_s": ready_s, "first_s": [a.first_s for a in took], "bytes_each": held}


def resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def _plain(asked: Asked) -> dict[str, Any]:
    values = asdict(asked)
    del values["token_ids"]
    return values


async def forgotten(backend: VllmBackend) -> None:
    while not await backend.reset_prefix_cache():  # noqa: ASYNC110 - nobody says when a stream is gone
        await asyncio.sleep(0.01)


async def measure(model: Path, num_cycles: int, num_sessions: int) -> dict[str, Any]:
    backend = VllmBackend(
        model,
        max_model_len=MODEL["max_model_len"],
        dtype="float32",
        kv_cache_bytes=2 << 30,
        engine_args={"block_size": 32},
    )
    results: dict[str, Any] = {}
    with Progress(console=Console(stderr=True)) as progress:
        task = progress.add_task("measuring", total=3 * num_cycles + len(RATES) + 3)

        def done() -> None:
            progress.advance(task)

        async with Pipeline(from_passages(lambda query: []), backend) as pipeline:
            results["growing"] = await growing(pipeline, backend, num_cycles, done)
            results["under_load"] = await under_load(pipeline, done)
            results["watched"] = await watched(pipeline, done)
            results["many"] = await many(pipeline, num_sessions, done)
    return results


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=15, metavar="N", help="default: %(default)s")
    parser.add_argument("--sessions", type=int, default=100, metavar="N", help="default: %(default)s")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="in place of one with random weights")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make_tiny_llama(Path(folder) / "model", **MODEL)
        results = asyncio.run(measure(model, arguments.cycles, arguments.sessions))
    if arguments.json:
        write_whole(arguments.json, json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
