"""What does it gain to send the head of a prompt, system text and conversation, before the first passage arrives?

    python -m studies.head.run [--only simulated | real] [--model FOLDER] [--json FILE]

Retrieval is one step of 0.5 s. Each round, all users ask at the same time, each with a head of 500 or 3,000 tokens of
its own, which is in the prefix cache or not. The same prompts are sent in each of these ways, in turns:

after           nothing is prefilled before the end of retrieval (`overlap=False`)
with a passage  as `overlap=True` was before: the head goes with the first passages
head first      `overlap=True`
auto            the default, which has learnt from earlier rounds that do not count

The engine is simulated (two H200, `h200-llama8b-tp2`), then a real one with the model of `make demo`, in float32.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeAlias

from rich.console import Console
from rich.table import Table

from streamrag import Chunk, Pipeline, SamplingParams, Turn, Update, VllmBackend
from streamrag.backends.simulated.virtual_time import run_virtual
from streamrag.core import BackendEvent, ModelInfo, Prompt, only
from streamrag.demo.demo_folder import docs_folder, written_pages
from streamrag.engine.costs.profile_files import load_profile
from streamrag.support.clock import Clock, monotonic
from streamrag.telemetry import Answer
from streamrag.testing import ScriptedSource, make_demo_model
from studies.results_file import write_results
from studies.sessions.prices import ShortPieces
from studies.sessions.simulated_backend import SimulatedBackend, simulated_on

RETRIEVAL_S = 0.5
HEADS = (500, 3_000)
NUM_USERS = (1, 8)
PARAMS = SamplingParams(max_tokens=8)
OLD_WAY = "with a passage"
OVERLAPS: dict[str, bool | Literal["auto"]] = {"after": False, OLD_WAY: True, "head first": True, "auto": "auto"}
PROFILE = "h200-llama8b-tp2"
MAX_MODEL_LEN = 8_192

console = Console(highlight=False, width=None if Console().is_terminal else 120)

Reset: TypeAlias = Callable[[], Awaitable[object]]


class HeadWithPassages:
    """A backend to which no head is sent alone, as to all backends before heads were sent."""

    def __init__(self, backend: Any) -> None:
        self.model: ModelInfo = replace(backend.model, min_head_len=None)
        self._backend = backend

    def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        events: AsyncIterator[BackendEvent] = self._backend.generate(prompts, params)
        return events


@dataclass(frozen=True)
class Place:
    """An engine, and how it is measured."""

    name: str
    backend: Any
    reset: Reset
    """Empties the prefix cache."""
    clock: Clock
    num_passage_tokens: int
    """Tokens of all passages of a question."""
    num_rounds: int
    num_learnt: int
    """Rounds that "auto" learns from."""


@dataclass(frozen=True)
class Cell:
    """A load."""

    num_head_tokens: int
    is_cached: bool
    num_users: int


@dataclass(frozen=True)
class Row:
    """One question, asked in one way."""

    engine: str
    num_head_tokens: int
    is_cached: bool
    num_users: int
    way: str
    overlap: str
    """What was done; with "auto", what it chose."""
    number: int
    """Number of the question, the same in each way."""
    num_prompt_tokens: int
    ttft_s: float
    ttft_after_retrieval_s: float
    token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Question:
    """A question, the text before its context, and its passages."""

    text: str
    history: tuple[Turn, ...]
    passages: tuple[Chunk, ...]


class Texts:
    """Texts of a given number of tokens, from the words of the documentation."""

    def __init__(self, model: ModelInfo) -> None:
        self._encode = model.tokenizer.encode
        self._words = [word for page in written_pages(docs_folder()) for word in page.read_text().split()]

    def text(self, rng: random.Random, num_tokens: int) -> str:
        """Return words from a random place on, with about this many tokens."""
        start = rng.randrange(len(self._words) - 2 * num_tokens)
        words = self._words[start : start + 2 * num_tokens]
        num_words = len(words) * num_tokens // len(self._encode(" ".join(words)))
        return " ".join(words[:num_words])

    def question(self, rng: random.Random, cell: Cell, num_passage_tokens: int) -> Question:
        """Return a question whose head is a conversation, with four passages."""
        half = cell.num_head_tokens // 2
        history = (Turn("user", self.text(rng, half)), Turn("assistant", self.text(rng, half)))
        passages = [self.text(rng, num_passage_tokens // 4) for _ in range(4)]
        chunks = tuple(Chunk(text, f"{number}.md") for number, text in enumerate(passages))
        return Question(f"What is meant by number {rng.randrange(1_000_000)}?", history, chunks)


async def measure(place: Place, cells: Sequence[Cell]) -> list[Row]:
    """Ask the questions of all cells in each way."""
    texts, rows = Texts(place.backend.model), []
    for cell in cells:
        rng = random.Random(f"{cell}")
        rounds = [
            [texts.question(rng, cell, place.num_passage_tokens) for _ in range(cell.num_users)]
            for _ in range(place.num_learnt + place.num_rounds)
        ]
        rows += await measure_cell(place, cell, rounds)
        print_rows([row for row in rows if (row.num_head_tokens, row.is_cached, row.num_users) == key(cell)])
    return rows


def key(cell: Cell) -> tuple[int, bool, int]:
    return cell.num_head_tokens, cell.is_cached, cell.num_users


async def measure_cell(place: Place, cell: Cell, rounds: Sequence[Sequence[Question]]) -> list[Row]:
    """Ask each round's questions at the same time, in one way after the other; "auto" alone in the first rounds."""
    passages = {question.text: question.passages for each in rounds for question in each}
    source = ScriptedSource(lambda text: [RETRIEVAL_S, Update(passages[text])])
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        pipelines = {}
        for way, overlap in OVERLAPS.items():
            backend = HeadWithPassages(place.backend) if way == OLD_WAY else place.backend
            options: dict[str, Any] = {"owns_backend": False, "owns_source": False, "clock": place.clock}
            pipelines[way] = await stack.enter_async_context(Pipeline(source, backend, overlap=overlap, **options))
        for number, questions in enumerate(rounds):
            learns = number < place.num_learnt
            ways = ["auto"] if learns else random.Random(number).sample(sorted(OVERLAPS), len(OVERLAPS))
            for way in ways:
                await place.reset()
                if cell.is_cached:
                    for question in questions:
                        await fill_cache(place, question)
                answers = await asyncio.gather(*(ask(pipelines[way], question) for question in questions))
                of_way = [row(place, cell, way, number * cell.num_users + i, a) for i, a in enumerate(answers)]
                rows += [] if learns else of_way
    return rows


async def fill_cache(place: Place, question: Question) -> None:
    """Have the engine compute the head of a question, by asking it without retrieval."""
    async with Pipeline(ScriptedSource([]), place.backend, owns_backend=False, clock=place.clock) as pipeline:
        await ask(pipeline, question)


async def ask(pipeline: Pipeline, question: Question) -> Answer:
    """Return the answer to a question."""
    async with pipeline.stream(question.text, history=question.history, params=PARAMS) as stream:
        async for _ in stream:
            pass
    return stream.result


def row(place: Place, cell: Cell, way: str, number: int, answer: Answer) -> Row:
    """Return what an answer took."""
    assert answer.overlap is not None
    times = answer.timings
    return Row(
        place.name,
        *key(cell),
        way,
        answer.overlap.way,
        number,
        answer.num_prompt_tokens,
        times.ttft_s,
        times.ttft_after_retrieval_s,
        answer.token_ids,
    )


def summarize(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Yield the medians of each cell and way, and those of the ratios to "after" of the same questions."""
    for engine in dict.fromkeys(row.engine for row in rows):
        for cell in product(HEADS, (False, True), NUM_USERS):
            of_cell = [r for r in rows if (r.engine, r.num_head_tokens, r.is_cached, r.num_users) == (engine, *cell)]
            after = {row.number: row for row in of_cell if row.way == "after"}
            for way in OVERLAPS:
                of_way = [row for row in of_cell if row.way == way]
                if not of_way:
                    continue
                yield {
                    "engine": engine,
                    **dict(zip(("num_head_tokens", "is_cached", "num_users"), cell, strict=True)),
                    "way": way,
                    "num": len(of_way),
                    "num_equal": sum(row.token_ids == after[row.number].token_ids for row in of_way),
                    "share_immediate": statistics.fmean(row.overlap == "immediate" for row in of_way),
                    **{
                        name: statistics.median(getattr(row, name) for row in of_way)
                        for name in ("ttft_s", "ttft_after_retrieval_s", "num_prompt_tokens")
                    },
                    **{
                        f"{name}_ratio": statistics.median(
                            getattr(after[r.number], name) / getattr(r, name) for r in of_way
                        )
                        for name in ("ttft_s", "ttft_after_retrieval_s")
                    },
                }


def print_rows(rows: Sequence[Row]) -> None:
    """Print a table of the medians."""
    table = Table("engine", "head", "cached", "users", "way", "from the question, s", "after retrieval, s", "equal")
    for each in summarize(rows):
        load = (each["engine"], f"{each['num_head_tokens']:,}", str(each["is_cached"]), str(each["num_users"]))
        times = (f"{each[n]:.3f}, {each[f'{n}_ratio']:.2f}x" for n in ("ttft_s", "ttft_after_retrieval_s"))
        chosen = f" ({each['share_immediate']:.0%} immediate)" if each["way"] == "auto" else ""
        table.add_row(*load, each["way"] + chosen, *times, f"{each['num_equal']} of {each['num']}")
    console.print(table)


async def measure_simulated() -> list[Row]:
    """Measure on a simulated engine, in virtual time."""
    async with simulated_on(load_profile(PROFILE), MAX_MODEL_LEN) as (engine, client):

        async def reset() -> None:
            assert engine.scheduler.reset_prefix_cache()

        backend = SimulatedBackend(client, ModelInfo("simulated", ShortPieces(), MAX_MODEL_LEN))
        clock = asyncio.get_running_loop().time
        place = Place("simulated", backend, reset, clock, num_passage_tokens=2_000, num_rounds=10, num_learnt=20)
        return await measure(place, CELLS)


async def measure_real(model: Path) -> list[Row]:
    """Measure on a real engine on this machine; eight users only in rounds that are few."""
    backend = VllmBackend(model, max_model_len=MAX_MODEL_LEN, engine_args={"dtype": "float32"})
    await backend.start(console.print)
    try:
        async for _ in backend.generate(only(Prompt(tuple(range(100, 1_100)), is_complete=True)), PARAMS):
            pass  # the first step is slow
        place = Place("real", backend, backend.reset_prefix_cache, monotonic, 400, num_rounds=6, num_learnt=10)
        rows = await measure(place, [cell for cell in CELLS if cell.num_users == 1])
        few = replace(place, num_rounds=2, num_learnt=0)
        return rows + await measure(few, [cell for cell in CELLS if cell.num_users > 1])
    finally:
        await backend.aclose()


CELLS = [Cell(*values) for values in product(HEADS, (False, True), NUM_USERS)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("simulated", "real"), help="both by default")
    parser.add_argument("--model", type=Path, help="that of `make demo`; made anew by default")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    rows = run_virtual(measure_simulated()) if arguments.only != "real" else []
    if arguments.only != "simulated":
        with tempfile.TemporaryDirectory() as folder:
            rows += asyncio.run(measure_real(arguments.model or make_demo_model(Path(folder, "model"))))
    if arguments.json:
        without_tokens = [replace(row, token_ids=()) for row in rows]
        write_results(arguments.json, without_tokens, command="make -C bench head", summary=list(summarize(rows)))
    return 0 if all(each["num_equal"] == each["num"] for each in summarize(rows)) else 1


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
