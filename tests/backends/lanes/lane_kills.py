"""Lanes that are killed while queries use them: are the answers those of fresh requests, and is all memory given back?

    python -m tests.backends.lanes.lane_kills --first 0 --seeds 10

Each seed starts `NUM_EACH` lanes of each kind, and kills them one after another until one of each kind is left.
"""

import asyncio
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

os.environ.update(OMP_NUM_THREADS="1", VLLM_CPU_OMP_THREADS_BIND="nobind")
sys.path.insert(0, str(Path(__file__).parent))

import pytest
from lane_engines import (
    GREEDY,
    check_exact,
    check_nothing_pinned,
    growing,
    is_alive,
    pairs,
    run_seeds_of_command,
    started_lanes,
    tokens,
)

from streamrag.backends.lanes import DisaggregatedBackend
from streamrag.backends.lanes import backend as lanes_module
from streamrag.backends.vllm import VllmBackend
from streamrag.core import AnswerChunk, BackendEvent
from streamrag.errors import BackendError

NUM_EACH = 3
NUM_TOKENS = 40
PARAMS = replace(GREEDY, max_tokens=NUM_TOKENS)

Kind = Literal["prefill", "decode"]
Moment = Literal["begins", "prefilled", "is handed over", "is answered"]

MAX_DELAY_S: dict[Moment, float] = {"begins": 1.5, "prefilled": 0.3, "is handed over": 0.06, "is answered": 0.5}
"""Most seconds after a moment of a query at which a lane is killed."""


def send_signal(lane: VllmBackend, number: signal.Signals) -> None:
    for process_id in lane.process_ids:
        os.kill(process_id, number)


@dataclass
class QueryRun:
    """A query, and what was shown of its answer."""

    prompts: list[list[int]]
    found: list[tuple[int, float]] = field(default_factory=list)
    error: str = ""

    async def run(self, backend: DisaggregatedBackend, on_event: Callable[[BackendEvent], None]) -> None:
        try:
            async with aclosing(backend.generate(growing(*self.prompts, pause_s=0.1), PARAMS)) as events:
                async for event in events:
                    if isinstance(event, AnswerChunk):
                        self.found.extend(pairs(event))
                    on_event(event)
        except BackendError as error:
            self.error = str(error)

    async def check(self, backend: DisaggregatedBackend, killed: Kind) -> str:
        """Compare the answer, or what was shown of it, and return what became of the query."""
        if self.error:
            assert killed == "decode", self.error  # the answer does not need a prefill lane
            assert self.found
            assert f"after {len(self.found)} tokens were shown: ask again" in self.error
        else:
            assert len(self.found) == NUM_TOKENS
        await check_exact(backend, self.prompts[-1], self.found)
        return "failed in mid-answer" if self.error else "answered"


def lane_to_kill(backend: DisaggregatedBackend, kind: Kind, rng: random.Random) -> VllmBackend:
    """Choose a lane that a query uses, if any."""
    lanes = backend._prefill_lanes if kind == "prefill" else backend._decode_lanes
    assert lanes is not None
    alive = [name for name, lane in backend._backends.items() if lane.lane == kind and is_alive(lane)]
    assert len(alive) > 1
    used = sorted(lanes._chooser.in_use() & set(alive))
    return backend._backends[rng.choice(used or alive)]


def num_lanes(backend: DisaggregatedBackend) -> int:
    """Count the lanes that this process does not know to be dead."""
    return sum(map(is_alive, backend._backends.values()))


@dataclass(frozen=True)
class Kill:
    """What kills a lane of which kind, and when."""

    name: str
    kind: Kind
    moment: Moment  # of the first of the queries
    after_s: float
    num_queries: int


async def run_kill(backend: DisaggregatedBackend, kill_it: Kill) -> Counter[str]:
    """Ask some queries at once, kill a lane, and check the answers."""
    rng = random.Random(kill_it.name)
    whole = [tokens((kill_it.name, number), rng.randrange(100, 400)) for number in range(kill_it.num_queries)]
    queries = [QueryRun([prompt[: len(prompt) // 2], prompt]) for prompt in whole]
    loop, killed = asyncio.get_running_loop(), asyncio.Event()
    num_alive, is_reached = num_lanes(backend), False

    def kill() -> None:
        send_signal(lane_to_kill(backend, kill_it.kind, rng), signal.SIGKILL)
        killed.set()

    def reach(what: Moment) -> None:
        nonlocal is_reached
        if what == kill_it.moment and not is_reached:
            is_reached = True
            kill() if kill_it.after_s == 0.0 else loop.call_later(kill_it.after_s, kill)

    def on_event(event: BackendEvent) -> None:
        reach("prefilled")
        if isinstance(event, AnswerChunk):
            reach("is answered")

    with_kv_transfer = lanes_module.with_kv_transfer

    def hand_over(*args: Any) -> Any:
        """Called between the end of the prefill and the request to the decode lane."""
        reach("is handed over")
        return with_kv_transfer(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes_module, "with_kv_transfer", hand_over)
        reach("begins")
        runs = [query.run(backend, on_event if query is queries[0] else lambda event: None) for query in queries]
        await asyncio.gather(*runs)
        await killed.wait()
    while num_lanes(backend) == num_alive:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    outcomes = [await query.check(backend, kill_it.kind) for query in queries]
    return Counter(f"{kill_it.kind} lane killed when a query {kill_it.moment}: {outcome}" for outcome in outcomes)


def kills(seed: int) -> list[Kill]:
    """Return as many kills as leave one lane of each kind. The first of each kind is between the two engines."""
    rng = random.Random(f"kills {seed}")
    found = []
    for number in range(2 * (NUM_EACH - 1)):
        moment: Moment = "is handed over" if number < 2 else rng.choice(list(MAX_DELAY_S))
        after_s = rng.choice([0.0, rng.uniform(0.0, MAX_DELAY_S[moment])])
        kind: Kind = "decode" if number % 2 else "prefill"
        found.append(Kill(f"kill {number} of seed {seed}", kind, moment, round(after_s, 3), rng.choice([1, 3])))
    return found


async def run_seeds(first: int, num: int) -> None:
    counts: Counter[str] = Counter()
    for seed in range(first, first + num):
        with tempfile.TemporaryDirectory() as folder:
            async with started_lanes(Path(folder) / "model", lambda transfer: None, num_each=NUM_EACH) as backend:
                for kill in kills(seed):
                    counts += await run_kill(backend, kill)
                await check_nothing_pinned(backend)
        print(f"seed {seed}:", *(f"{num:4} {what}" for what, num in sorted(counts.items())), sep="\n", flush=True)


if __name__ == "__main__":
    run_seeds_of_command(__doc__, run_seeds, num=10)
