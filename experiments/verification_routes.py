"""Which way to verify a draft of an answer costs least?

    python experiments/verification_routes.py [--folder FOLDER] [--questions N] [--json FILE]

The demo's model in float32 on the real engine, questions about this documentation with their passages. The prompt is in
the prefix cache, and there is a draft of its answer: the right one, one with a wrong token in the middle, and one that
is wrong at once. Seconds until the whole answer is known, at temperature 0, in three ways:

plain   without the draft
A       the prompt carries the draft, whose tokens our scheduler has verified by vLLM's rejection sampler
C       a request to the prompt and the draft asks for the log-probabilities of the prompt; the draft holds while each
        token has rank 1, and the next token is the one of rank 1; a second request continues from there. vLLM reads no
        prefix cache for such a request, and computes logits for the whole prompt.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TypeAlias

from answer_ahead import retrieve
from documentation_questions import QUESTIONS
from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import SamplingParams, VllmBackend
from streamrag.core import AnswerChunk, Chunk, Prompt
from streamrag.demo.demo_folder import MAX_MODEL_LEN, TEMPLATE, prepare_demo
from streamrag.modes.prompt import PromptAssembler
from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions

MAX_TOKENS = 64

console = Console(highlight=False, width=None if Console().is_terminal else 120)

Tokens: TypeAlias = tuple[int, ...]


async def only(prompt: Prompt) -> AsyncIterator[Prompt]:
    yield prompt


class Routes:
    """Ways to get the answer to a prompt of which there is a draft."""

    def __init__(self, backend: VllmBackend) -> None:
        self._backend = backend
        self._end: int | None = None  # the token with which the model ends an answer

    async def answer(self, prompt: Tokens, draft: Tokens = (), max_tokens: int = MAX_TOKENS) -> Tokens:
        whole = Prompt(prompt, 0, is_complete=True, draft=draft)
        chunks = await self._chunks(whole, SamplingParams(max_tokens=max_tokens))
        if chunks[-1].finish_reason == "stop":
            self._end = chunks[-1].token_ids[-1]
        return tuple(token for chunk in chunks for token in chunk.token_ids)

    async def _chunks(self, prompt: Prompt, params: SamplingParams) -> list[AnswerChunk]:
        async with aclosing(self._backend.generate(only(prompt), params)) as events:
            return [event async for event in events if isinstance(event, AnswerChunk)]

    async def plain(self, prompt: Tokens, draft: Tokens) -> Tokens:
        return await self.answer(prompt)

    async def speculative(self, prompt: Tokens, draft: Tokens) -> Tokens:
        return await self.answer(prompt, draft)

    async def as_prompt(self, prompt: Tokens, draft: Tokens) -> Tokens:
        whole = Prompt((*prompt, *draft), 0, is_complete=True)
        params = SamplingParams(max_tokens=1, extra={"prompt_logprobs": 1})
        chunk = (await self._chunks(whole, params))[0]
        known: list[int] = []
        for token, entries in zip(draft, (chunk.prompt_logprobs or ())[len(prompt) :], strict=True):
            known.append(next(each for each, entry in (entries or {}).items() if entry.rank == 1))
            if known[-1] != token:
                break
        else:
            if known[-1] == self._end or len(known) == MAX_TOKENS:  # the answer ends with the draft
                return tuple(known)
            known += chunk.token_ids
        rest = await self.answer((*prompt, *known), max_tokens=MAX_TOKENS - len(known))
        return (*known, *rest)


def prompt_of(backend: VllmBackend, question: str, chunks: Sequence[Chunk]) -> Tokens:
    assembler = PromptAssembler(
        backend.model.tokenizer, TEMPLATE, question, max_model_len=MAX_MODEL_LEN, max_tokens=MAX_TOKENS
    )
    return assembler.assemble(chunks, is_complete=True).prompt.token_ids


def drafts_of(answer: Tokens) -> dict[str, Tokens]:
    """The draft of each kind. The token that is wrong occurs elsewhere in the answer."""
    middle = len(answer) // 2
    return {
        "right": answer,
        "wrong in the middle": (*answer[:middle], answer[0], *answer[middle + 1 :]),
        "wrong at once": (answer[-2], *answer[1:]),
    }


async def measure(folder: Path, num_questions: int) -> list[tuple[str, str, float, bool]]:
    """Return kind of draft, way, seconds, and whether the tokens are those of the plain way."""
    rng, questions = random.Random(0), list(QUESTIONS)[:num_questions]
    found = await retrieve(folder, questions)
    rows = []
    backend = VllmBackend(folder / "model", max_model_len=MAX_MODEL_LEN, dtype="float32", answer_ahead=True)
    await backend.start(lambda line: None)
    try:
        routes = Routes(backend)
        ways: list[tuple[str, Callable[[Tokens, Tokens], Awaitable[Tokens]]]] = [
            ("plain", routes.plain),
            ("A", routes.speculative),
            ("C", routes.as_prompt),
        ]
        for question in track(questions, "verifying", console=console, transient=True):
            prompt = prompt_of(backend, question, found[question])
            expected = await routes.plain(prompt, ())
            for kind, draft in drafts_of(expected).items():
                for way, verify in rng.sample(ways, len(ways)):
                    await backend.reset_prefix_cache()
                    await routes.answer(prompt, max_tokens=1)
                    began_s = time.perf_counter()
                    answer = await verify(prompt, draft)
                    rows.append((kind, way, time.perf_counter() - began_s, answer == expected))
    finally:
        await backend.aclose()
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(".demo"), help="that of `make demo` (%(default)s)")
    parser.add_argument("--questions", type=int, default=12, metavar="N", help="(%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to put the numbers")
    arguments = parser.parse_args()
    with console.status("making what the demo needs"):
        prepare_demo(arguments.folder)
    rows = asyncio.run(measure(arguments.folder, arguments.questions))
    table = Table("draft", "way", "seconds, median", "same tokens")
    summary = []
    for kind, way in dict.fromkeys(row[:2] for row in rows):
        seconds, same = zip(*((s, e) for k, w, s, e in rows if (k, w) == (kind, way)), strict=True)
        summary.append({"draft": kind, "way": way, "seconds": statistics.median(seconds), "num_equal": sum(same)})
        table.add_row(kind, way, f"{summary[-1]['seconds']:.2f}", f"{sum(same)} of {len(same)}")
    console.print(table)
    if arguments.json:
        write_atomic(arguments.json, json.dumps({"versions": versions(), "rows": summary}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
