"""How far apart are the log-probabilities of one prompt that is computed in different pieces? On the real engine.

    python experiments/rounding.py [--prompts N] [--json FILE]

A model adds up in another order where a prompt is computed in other pieces, and rounds differently. So each prompt is
computed whole, by vLLM's own scheduler; in pieces, by the same through its prefix cache; and streamed, appending and
updating, by ours. Streaming may differ no more from the whole than pieces do without it. What a wrong KV entry would do
is shown by a prompt of which one chunk is another. Float32, random weights, twice: layers amplify a difference. Half an
hour on two cores.
"""

import argparse
import asyncio
import json
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from gpu.exact import GREEDY, Answer, Chunks, ask, difference, pairs
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamrag.backends.vllm.client.arguments import scheduler_args
from streamrag.backends.vllm.client.processes import EngineProcesses
from streamrag.backends.vllm.client.token_streams import TokenStreams
from streamrag.bench.provenance import versions
from streamrag.core import AnswerChunk, Prompt
from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

MODELS: dict[str, dict[str, Any]] = {
    "4 layers of 768": {"hidden_size": 768, "num_layers": 4, "num_heads": 12},
    "8 layers of 512": {"hidden_size": 512, "num_layers": 8, "num_heads": 8},
}
"""The first is that of `make demo`."""
VOCABULARY, MAX_MODEL_LEN = 512, 8_192
NUM_CHUNKS, CHUNK_TOKENS = 12, (250, 550)
MOST_GAP_S = 0.3
"""Between two chunks."""
WHOLE, AGAIN, PIECES, OTHER = "whole", "whole, again", "in pieces", "whole, one chunk of twelve another"
APPENDED, UPDATED = "streamed: appended", "streamed: updated"

console = Console(highlight=False, width=None if Console().is_terminal else 120)


def make_chunks(number: int) -> Chunks:
    rng = random.Random(number)
    return [chunk(rng) for _ in range(NUM_CHUNKS)]


def chunk(rng: random.Random) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(*CHUNK_TOKENS))]


def prefixes(chunks: Chunks) -> list[list[int]]:
    """The prompt after each chunk."""
    return list(accumulate(chunks))


# ------------------------------------------------------------------------------------------------------------ answering


@asynccontextmanager
async def running(model: Path, engine_args: Mapping[str, Any]) -> AsyncIterator["AsyncLLM"]:
    args = {"skip_tokenizer_init": True, "enforce_eager": True, "dtype": "float32", **engine_args}
    async with aclosing(EngineProcesses(model)) as processes:
        yield await processes.start(args)


async def by_vllm(engine: "AsyncLLM", number: int) -> dict[str, Answer]:
    chunks = make_chunks(number)
    other = random.Random(-number - 1)
    changed = [*chunks[:3], chunk(other), *chunks[4:]]
    found = {}
    for way, pieces in (
        (WHOLE, prefixes(chunks)[-1:]),
        (AGAIN, prefixes(chunks)[-1:]),
        (PIECES, prefixes(chunks)),
        (OTHER, prefixes(changed)[-1:]),
    ):
        await engine.reset_prefix_cache()
        for index, piece in enumerate(pieces):
            found[way] = await ask(engine, f"{number} {way} {index}", piece)
    return found


async def by_streaming(engine: "AsyncLLM", number: int) -> dict[str, Answer]:
    """Chunks come now and then, while others are computed. `UPDATED`: with chunks between that are withdrawn again."""
    chunks, rng = make_chunks(number), random.Random(number)
    streams = TokenStreams(engine)
    found = {}
    for way in (APPENDED, UPDATED):
        await engine.reset_prefix_cache()
        first, *rest = prefixes(chunks)
        async with streams.open(Prompt(tuple(first)), GREEDY) as stream:
            for prompt in rest:
                if way == UPDATED:
                    await stream.update(Prompt(tuple(prompt[: rng.randrange(len(prompt))] + chunk(rng))))
                    await asyncio.sleep(rng.uniform(0, MOST_GAP_S))
                await stream.update(Prompt(tuple(prompt)))
                await asyncio.sleep(rng.uniform(0, MOST_GAP_S))
            await stream.finish()
            found[way] = [pair async for e in stream if isinstance(e, AnswerChunk) for pair in pairs(e)]
    return found


async def measure(model: Path, num_prompts: int, done: Callable[[], None]) -> list[dict[str, Answer]]:
    """The answers to each prompt, each way."""
    answers: list[dict[str, Answer]] = [{} for _ in range(num_prompts)]
    for is_ours in (False, True):
        args = scheduler_args("streaming", "fcfs", None, {}) if is_ours else {}
        async with running(model, args) as engine:
            for number, found in enumerate(answers):
                found |= await (by_streaming if is_ours else by_vllm)(engine, number)
                done()
    return answers


# ------------------------------------------------------------------------------------------------------------ comparing


def told(answers: Sequence[dict[str, Answer]], way: str) -> dict[str, Any]:
    found = [difference(of[way], of[WHOLE]) for of in answers]
    num_same = sum([t for t, _ in of[way]] == [t for t, _ in of[WHOLE]] for of in answers)
    return {"way": way, "median": median(found), "most": max(found), "num_same_tokens": num_same}


def show(model: str, rows: Sequence[dict[str, Any]], num_prompts: int) -> None:
    table = Table(title=f"{model}: log-probabilities, difference to the whole prompt", title_justify="left")
    table.add_column("computed")
    for name in ("by", "median", "most", "same tokens"):
        table.add_column(name, justify="right")
    for row in rows:
        by = "streamrag" if row["way"] in (APPENDED, UPDATED) else "vLLM"
        same = f"{row['num_same_tokens']} of {num_prompts}"
        table.add_row(row["way"], by, f"{row['median']:.1e}", f"{row['most']:.1e}", same)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=int, default=10, metavar="N", help="each of some 4,800 tokens (10)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    results: dict[str, Any] = {}
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="streamrag-") as folder, Progress(*columns, console=console) as bar:
        for name, shape in MODELS.items():
            task = bar.add_task(name, total=2 * arguments.prompts)
            model = make_tiny_llama(Path(folder, name), vocab_size=VOCABULARY, max_model_len=MAX_MODEL_LEN, **shape)
            answers = asyncio.run(measure(model, arguments.prompts, partial(bar.advance, task)))
            results[name] = [told(answers, way) for way in (AGAIN, PIECES, APPENDED, UPDATED, OTHER)]
    for name, rows in results.items():
        show(name, rows, arguments.prompts)
    if arguments.json:
        made = {
            "command": " ".join(["python", *sys.argv]),
            "versions": versions(),
            "num_prompts": arguments.prompts,
            "results": results,
        }
        write_atomic(arguments.json, json.dumps(made, indent=2) + "\n")


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # vLLM would compile what ranks log-probabilities: 20 s
    main()
