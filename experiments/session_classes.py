"""What request classes, clamped steps, a budget and grouped prefill do to sessions and to the queries beside them.

    python experiments/session_classes.py [--seconds N] [--json FILE]

In virtual time, on the profile of two H200 with an 8B model. Twelve sessions of 8,000 tokens get 64 tokens of data a
second, are asked a question every few seconds, and have two watched questions answered after each second's data; beside
them plain queries of 6,000 tokens come at four rates, of which 10 a second is a little more than the engine can do.
What is told: seconds to the first token of what users ask, of what is answered ahead and of the queries, and how old
the oldest data are that are not computed when somebody asks.

Then what grouped prefill saves, by the tokens that are computed.
"""

import argparse
import asyncio
import json
import os
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from streamrag.backends.simulated.client import SimulatedClient, by_parts, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.core import RequestClass
from streamrag.engine.costs.profile_files import load_profile
from streamrag.support.files import write_atomic
from streamrag_bench.summary import percentile

PROFILE = load_profile("h200-llama8b-tp2")
NUM_SESSIONS, NUM_FIRST, NUM_MORE = 12, 8_000, 64
ASK_EVERY_S, NUM_ANSWER = 3.0, 16
WATCHED = 2
NUM_QUERY, NUM_QUERY_ANSWER = 6_000, 64
RATES = (5.0, 8.0, 10.0, 14.0)
WAYS: Mapping[str, dict[str, Any]] = {
    "no classes": {"class_ageing_s": None},
    "no classes, fcfs": {"class_ageing_s": None, "policy": "fcfs"},
    "1 s apart": {"class_ageing_s": 1.0},
    "4 s apart": {},
    "30 s apart": {"class_ageing_s": 30.0},
    "4 s, max_data_tokens": {"max_data_tokens": 1_024},
    "4 s, kv_budget": {"kv_budget": 0.5},
}

console = Console(highlight=False, width=None if Console().is_terminal else 140)


@dataclass
class Seen:
    """In seconds."""

    asked: list[float] = field(default_factory=list)
    ahead: list[float] = field(default_factory=list)
    queries: list[float] = field(default_factory=list)
    lags: list[float] = field(default_factory=list)
    """When somebody asks, the age of the oldest data that are not computed."""


def client_of(options: Mapping[str, Any], kv_tokens: int | None = None) -> SimulatedClient:
    shape = EngineShape(
        num_blocks=(kv_tokens or PROFILE.kv_tokens) // PROFILE.block_size,
        block_size=PROFILE.block_size,
        max_num_batched_tokens=8_192,
        is_async=PROFILE.is_async,
        streamrag={"eviction": "recompute", **options},
    )
    return SimulatedClient(simulated_engine(shape, by_parts(PROFILE.step_s), is_stock=False))


class OneSession:
    """Data, questions, and watched questions of one session, as `streamrag.sessions` sends them."""

    def __init__(self, client: SimulatedClient, number: int, seen: Seen) -> None:
        self._client = client
        self._seen = seen
        self._rng = random.Random(number)
        self._name = f"session{number}"
        self._tokens = tokens(self._rng, NUM_FIRST)
        self._sent: list[tuple[float, int]] = []

    async def run(self, end_s: float) -> None:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(self._rng.random())
        async with self._client.stream(self._name, self._tokens, 1, request_class="stream") as stream:
            await asyncio.sleep(5)  # what was there at the beginning is no part of it
            async with asyncio.TaskGroup() as group:
                asking = group.create_task(self._ask(end_s))
                while clock() < end_s:
                    more = tokens(self._rng, NUM_MORE)
                    self._tokens = self._tokens + more
                    self._sent.append((clock(), len(self._tokens)))
                    await stream.append(more)
                    group.create_task(self._watch())
                    await asyncio.sleep(1)
                asking.cancel()

    def _num_ready(self) -> int:
        held = self._client._engine.scheduler.requests
        request = next((r for name, r in held.items() if name.startswith(f"{self._name}#")), None)
        return 0 if request is None else request.num_computed_tokens + 1

    async def _ask(self, end_s: float) -> None:
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(self._rng.expovariate(1 / ASK_EVERY_S))
            num_ready = self._num_ready()
            late = [at_s for at_s, num in self._sent if num > num_ready]
            self._seen.lags.append(clock() - late[0] if late else 0.0)
            self._seen.asked.append(await self._answered(num_ready, "session", NUM_ANSWER))

    async def _watch(self) -> None:
        num = len(self._tokens)
        while self._num_ready() < num:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.005)
        for _ in range(WATCHED):
            self._seen.ahead.append(await self._answered(num, "session", 1))

    async def _answered(self, num_ready: int, request_class: RequestClass, num_answer: int) -> float:
        clock = asyncio.get_running_loop().time
        began_s, prompt = clock(), self._tokens[:num_ready] + tokens(self._rng, 50)
        return await first_token_s(self._client, f"{self._name} asked", prompt, num_answer, request_class) - began_s


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(100_000) for _ in range(num)]


async def first_token_s(
    client: SimulatedClient, name: str, prompt: Sequence[int], num_answer: int, request_class: RequestClass = "pool"
) -> float:
    first_s = 0.0
    async with client.stream(name, prompt, num_answer, is_complete=True, request_class=request_class) as stream:
        async for _ in stream:
            first_s = first_s or asyncio.get_running_loop().time()
    return first_s


async def load(options: Mapping[str, Any], rate: float, seconds: float) -> dict[str, Any]:
    seen, rng = Seen(), random.Random(0)

    async def query(number: int) -> None:
        began_s = asyncio.get_running_loop().time()
        prompt = tokens(random.Random(f"q{number}"), NUM_QUERY)
        seen.queries.append(await first_token_s(client, f"q{number}", prompt, NUM_QUERY_ANSWER) - began_s)

    async with client_of(options) as client, asyncio.TaskGroup() as group:
        for number in range(NUM_SESSIONS):
            group.create_task(OneSession(client, number, seen).run(6 + seconds))
        await asyncio.sleep(6)
        busy_s = client.busy_s
        end_s, number = asyncio.get_running_loop().time() + seconds, 0
        while asyncio.get_running_loop().time() < end_s:
            await asyncio.sleep(rng.expovariate(rate))
            group.create_task(query(number))
            number += 1
    return {
        "asked": [percentile(seen.asked, q) for q in (0.5, 0.95, 0.99)],
        "ahead": [percentile(seen.ahead, q) for q in (0.5, 0.95, 0.99)],
        "queries": [percentile(seen.queries, q) for q in (0.5, 0.95, 0.99)],
        "lags": [percentile(seen.lags, q) for q in (0.5, 0.95, 0.99)],
        "num": [len(seen.asked), len(seen.ahead), len(seen.queries)],
        "busy_s": client.busy_s - busy_s,
    }


# ------------------------------------------------------------------------------------------------- what groups save


async def same_question(client: SimulatedClient) -> None:
    """Eight users ask one session the same long question at once."""
    rng = random.Random(1)
    prompt = tokens(rng, 8_000)
    async with client.stream("session", prompt, 1, request_class="stream"):
        await asyncio.sleep(5)
        question = tokens(rng, 400)
        await asyncio.gather(
            *(first_token_s(client, f"q{i}", prompt + question + [i], 16, "session") for i in range(8))
        )


async def same_system(client: SimulatedClient) -> None:
    """Twelve sessions with the same system text are opened at once."""
    system = tokens(random.Random(2), 6_000)
    async with asyncio.TaskGroup() as group:
        for i in range(12):
            group.create_task(_hold(client, f"s{i}", [*system, *tokens(random.Random(i), 100)]))


async def _hold(client: SimulatedClient, name: str, prompt: Sequence[int]) -> None:
    async with client.stream(name, prompt, 1, request_class="stream"):
        await asyncio.sleep(20)


async def same_documents(client: SimulatedClient) -> None:
    """Twelve queries whose retrievers bring the same four documents, each at about the same time."""
    rng = random.Random(3)
    documents = [tokens(rng, 2_000) for _ in range(4)]

    async def query(number: int) -> None:
        mine = random.Random(number)
        async with client.stream(f"q{number}", tokens(random.Random(4), 100), 16) as stream:
            for document in documents:
                await asyncio.sleep(0.5 + mine.uniform(0, 0.02))
                await stream.append(document)
            await stream.append(tokens(mine, 40), is_complete=True)
            async for _ in stream:
                pass

    await asyncio.gather(*(query(i) for i in range(12)))


SHARED: Mapping[str, Callable[[SimulatedClient], Awaitable[None]]] = {
    "eight users, one question": same_question,
    "twelve sessions, one system text": same_system,
    "twelve queries, the same documents": same_documents,
}


async def shared(name: str, options: Mapping[str, Any]) -> dict[str, Any]:
    client = client_of(options)
    num_computed = 0
    on_step = client._engine.on_step

    def counted(step: Any, start_s: float, end_s: float) -> None:
        nonlocal num_computed
        num_computed += step.total_num_scheduled_tokens
        assert on_step is not None
        on_step(step, start_s, end_s)

    client._engine.on_step = counted
    async with client:
        await SHARED[name](client)
    return {"load": name, "options": dict(options), "num_computed": num_computed, "busy_s": client.busy_s}


def show(rows: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]]) -> None:
    table = Table(title="milliseconds, P50 / P95 / P99", title_justify="left")
    for name in ("queries a second", "way", "asked", "ahead", "queries", "data behind", "busy s"):
        table.add_column(name, justify="left" if name == "way" else "right")
    for row in rows:
        times = [" / ".join(f"{1e3 * s:,.0f}" for s in row[name]) for name in ("asked", "ahead", "queries", "lags")]
        table.add_row(f"{row['rate']:g}", row["way"], *times, f"{row['busy_s']:.1f}")
    console.print(table)
    table = Table(title="grouped prefill", title_justify="left")
    for name in ("load", "options", "tokens computed", "busy s"):
        table.add_column(name)
    for row in saved:
        table.add_row(row["load"], str(row["options"]), f"{row['num_computed']:,}", f"{row['busy_s']:.2f}")
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=40.0, metavar="N", help="of each load (default: %(default)s)")
    parser.add_argument("--rates", default=",".join(f"{r:g}" for r in RATES), help="queries a second")
    parser.add_argument("--ways", default=";".join(WAYS), help="with semicolons between them")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    saved = [
        run_virtual(shared(name, {"groups_prefills": is_grouped, **options}))
        for name in SHARED
        for options in ({}, {"max_data_tokens": 1_024})
        for is_grouped in (False, True)
    ]
    rows = [
        {"rate": rate, "way": way, **run_virtual(load(WAYS[way], rate, arguments.seconds))}
        for rate in map(float, filter(None, arguments.rates.split(",")))
        for way in arguments.ways.split(";")
    ]
    show(rows, saved)
    if arguments.json:
        write_atomic(arguments.json, json.dumps({"loads": rows, "grouped": saved}, indent=1) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
