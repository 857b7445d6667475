"""What a question costs while the context grows: to a session, and as a plain request. On GPUs, in virtual time.

    python -m studies.sessions.run [--json FILE]

The evaluation of arXiv 2605.13784, with vLLM's own scheduler and KV cache manager and no model: 100 samples of prices,
then cycles of 55 more and a question, which comes a second after its data or with them. The devices are two H200
(`h200-llama8b-tp2`) and one L40S (`l40s-llama8b`, derived from its data sheet and measured nowhere).
"""

import argparse
import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag.backends.simulated.client import SimulatedClient
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.core import ModelInfo, SamplingParams
from streamrag.engine.costs.profile_files import load_profile
from streamrag.sessions import Session
from streamrag.support.tasks import cancel_and_wait
from streamrag_bench.summary import percentile
from studies.results_file import write_results
from studies.sessions.prices import QUESTIONS, PromptText, ShortPieces, samples
from studies.sessions.simulated_backend import SimulatedBackend, simulated_on

DEVICES = {"2 x H200": "h200-llama8b-tp2", "L40S": "l40s-llama8b"}
SESSION, STOCK = "session", "vLLM's own session"
CACHED, UNCACHED = "plain request, prefix cache on", "plain request, nothing cached"
ARMS = (SESSION, STOCK, CACHED, UNCACHED)
NUM_FIRST, NUM_MORE, NUM_CYCLES = 100, 55, 15
GAPS_S = (1.0, 0.0)
"""Seconds from the data to their question."""
MAX_MODEL_LEN = 40_000
NUM_OUTPUT_TOKENS = 2
"""A word and the end, as for the published questions, which are answered with a word or a number."""


@dataclass(frozen=True)
class Asked:
    """One question: seconds to its first token and to its last, its tokens, and how many were computed for it."""

    device: str
    arm: str
    gap_s: float
    first_s: float
    last_s: float
    num_tokens: int
    num_computed: int


async def growing(device: str, arm: str, gap_s: float, num_cycles: int = NUM_CYCLES) -> list[Asked]:
    """Ask one question a cycle, one after the other."""
    asked: list[Asked] = []
    profile = load_profile(DEVICES[device])
    running = simulated_on(profile, MAX_MODEL_LEN, is_stock=arm != SESSION, has_prefix_cache=arm != UNCACHED)
    async with running as (_, client), AsyncExitStack() as stack:
        model = ModelInfo("simulated", ShortPieces(), MAX_MODEL_LEN)
        text, lines = PromptText(model), samples(NUM_FIRST + num_cycles * NUM_MORE)
        chunks: asyncio.Queue[tuple[int, ...]] = asyncio.Queue()
        if arm == SESSION:
            clock = asyncio.get_running_loop().time
            backend = SimulatedBackend(client, model)
            session = await stack.enter_async_context(Session(backend, clock=clock, window_tokens=30_000))
        elif arm == STOCK:
            reading = asyncio.create_task(stock_session(client, chunks), name="vLLM session")
            stack.push_async_callback(cancel_and_wait, [reading])
        for cycle in range(num_cycles):
            batch = lines[NUM_FIRST + cycle * NUM_MORE if cycle else 0 : NUM_FIRST + (cycle + 1) * NUM_MORE]
            new = text.add(batch)
            if arm == SESSION:
                await session.extend(batch)
            elif arm == STOCK:
                chunks.put_nowait(new)
            await asyncio.sleep(gap_s)
            question = QUESTIONS[cycle % len(QUESTIONS)]
            if arm == SESSION:
                times = await ask(session, question)
            else:
                times = await ask_plain(client, f"question {cycle}", text.complete(question))
            asked.append(Asked(device, arm, gap_s, *times))
            await asyncio.sleep(1.0)  # what was taken in late is out of the way of the next cycle
    return asked


async def stock_session(client: SimulatedClient, chunks: asyncio.Queue[tuple[int, ...]]) -> None:
    """Append what comes to one of vLLM's own streaming sessions, which answers each chunk with a token."""

    async def pushed() -> AsyncGenerator[tuple[tuple[int, ...], int], None]:
        while True:
            yield await chunks.get(), 1

    async with aclosing(client.session("session", pushed())) as answers:
        async for _ in answers:
            pass


async def ask(session: Session, question: str) -> tuple[float, float, int, int]:
    params = SamplingParams(max_tokens=NUM_OUTPUT_TOKENS, ignore_eos=True)
    stream = session.ask(question, params=params, at_least=session.state.num_appended)
    async for _ in stream:
        pass
    answer = stream.result
    num_computed = answer.num_prompt_tokens - answer.record.num_from_cache if answer.record else 0
    return answer.timings.ttft_s, answer.timings.total_s, answer.num_prompt_tokens, num_computed


async def ask_plain(client: SimulatedClient, name: str, prompt: tuple[int, ...]) -> tuple[float, float, int, int]:
    """Send a request with the whole text."""
    clock = asyncio.get_running_loop().time
    began_s, first_s = clock(), 0.0
    async with aclosing(client.generate(name, prompt, NUM_OUTPUT_TOKENS)) as answer:
        async for _ in answer:
            first_s = first_s or clock() - began_s
    num_computed = len(prompt) - client.records[name][-1].num_from_cache
    return first_s, clock() - began_s, len(prompt), num_computed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    table = Table("device", "", "question after its data, s", "first token, P50 / P95, ms", "last", "computed, P50")
    rows: list[Asked] = []
    for device, gap_s, arm in track(list(product(DEVICES, GAPS_S, ARMS)), console=Console(stderr=True)):
        asked = run_virtual(growing(device, arm, gap_s))
        firsts, lasts, computed = ([getattr(a, name) for a in asked] for name in ("first_s", "last_s", "num_computed"))
        times = [" / ".join(f"{1e3 * percentile(of, q):.1f}" for q in (0.5, 0.95)) for of in (firsts, lasts)]
        table.add_row(device, arm, f"{gap_s:g}", *times, f"{percentile(computed, 0.5):,.0f}")
        rows += asked
    console.print(table)
    if arguments.json:
        write_results(arguments.json, rows)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    main()
