"""Who pays for questions that are retrieved for while they are typed? On an H200 under load, in virtual time.

    python experiments/open_questions_simulated.py [--queries N] [--seeds N] [--json FILE]

Users ask at random times (Poisson) about 7,000 tokens of passages, which a search appends within 1.5 s. Answers have
100 tokens. Each question is typed, as in `open_questions.py`. Half of the users, "others", always ask at the commit.
The second half, "typists", asks at the commit too, or types with `listen`. A partial question finds the passages of the
whole one (same), or other ones (other), whose prefill is in vain. The commits are at the same times in every way, and
seconds are from the commit. The engine is simulated on `h200-llama8b-tp2`, with our scheduler; no model runs.
"""

import argparse
import asyncio
import json
import random
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from datetime import date
from itertools import product
from pathlib import Path
from typing import Any

from documentation_questions import QUESTIONS
from hand_over_simulated import Words
from open_questions import read, typed
from rich.console import Console
from rich.progress import track
from rich.table import Table
from session_simulation import MAX_MODEL_LEN, Device, Site, simulated

from streamrag import Append, Chunk, ModelInfo, Pipeline, SamplingParams
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.engine.costs.profile_files import load_profile
from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions
from streamrag_bench.summary import percentile

PROFILE = "h200-llama8b-tp2"
RATES = (1.0, 2.0, 4.0)
FOUND = ("same", "other")
WAYS = ("from the commit", "listen")
GROUPS = ("others", "typists")
NUM_PASSAGES, PASSAGE_WORDS, PASSAGE_GAP_S = 5, 1_400, 0.3
PARAMS = SamplingParams(max_tokens=100, ignore_eos=True)
LEAD_S = 30.0
"""Seconds before the first commit: the longest question takes as long to type."""

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Answered:
    """One question, in seconds from its commit."""

    group: str
    first_s: float
    last_s: float
    num_retrievals: int
    num_unused_tokens: int


class Search:
    """Finds passages of its own for each user, and, if `finds_others`, for each text."""

    def __init__(self, user: int, *, finds_others: bool) -> None:
        self._user = user
        self._finds_others = finds_others

    async def stream(self, query: str) -> AsyncIterator[Append]:
        """Yield a passage every 0.3 s."""
        rng = random.Random(f"{self._user} {query if self._finds_others else ''}")
        for number in range(NUM_PASSAGES):
            await asyncio.sleep(PASSAGE_GAP_S)
            text = " ".join(f"w{rng.randrange(50_000)}" for _ in range(PASSAGE_WORDS))
            yield Append(Chunk(text, f"{self._user}/{number}"))


async def ask(site: Site, user: int, commit_s: float, *, listens: bool, finds_others: bool) -> Answered:
    """Type a question so that its commit is at `commit_s`, and read its answer."""
    loop = asyncio.get_running_loop()
    group = GROUPS[user % 2]
    question = list(QUESTIONS)[user % len(QUESTIONS)]
    source = Search(user, finds_others=finds_others)
    async with Pipeline(source, site.backend, owns_backend=False, overlap=True, clock=loop.time) as pipeline:
        if group == "others" or not listens:
            await asyncio.sleep(commit_s - loop.time())
            return Answered(group, *await read(pipeline.stream(question, params=PARAMS)), 1, 0)
        partials = typed(question, random.Random(user))
        await asyncio.sleep(commit_s - sum(each.pause_s for each in partials) - loop.time())
        async with pipeline.listen(params=PARAMS) as asked:
            for text, pause_s, is_final in partials:
                await asked.partial(text, is_final=is_final)
                await asyncio.sleep(pause_s)
            seconds = await read(asked.commit(question))
            return Answered(group, *seconds, asked.num_retrievals + 1, asked.num_unused_tokens)


async def serve(rate: float, found: str, way: str, seed: int, num_queries: int) -> tuple[list[Answered], float]:
    """Serve a load in one way. Return the answers and the seconds in which the engine computed."""
    rng, commit_s = random.Random(seed), LEAD_S
    async with simulated(Device(load_profile(PROFILE))) as site, asyncio.TaskGroup() as group:
        site.backend.model = ModelInfo("simulated", Words(), MAX_MODEL_LEN)
        tasks = []
        for number in range(num_queries):
            commit_s += rng.expovariate(rate)
            options = {"listens": way == "listen", "finds_others": found == "other"}
            tasks.append(group.create_task(ask(site, seed * 100_000 + number, commit_s, **options)))
        await asyncio.wait(tasks)
        return [task.result() for task in tasks], site.meter.busy_s


def summarize(answers: Sequence[Answered]) -> dict[str, float]:
    """Return percentiles and means of a group's answers."""
    return {
        **{
            f"{name}_p{percent}": percentile([getattr(each, name) for each in answers], percent / 100)
            for name, percent in product(("first_s", "last_s"), (50, 95, 99))
        },
        "num_retrievals": sum(each.num_retrievals for each in answers) / len(answers),
        "num_unused_tokens": sum(each.num_unused_tokens for each in answers) / len(answers),
    }


def table_of(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    table = Table("a second", "found", "typists ask", "who", "first P50", "P95", "P99", "last P50", "P95", "P99")
    for name in ("retrievals", "unused tokens", "engine, s"):
        table.add_column(name)
    for row in rows:
        seconds = (f"{row[f'{name}_p{percent}']:.2f}" for name in ("first_s", "last_s") for percent in (50, 95, 99))
        costs = f"{row['num_retrievals']:.1f}", f"{row['num_unused_tokens']:,.0f}", f"{row['busy_s']:.0f}"
        table.add_row(f"{row['rate']:g}", row["found"], row["way"], row["group"], *seconds, *costs)
    return table


def measure(num_queries: int, num_seeds: int) -> list[dict[str, Any]]:
    """Serve all loads in all ways, and return a row for each group of users."""
    rows = []
    loads = list(product(RATES, FOUND, WAYS))
    for rate, found, way in track(loads, "simulating", console=console, transient=True):
        served = [run_virtual(serve(rate, found, way, seed, num_queries)) for seed in range(1, num_seeds + 1)]
        for group in GROUPS:
            answers = [each for answers, _ in served for each in answers if each.group == group]
            load = {"rate": rate, "found": found, "way": way, "group": group}
            rows.append({**load, **summarize(answers), "busy_s": sum(busy_s for _, busy_s in served)})
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--queries", type=int, default=120, metavar="N", help="of each seed (%(default)s)")
    parser.add_argument("--seeds", type=int, default=2, metavar="N", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    rows = measure(arguments.queries, arguments.seeds)
    console.print(table_of(rows))
    if arguments.json:
        about = {"is_simulated": True, "date": date.today().isoformat(), "versions": versions(), "profile": PROFILE}
        about |= {"num_queries": arguments.queries, "num_seeds": arguments.seeds}
        write_atomic(arguments.json, json.dumps({**about, "rows": rows}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
