"""Questions of a context that grows, on a real engine: our scheduler, then vLLM's own. Part of sessions.py."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table

from streamrag import AnswerChunk, Pipeline, Prompt, SamplingParams, VllmBackend
from streamrag.core import ModelInfo
from streamrag_bench.measured_engine import EngineClient
from streamrag_bench.summary import percentile
from studies.sessions.arms import BESIDE, CACHED, INSIDE, SESSION, UNCACHED, Asked, StockSession, Text, ask, ask_plain
from studies.sessions.prices import NUM_FIRST, NUM_MORE, QUESTIONS, samples

Row = dict[str, Any]
Done = Callable[[], None]

console = Console(highlight=False, width=None if Console().is_terminal else 120)


class Cycle(NamedTuple):
    """What comes, and what is asked: as tokens, as far as they are new, behind the data, and with all data."""

    lines: Sequence[str]
    question: str
    new: tuple[int, ...]
    tail: tuple[int, ...]
    prompt: tuple[int, ...]


def cycles(model: ModelInfo, num: int) -> Iterator[Cycle]:
    """The first has the hundred samples before it as well."""
    text, lines = Text(model), samples(NUM_FIRST + num * NUM_MORE)
    for number in range(num):
        batch = lines[NUM_FIRST + number * NUM_MORE if number else 0 :][: NUM_MORE if number else NUM_FIRST + NUM_MORE]
        new, question = text.add(batch), QUESTIONS[number % len(QUESTIONS)]
        yield Cycle(batch, question, new, text.tail(question), text.complete(question))


async def plain(backend: VllmBackend, token_ids: tuple[int, ...], params: SamplingParams) -> Asked:
    """A request of its own, with a record of what was computed for it."""

    async def prompts() -> AsyncIterator[Prompt]:
        yield Prompt(token_ids, 0, is_complete=True)

    began_s, first_s, cached = time.monotonic(), 0.0, 0
    ids: list[int] = []
    async for event in backend.generate(prompts(), params):
        if isinstance(event, AnswerChunk):
            first_s = first_s or time.monotonic() - began_s
            ids += event.token_ids
            cached = event.record.num_from_cache if event.record else cached
    return Asked(first_s, time.monotonic() - began_s, len(token_ids), cached, tuple(ids))


async def growing(pipeline: Pipeline, backend: VllmBackend, num_cycles: int, params: SamplingParams, done: Done) -> Row:
    """A session of ours, and plain requests."""
    arms: dict[str, list[Asked]] = {SESSION: [], CACHED: [], UNCACHED: []}
    took_in: list[float] = []
    async with pipeline.session(window_tokens=28_000) as session:
        for cycle in cycles(backend.model, num_cycles):
            began_s = time.monotonic()
            for line in cycle.lines:
                version = await session.append(line)
            await ask(session, f"Warm {version}?", params, at_least=version)
            took_in.append(time.monotonic() - began_s)
            arms[SESSION].append(await ask(session, cycle.question, params))
            done()
    for name in (CACHED, UNCACHED):
        await forgotten(backend)
        for cycle in cycles(backend.model, num_cycles):
            if name == UNCACHED:
                await forgotten(backend)
            arms[name].append(await plain(backend, cycle.prompt, params))
            done()
    assert num_same(arms[CACHED], arms[SESSION]) == num_same(arms[UNCACHED], arms[SESSION]) == num_cycles
    show_growing("A question while the context grows", arms)
    console.print(f"   taking in {NUM_MORE} samples: {1e3 * median(took_in[1:] or took_in):.1f} ms\n")
    return {"arms": plain_values(arms), "took_in_s": took_in}


async def growing_stock(client: EngineClient, model: ModelInfo, num_cycles: int, num_output: int, done: Done) -> Row:
    """vLLM's own sessions; those that are asked inside have all questions and answers in their context."""
    arms: dict[str, list[Asked]] = {CACHED: [], BESIDE: [], INSIDE: []}
    for name, asked in arms.items():
        await client.reset_prefix_cache()
        async with StockSession(client) as stock:
            for cycle in cycles(model, num_cycles):
                if name != CACHED:
                    stock.put(cycle.new)
                    await stock.settled()
                if name == INSIDE:
                    asked.append(await stock.ask(cycle.tail, num_output))
                else:
                    asked.append(await ask_plain(client, name, cycle.prompt, num_output))
                done()
    assert num_same(arms[BESIDE], arms[CACHED]) == num_cycles
    show_growing("The same on vLLM's own scheduler", arms)
    console.print(
        f"   {INSIDE}: {num_same(arms[INSIDE], arms[CACHED])} of {num_cycles} answers are those to the data\n"
    )
    return {"arms": plain_values(arms)}


async def forgotten(backend: VllmBackend) -> None:
    """Nothing is cached."""
    while not await backend.reset_prefix_cache():  # noqa: ASYNC110 - nobody says when a stream is gone
        await asyncio.sleep(0.01)


def num_same(one: Sequence[Asked], other: Sequence[Asked]) -> int:
    """Answers that have the same tokens."""
    return sum(a.token_ids == b.token_ids for a, b in zip(one, other, strict=True))


def plain_values(arms: Mapping[str, Sequence[Asked]]) -> Row:
    return {name: [{k: v for k, v in asdict(a).items() if k != "token_ids"} for a in arms[name]] for name in arms}


def show_growing(title: str, arms: Mapping[str, Sequence[Asked]]) -> None:
    sizes = [a.num_tokens for a in arms[CACHED]]
    table = Table(title=f"{title}: {len(sizes)} questions, {sizes[0]:,} to {sizes[-1]:,} tokens (milliseconds)")
    for column in ("", "P50 first", "P95 first", "P50 last", "P95 last", "longest/shortest", "computed, P50"):
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
        )
    console.print(table)
