"""The lean engines of `lanes_simulated.py` beside vLLM's own schedulers, on the same queries, in virtual time.

    python experiments/lanes_whole.py [--json FILE]

Engines that do both and prefill lanes have our scheduler, decode lanes vLLM's: a decode lane begins with the prompt's
last token, and has no block before, so all are sent. Whatever it evicts comes back at no cost, so loads that fill its
memory are not for this simulation. A query goes to the lane with the fewest open queries, in both models. Engines that
do both are also compared with a small step budget, because `lanes_simulated.py` gives them the one that suits them.
"""

import argparse
import asyncio
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path

from lane_play import LATENCY_S
from lanes_simulated import ANSWERS, KV_BYTES_PER_TOKEN, LINK, LINKS, NAMES, PROFILE, Cell, run
from results_file import write_results
from study_figures import decimal, study_table, without_repeats

from streamrag.backends.simulated.client import SimulatedClient, by_parts, simulated_engine
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.costs.step_profiles import StepPart, StepProfile
from streamrag.trace.values import TracedQuery
from streamrag_bench.cell import CellSettings
from streamrag_bench.summary import percentile
from streamrag_bench.workload import Arriving, Tokens, fit_contexts, load_trace, longest_prompt, make_load, token_budget

NUMBERS = (2, 4)
NUM_QUERIES = 20
"""For each engine."""
SMALL_BUDGET = 1_024
"""Tokens of a step, in addition to the published budget."""


@dataclass
class Engine:
    """An engine, its link, and the number of its open queries."""

    client: SimulatedClient
    link: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_open: int = 0


@dataclass(frozen=True)
class Timing:
    """Seconds of one query, from the end of its retrieval."""

    first_s: float
    last_s: float
    per_token_s: float


@dataclass(frozen=True)
class Row:
    """One cell with one model of engines. Seconds."""

    load: str
    num_engines: int
    num_answer: int
    way: str  # "both", or the link
    num_prefill: int
    budget: int  # tokens of a step
    model: str
    first_p50_s: float
    first_p95_s: float
    last_p50_s: float
    last_p95_s: float
    per_token_p50_s: float
    per_token_p95_s: float


FIGURES = ("first_p50_s", "first_p95_s", "last_p50_s", "last_p95_s", "per_token_p50_s", "per_token_p95_s")
COMPARED = (
    ("median of the last token", "last_p50_s"),
    ("its P95", "last_p95_s"),
    ("median ms a token", "per_token_p50_s"),
    ("median of the first token", "first_p50_s"),
    ("its P95", "first_p95_s"),
)
"""(title, figure) of the comparison."""


def answers_only(profile: StepProfile, parts: Sequence[StepPart]) -> float:
    """Return the seconds of a step in which the KV of each prompt is there but for its last token."""
    return profile.step_s([(1, num_new + num_before - 1) for num_new, num_before in parts])


def make_engine(
    profile: StepProfile, settings: CellSettings, queries: Sequence[TracedQuery], *, decodes: bool
) -> Engine:
    """Make an engine with our scheduler or, if it only decodes, with vLLM's, which takes any prompt in one step."""
    longest = longest_prompt(queries) + settings.num_output_tokens + 1
    shape = EngineShape(
        num_blocks=profile.kv_tokens // profile.block_size,
        block_size=profile.block_size,
        max_model_len=-(-longest // profile.block_size) * profile.block_size,
        max_num_batched_tokens=1 << 20 if decodes else token_budget(settings),
        max_num_seqs=settings.max_num_seqs,
        is_async=profile.is_async,
        has_prefix_cache=not decodes,
    )
    step_s = by_parts(lambda parts: answers_only(profile, parts)) if decodes else by_parts(profile.step_s)
    return Engine(SimulatedClient(simulated_engine(shape, step_s, is_stock=decodes), delivery_s=profile.delivery_s))


async def answer(
    arriving: Arriving, engine: Engine, decode: Sequence[Engine], link_bytes_s: float, num_answer: int
) -> Timing:
    """Prefill a query as it arrives; then answer it there or, if there are decode lanes, in one of them."""
    now = asyncio.get_running_loop().time
    pieces, times_s = aiter(arriving), []
    first = await anext(pieces)
    prompt, query_id = first.token_ids, arriving.query.query_id
    num_here = 1 if decode else num_answer
    async with engine.client.stream(query_id, prompt, num_here, is_complete=first.is_complete) as stream:
        async for piece in pieces:
            prompt = prompt + piece.token_ids if piece.is_append else piece.token_ids
            await stream.update(prompt, is_complete=piece.is_complete, hint=piece.hint)
        async for tokens in stream:
            times_s += [now()] * len(tokens)
    if decode:
        times_s = []
        lane = min(decode, key=lambda each: each.num_open)
        lane.num_open += 1
        async with engine.link, lane.link:
            await asyncio.sleep(LATENCY_S + len(prompt) * KV_BYTES_PER_TOKEN / link_bytes_s)
        async for tokens in lane.client.generate(query_id, prompt, num_answer):
            times_s += [now()] * len(tokens)
        lane.num_open -= 1
    assert arriving.end_s is not None
    per_token_s = (times_s[-1] - times_s[0]) / max(len(times_s) - 1, 1)
    return Timing(times_s[0] - arriving.end_s, times_s[-1] - arriving.end_s, per_token_s)


async def play(
    settings: CellSettings, queries: Sequence[TracedQuery], num_engines: int, num_prefill: int, link_bytes_s: float
) -> list[Timing]:
    """Play a load on engines of which the first `num_prefill` only prefill and the others only decode, or all do both
    if it is 0."""
    profile = load_profile(PROFILE)
    loop = asyncio.get_running_loop()
    engines = [
        make_engine(profile, settings, queries, decodes=bool(num_prefill) and number >= num_prefill)
        for number in range(num_engines)
    ]
    first, decode = (engines[:num_prefill], engines[num_prefill:]) if num_prefill else (engines, [])
    timings = []

    async def ask(query: TracedQuery) -> None:
        engine = min(first, key=lambda each: each.num_open)
        engine.num_open += 1
        arriving = Arriving(query, Tokens(), 0.0)
        timings.append(await answer(arriving, engine, decode, link_bytes_s, settings.num_output_tokens))
        engine.num_open -= 1

    async with AsyncExitStack() as stack:
        for each in engines:
            await stack.enter_async_context(each.client)
        async with asyncio.TaskGroup() as tasks:
            for query in queries:
                await asyncio.sleep(query.arrival_s - loop.time())
                tasks.create_task(ask(query))
    return timings


def rows_of(cell: Cell) -> list[Row]:
    """Return the rows of a cell with both models: engines that do both, with the published and a small step budget, and
    half of them as prefill lanes."""
    published, lean_queries, rows = cell.settings(), cell.queries(), []
    queries = fit_contexts(published, make_load(published, load_trace(published)), None).queries
    ways = (("both", 0, cell.budget), ("both", 0, SMALL_BUDGET), (LINK, cell.num_engines // 2, cell.budget))
    for way, num_prefill, budget in ways:
        settings = replace(published, max_num_batched_tokens=budget)
        timings = run_virtual(play(settings, queries, cell.num_engines, num_prefill, LINKS.get(way, 1.0)))
        values = []
        for of in ("first_s", "last_s", "per_token_s"):
            of_queries = [getattr(timing, of) for timing in timings]
            values += [percentile(of_queries, 0.5), percentile(of_queries, 0.95)]
        lean = run(cell, lean_queries, num_prefill, way, router="shortest queue", reuses=False, budget=budget)
        for model, figures in (("vLLM's schedulers", values), ("lean", [getattr(lean, name) for name in FIGURES])):
            what = (cell.load, cell.num_engines, cell.num_answer, way, num_prefill, budget, model)
            rows.append(Row(*what, *figures))
    return rows


def differences_table(rows: Sequence[Row]) -> str:
    """Return by how much the lean engines differ from vLLM's schedulers: the least and the most of all cells."""
    of: dict[str, list[Row]] = {}
    for row in rows:
        name = "both" if row.way == "both" else "lanes"
        of.setdefault(f"{name}, {NAMES[row.load]}, {row.budget:,}", []).append(row)
    lines = []
    for name, these in sorted(of.items()):
        pairs = list(zip(these[::2], these[1::2], strict=True))
        line = [name]
        for _, figure in COMPARED:
            changes = [100 * (getattr(lean, figure) / getattr(whole, figure) - 1) for whole, lean in pairs]
            line.append(f"{min(changes):+.0f} to {max(changes):+.0f} %")
        lines.append(line)
    return study_table(("way, load, tokens of a step", *(title for title, _ in COMPARED)), lines)


def rows_table(rows: Sequence[Row]) -> str:
    """Return all rows: P50 / P95 of seconds to the first and the last token, and of ms for each between."""
    lines = []
    for row in rows:
        what = (f"{NAMES[row.load]}, {row.num_answer}", str(row.num_engines), row.way, f"{row.budget:,}", row.model)
        seconds = (
            f"{decimal(getattr(row, f'{of}_p50_s'), 3)} / {decimal(getattr(row, f'{of}_p95_s'))}"
            for of in ("first", "last")
        )
        per_token = f"{decimal(1e3 * row.per_token_p50_s, 1)} / {decimal(1e3 * row.per_token_p95_s, 1)}"
        lines.append([*what, *seconds, per_token])
    head = ("load, answer", "engines", "way", "tokens of a step", "model", "first token", "last token", "ms a token")
    return study_table(head, without_repeats(lines, 4))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    rows: list[Row] = []
    for load, num_answer, num_engines in product(("crawler", "anns"), ANSWERS, NUMBERS):
        rows += rows_of(Cell(load, num_answer, num_engines, NUM_QUERIES))
        print(f"{load}, {num_answer} tokens, {num_engines} engines", file=sys.stderr, flush=True)
    print(differences_table(rows), rows_table(rows), sep="\n")
    if arguments.json:
        write_results(arguments.json, rows, command="make bench-lanes-whole")
    return 0


if __name__ == "__main__":
    sys.exit(main())
