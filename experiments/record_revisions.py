"""Record how a real model's answers change with their contexts, for `answer_revisions.py`.

    python experiments/record_revisions.py [--folder FOLDER] [--questions N] [--json FILE]

The model of `make demo` in float32 on the real engine, at temperature 0, questions about this documentation. Each is
answered from every context that it has while passages are appended in random order, and while a search by keywords and
vectors replaces them. An answer is compared with the next; contexts that stay the same are left out.
"""

import argparse
import asyncio
import json
import random
import statistics
from collections import defaultdict
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import aclosing
from datetime import date
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

from answer_revisions import RECORDED, Retrieval, Revision
from documentation_questions import QUESTIONS
from rich.console import Console
from rich.progress import track

from streamrag import Chunk, HybridSource, Pipeline, SamplingParams, Update, VllmBackend
from streamrag.demo.demo_folder import MAX_MODEL_LEN, TEMPLATE, prepare_demo
from streamrag.engine.drafts import AnswerDraft
from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions

NUM_PASSAGES = 5
MAX_TOKENS = 128
DEPTH = 32

console = Console(highlight=False)

Context: TypeAlias = tuple[Chunk, ...]
Tokens: TypeAlias = tuple[int, ...]
Pairs: TypeAlias = dict[Retrieval, list[tuple[Tokens, Tokens]]]


class Contexts:
    """A source that yields a given context of each question at once."""

    def __init__(self) -> None:
        self.of: dict[str, Context] = {}

    async def stream(self, query: str) -> AsyncIterator[Update]:
        """Yield the context."""
        yield Update(self.of[query])


async def contexts_of(source: HybridSource, question: str, rng: random.Random) -> dict[Retrieval, list[Context]]:
    """Return the contexts of a question in order, both ways."""
    ranked: list[Context] = []
    async with aclosing(source.stream(question)) as events:
        async for event in events:
            if isinstance(event, Update) and event.chunks not in ranked[-1:]:
                ranked.append(event.chunks)
    order = rng.sample(ranked[-1], len(ranked[-1]))
    return {"ranked": ranked, "appended": [tuple(order[:num]) for num in range(1, len(order) + 1)]}


def num_steps(draft: Sequence[int], answer: Sequence[int]) -> int:
    """Return the steps in which an answer is sampled if this draft of it is verified."""
    place, num, drafted = 1, 1, AnswerDraft(draft, DEPTH)
    while place < len(answer):
        proposed = drafted.next_tokens(answer[:place], len(answer) - place - 1)
        right = next((i for i, t in enumerate(proposed) if t != answer[place + i]), len(proposed))
        place, num = place + right + 1, num + 1
    return num


async def answer_all(folder: Path, asked: Collection[tuple[str, Context]]) -> dict[tuple[str, Context], Tokens]:
    """Return the answer to each question from each context, asking all questions at a time."""
    contexts: defaultdict[str, list[Context]] = defaultdict(list)
    for question, context in asked:
        contexts[question].append(context)
    source, answers = Contexts(), {}
    backend = VllmBackend(folder / "model", max_model_len=MAX_MODEL_LEN, dtype="float32")
    async with Pipeline(source, backend, template=TEMPLATE, overlap=False) as pipeline:

        async def ask(question: str) -> None:
            stream = pipeline.events(question, params=SamplingParams(max_tokens=MAX_TOKENS))
            _ = [event async for event in stream]
            answers[question, source.of[question]] = stream.result.token_ids

        for number in track(range(max(map(len, contexts.values()))), "answering", console=console, transient=True):
            source.of = {question: of[number] for question, of in contexts.items() if number < len(of)}
            await asyncio.gather(*map(ask, source.of))
    return answers


async def record(folder: Path, num_questions: int) -> Pairs:
    """Return pairs of an answer and the answer to the next context."""
    rng, questions = random.Random(0), list(QUESTIONS)[:num_questions]
    source = HybridSource(folder / "index", k=NUM_PASSAGES)
    await source.start(lambda line: None)
    try:
        contexts = [(question, await contexts_of(source, question, rng)) for question in questions]
    finally:
        await source.aclose()
    answers = await answer_all(
        folder, {(question, each) for question, ways in contexts for of in ways.values() for each in of}
    )
    pairs: Pairs = {"appended": [], "ranked": []}
    for question, ways in contexts:
        for retrieval, of in ways.items():
            tokens = [answers[question, context] for context in of]
            pairs[retrieval] += pairwise(tokens)
    return pairs


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="that of `make demo` (%(default)s)")
    parser.add_argument("--questions", type=int, default=32, metavar="N", help="how many (%(default)s)")
    parser.add_argument("--json", type=Path, default=RECORDED, metavar="FILE", help="default: %(default)s")
    arguments = parser.parse_args()
    prepare_demo(arguments.folder)
    pairs = asyncio.run(record(arguments.folder, arguments.questions))
    revisions, summary = {}, {}
    for retrieval, of in pairs.items():
        made = [Revision.of(before, after) for before, after in of]
        revisions[retrieval] = [
            {"before": r.num_before, "after": r.num_after, "blocks": [list(block) for block in r.blocks]} for r in made
        ]
        summary[retrieval] = {
            "num_pairs": len(made),
            "num_tokens": statistics.mean(r.num_after for r in made),
            "whole": statistics.mean(before == after for before, after in of),
            "prefix": statistics.mean(r.prefix for r in made),
            "steps_a_token": sum(num_steps(*pair) for pair in of) / sum(r.num_after for r in made),
        }
    console.print_json(json.dumps(summary))
    about = {"date": date.today().isoformat(), "model": "make demo", "versions": versions()}
    write_atomic(arguments.json, json.dumps({**about, "summary": summary, "revisions": revisions}) + "\n")


if __name__ == "__main__":
    main()
