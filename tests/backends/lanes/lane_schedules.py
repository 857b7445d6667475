"""Random schedules of queries in lanes: prompts that grow and are replaced, short and long answers, cancellations.

`lane_kills` kills lanes. Evictions are counted, but rare; `test_lanes_engine.py` makes streams evict each other.

    python -m tests.backends.lanes.lane_schedules --first 0 --seeds 200

Each answer is compared, at each position, with that of a request which is computed alone and from nothing.
"""

import asyncio
import os
import random
import sys
import tempfile
from collections import Counter
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
sys.path.insert(0, str(Path(__file__).parent))

from lane_engines import (
    GREEDY,
    NUM_TOKENS,
    check_exact,
    check_nothing_pinned,
    growing,
    pairs,
    run_seeds_of_command,
    started_lanes,
    tokens,
)

from streamrag.backends.lanes import DisaggregatedBackend
from streamrag.core import AnswerChunk
from streamrag.records import RequestRecord

NUM_PINNED_CHECKS = 20
"""Schedules between two waits for all leases to end."""


def random_prompts(rng: random.Random, name: object) -> list[list[int]]:
    """Return the prompts of one query, of which many share their beginning with those of other queries."""
    prompt = tokens(rng.randrange(3), rng.choice([1, 40, 130, 300])) + tokens(name, rng.choice([0, 50, 200, 400]))
    prompts = [prompt]
    for number in range(rng.randrange(4)):
        new = tokens((name, number), rng.randrange(1, 100))
        kept = len(prompt) if rng.random() < 0.5 else rng.randrange(len(prompt) + 1)
        prompt = prompt[:kept] + new
        prompts.append(prompt)
    return prompts


async def run_query(backend: DisaggregatedBackend, rng: random.Random, name: object) -> str:
    """Ask one query, check its answer, and return what became of it."""
    prompts, pause_s = random_prompts(rng, name), rng.choice([0.0, 0.02, 0.1])
    params = replace(GREEDY, max_tokens=rng.choice([1, 4, NUM_TOKENS]))
    is_cancelled, after_s = rng.random() < 0.25, rng.uniform(0.0, 1.0)
    await asyncio.sleep(rng.choice([0.0, 0.0, 0.05, 0.3]))
    found: list[tuple[int, float]] = []
    records: list[RequestRecord] = []

    async def read() -> None:
        async with aclosing(backend.generate(growing(*prompts, pause_s=pause_s), params)) as events:
            async for event in events:
                if isinstance(event, AnswerChunk):
                    found.extend(pairs(event))
                    records.extend([event.record] if event.record else [])

    reading = asyncio.create_task(read())
    await asyncio.wait([reading], timeout=after_s if is_cancelled else None)
    if not reading.done():
        reading.cancel()
        await asyncio.wait([reading])
        return "cancelled"
    reading.result()
    assert len(found) == params.max_tokens
    await check_exact(backend, prompts[-1], found)
    return "answered after an eviction" if records[-1].preemptions else "answered"


async def run_schedule(backend: DisaggregatedBackend, seed: int) -> Counter[str]:
    """Ask one to ten queries at about the same time, and return how many had which outcome."""
    rng = random.Random(f"lanes {seed}")
    num = rng.choice([1, 2, 3, 4, 6, 10])
    queries = [(random.Random(f"{seed} {number}"), (seed, number)) for number in range(num)]
    try:
        return Counter(await asyncio.gather(*(run_query(backend, rng, name) for rng, name in queries)))
    except BaseException as error:
        error.add_note(f"schedule {seed}")
        raise


async def run_schedules(first: int, num: int) -> None:
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        async with started_lanes(Path(folder) / "model", lambda transfer: counts.update(["handed over"])) as backend:
            for number in range(num):
                counts += await run_schedule(backend, first + number)
                if number % NUM_PINNED_CHECKS == NUM_PINNED_CHECKS - 1:
                    await check_nothing_pinned(backend)
                    print(f"{number + 1} schedules: {dict(counts)}", flush=True)
            await check_nothing_pinned(backend)


if __name__ == "__main__":
    run_seeds_of_command(__doc__, run_schedules, num=200)
