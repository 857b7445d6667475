"""How often does rounding change a greedy answer, in bfloat16 and in float32? On the real engine.

    python -m studies.exactness.run [--only CASE] [--prompts N] [--json FILE]

Each prompt is answered alone by vLLM's own scheduler, which is the reference; ten of them once more; in batches of
eight, as vLLM computes them under load; and streamed, with our scheduler, a passage at a time. All compute the same
tokens in other pieces or beside others, so answers differ by rounding only, where two tokens are about as likely. The
margin of a token is the log-probability of the best minus that of the second best.

Two models: SmolLM2 (135 M parameters) with questions about our documentation, and one with random weights. Cases that
FILE has already are kept, unless --only names them.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamrag import AnswerChunk, Chunk, Prompt, SamplingParams
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.backends.vllm.client.arguments import scheduler_args
from streamrag.backends.vllm.client.calls import request_outputs
from streamrag.backends.vllm.client.processes import EngineProcesses
from streamrag.backends.vllm.client.sampling import to_vllm
from streamrag.backends.vllm.client.token_streams import TokenStreams
from streamrag.backends.vllm.facts import cpu_capabilities, emulated_dtypes
from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.demo.demo_folder import TEMPLATE
from streamrag.errors import StreamRagError
from streamrag.modes.prompt import PromptAssembler
from streamrag.support.files import write_atomic
from streamrag.testing import make_demo_model, make_tiny_llama
from streamrag_bench.provenance import versions
from studies.documentation_questions import QUESTIONS
from studies.folders import DOCS

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

RANDOM_MODEL: dict[str, Any] = {"hidden_size": 256, "num_layers": 5, "num_heads": 4, "num_kv_heads": 2}
"""A Llama of a few million parameters, which are random."""
MAX_MODEL_LEN = 2_048
NUM_PASSAGES, PASSAGE_WORDS = 3, (30, 60)
NUM_RANDOM_TOKENS = 800
NUM_ANSWER_TOKENS = 16
BATCH, NUM_AGAIN = 8, 10
GREEDY = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True, extra={"logprobs": 2})
ALONE, AGAIN, BATCHED, STREAMED = "alone", "alone, again", f"in batches of {BATCH}", "streamed"

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass(frozen=True)
class Case:
    """A model, and how its engine computes."""

    model: str
    dtype: str
    is_batch_invariant: bool = False

    @property
    def name(self) -> str:
        return f"{self.model} {self.dtype}" + " invariant" * self.is_batch_invariant


CASES = tuple(
    Case(model, dtype, is_batch_invariant)
    for is_batch_invariant in (False, True)
    for model in ("SmolLM2", "random")
    for dtype in ("bfloat16", "float32")
    if dtype == "bfloat16" or not is_batch_invariant
)

WhyDead = Callable[[], str]
Pieces = list[tuple[int, ...]]
"""A prompt as it grows; the last one is complete."""


@dataclass(frozen=True)
class Token:
    """A token of an answer."""

    id: int
    margin: float


Answer = list[Token]


# -------------------------------------------------------------------------------------------------------------- prompts


def passages() -> list[str]:
    """Return the paragraphs of the documentation that are neither too short nor too long."""
    pages = [path.read_text() for path in sorted(DOCS.glob("*.md")) if path.name != "api.md"]
    paragraphs = [" ".join(paragraph.split()) for page in pages for paragraph in page.split("\n\n")]
    least, most = PASSAGE_WORDS
    return [text for text in paragraphs if text[0:1].isalpha() and least <= len(text.split()) <= most]


def documentation_prompts(model: Path, num: int) -> list[Pieces]:
    """Return prompts with questions about our documentation, of which a passage more is there each time."""
    rng, every, tokenizer = random.Random(0), passages(), HuggingFaceTokenizer(model)
    prompts = []
    for question in [*QUESTIONS][:num]:
        assembler = PromptAssembler(
            tokenizer, TEMPLATE, question, max_model_len=MAX_MODEL_LEN, max_tokens=NUM_ANSWER_TOKENS
        )
        chunks = [Chunk(text, f"passage-{number}") for number, text in enumerate(rng.sample(every, NUM_PASSAGES))]
        partial = [assembler.assemble(chunks[:end], is_complete=False) for end in range(1, NUM_PASSAGES + 1)]
        complete = assembler.assemble(chunks, is_complete=True)
        prompts.append([assembled.prompt.token_ids for assembled in (*partial, complete)])
    return prompts


def random_prompts(num: int) -> list[Pieces]:
    """Return prompts of random tokens that grow in four equal steps."""
    rng = random.Random(0)
    whole = [tuple(rng.randrange(10, 500) for _ in range(NUM_RANDOM_TOKENS)) for _ in range(num)]
    return [[tokens[: NUM_RANDOM_TOKENS * part // 4] for part in range(1, 5)] for tokens in whole]


# ------------------------------------------------------------------------------------------------------------ answering


@asynccontextmanager
async def running(model: Path, dtype: str, engine_args: Mapping[str, Any]) -> AsyncIterator[tuple["AsyncLLM", WhyDead]]:
    """Run an engine; yields it with a function that returns the reason of its death."""
    args = {"max_model_len": MAX_MODEL_LEN, "kv_cache_memory_bytes": 1 << 29, "dtype": dtype, **engine_args}
    async with aclosing(EngineProcesses(model)) as processes:
        yield await processes.start(args), processes.why_dead


def tokens_of(part: Any) -> Answer:
    """Return the tokens of an output with their margins."""
    answer = []
    for token_id, logprobs in zip(part.token_ids, part.logprobs, strict=True):
        best, second, *_ = sorted((each.logprob for each in logprobs.values()), reverse=True)
        answer.append(Token(token_id, best - second))
    return answer


async def ask(engine: "AsyncLLM", why_dead: WhyDead, name: str, prompt: Sequence[int]) -> Answer:
    """Return vLLM's answer to a complete prompt."""
    from vllm.inputs.engine import tokens_input

    answer: Answer = []
    params = to_vllm(GREEDY, engine.vllm_config)
    async for output in request_outputs(engine, tokens_input(list(prompt)), params, name, why_dead):
        answer += tokens_of(output.outputs[0])
    return answer


async def stream(streams: TokenStreams, pieces: Pieces) -> Answer:
    """Return the answer to a prompt that grows; each piece is computed before the next one comes."""
    first, *rest = pieces
    answer: Answer = []
    async with streams.open(Prompt(tuple(first)), GREEDY) as growing:
        async for event in growing:
            if isinstance(event, AnswerChunk):
                answer += tokens_of(event)
            elif rest:
                await growing.update(Prompt(tuple(rest[0]), is_complete=len(rest) == 1))
                del rest[0]
    return answer


async def measure(case: Case, model: Path, prompts: Sequence[Pieces], done: Callable[[], None]) -> dict[str, Any]:
    """Answer all prompts in all ways, and compare the answers."""
    answers: dict[str, list[Answer]] = {}
    async with running(model, case.dtype, {}) as (engine, why_dead):
        for way, num, size in ((ALONE, len(prompts), 1), (AGAIN, NUM_AGAIN, 1), (BATCHED, len(prompts), BATCH)):
            await engine.reset_prefix_cache()
            answers[way] = []
            for begin in range(0, min(num, len(prompts)), size):
                batch = enumerate(prompts[begin : begin + size], begin)
                asked = [ask(engine, why_dead, f"{way} {number}", pieces[-1]) for number, pieces in batch]
                answers[way] += await asyncio.gather(*asked)
            done()
    ours = scheduler_args("streaming", SchedulerOptions(), {})
    async with running(model, case.dtype, ours) as (engine, why_dead):
        streams = TokenStreams(engine, why_dead=why_dead)
        answers[STREAMED] = [await stream(streams, pieces) for pieces in prompts]
        done()
    reference = answers.pop(ALONE)
    margins = [token.margin for answer in reference for token in answer]
    return {
        "num_prompt_tokens": median(len(pieces[-1]) for pieces in prompts),
        "num_answer_tokens": NUM_ANSWER_TOKENS,
        "share_of_tokens_with_margin_0": sum(margin == 0 for margin in margins) / len(margins),
        "ways": {way: difference(found, reference[: len(found)]) for way, found in answers.items()},
    }


def difference(answers: Sequence[Answer], reference: Sequence[Answer]) -> dict[str, Any]:
    """Return how many answers differ, and of each the first position that does and the reference's margin there."""
    first = []
    for answer, expected in zip(answers, reference, strict=True):
        ids = [(ours.id, theirs.id) for ours, theirs in zip(answer, expected, strict=True)]
        position = next((index for index, (ours, theirs) in enumerate(ids) if ours != theirs), None)
        if position is not None:
            first.append({"position": position, "margin": expected[position].margin})
    return {"num_prompts": len(answers), "num_different": len(first), "first_differences": first}


# -------------------------------------------------------------------------------------------------------------- showing


def show(rows: Mapping[str, Mapping[str, Any]]) -> None:
    table = Table(title="greedy answers that differ from those of vLLM to the prompt alone", title_justify="left")
    for name in ("case", "way", "different", "first difference at", "largest margin there", "margins of 0"):
        table.add_column(name, justify="left" if name in ("case", "way") else "right")
    for name, row in rows.items():
        for way, found in row.get("ways", {}).items():
            first = found["first_differences"]
            table.add_row(
                name,
                way,
                f"{found['num_different']} of {found['num_prompts']}",
                f"token {median(each['position'] for each in first):.0f}" if first else "",
                f"{max(each['margin'] for each in first):.2g}" if first else "",
                f"{row['share_of_tokens_with_margin_0']:.2%}",
            )
        if "error" in row:
            table.add_row(name, row["error"])
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [case.name for case in CASES]
    parser.add_argument("--only", action="append", choices=names, metavar="CASE", help=f"of {'; '.join(names)}")
    parser.add_argument("--prompts", type=int, default=len(QUESTIONS), metavar="N", help="of each case (%(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    kept = json.loads(arguments.json.read_text())["rows"] if arguments.json and arguments.json.exists() else {}
    chosen = [case for case in CASES if (case.name in arguments.only if arguments.only else case.name not in kept)]
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with tempfile.TemporaryDirectory(prefix="streamrag-") as folder, Progress(*columns, console=console) as bar:
        demo, tiny = Path(folder, "SmolLM2"), Path(folder, "random")
        if any(case.model == "SmolLM2" for case in chosen):
            make_demo_model(demo)
        make_tiny_llama(tiny, max_model_len=MAX_MODEL_LEN, **RANDOM_MODEL)
        for case in chosen:
            task = bar.add_task(case.name, total=4)
            is_demo = case.model == "SmolLM2"
            prompts = documentation_prompts(demo, arguments.prompts) if is_demo else random_prompts(arguments.prompts)
            os.environ["VLLM_BATCH_INVARIANT"] = str(int(case.is_batch_invariant))
            try:
                row = asyncio.run(measure(case, demo if is_demo else tiny, prompts, partial(bar.advance, task)))
            except StreamRagError as error:
                if not case.is_batch_invariant:
                    raise
                row = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
            gc.collect()  # vLLM's engine, which must not live until the interpreter ends
            kept[case.name] = row
            if arguments.json:
                made = {
                    "command": "python -m studies.exactness.run",
                    "versions": versions(),
                    "emulated_dtypes": emulated_dtypes(cpu_capabilities()),
                    "rows": {name: kept[name] for name in names if name in kept},
                }
                write_atomic(arguments.json, json.dumps(made, indent=1) + "\n")
    show(kept)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    os.environ.setdefault("TORCH_COMPILE_DISABLE", "1")  # vLLM would compile what ranks log-probabilities: 20 s
    main()
