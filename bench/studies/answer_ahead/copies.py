"""How many steps does an answer save whose tokens are copied from its prompt, by our scheduler and by vLLM's `ngram`?

    python -m studies.answer_ahead.copies [--folder FOLDER] [--questions N] [--json FILE]

The model of `make demo` in float32, which is trained to quote, on the real engine; questions about this documentation,
each with the five best passages of the demo's index. Three engines run in one process and compute one at a time:
without speculation, with our scheduler's copies (`answer_ahead=True`), and vLLM's own scheduler with
`speculative_config={"method": "ngram", ...}`. Each question goes to all three, in an order that rotates, and is not
drafted. Tokens must be equal. Seconds are those after the first token, since the prompt costs the same everywhere; so
are steps, each of which has one output. vLLM counts accepted tokens behind the end of an answer too.

The questions are shown in two halves: those whose answers share most runs of three tokens with their prompts, and the
others. An answer is known only afterwards, so nobody could ask the first half alone.

Then what the search costs our scheduler, without an engine: the first search of an answer, which sorts the prompt, and
each later step of an answer that copies nothing, which is the longest; the least of several runs.
"""

import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import SamplingParams
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.backends.vllm.client.arguments import draft_args, scheduler_args
from streamrag.backends.vllm.client.processes import EngineProcesses
from streamrag.backends.vllm.client.sampling import to_vllm
from streamrag.backends.vllm.client.stats import EngineStats
from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.demo.demo_folder import TEMPLATE
from streamrag.engine.drafts import NUM_ANCHOR, AnswerDraft
from streamrag.modes import PromptAssembler
from streamrag.support.files import write_atomic
from streamrag_bench.provenance import versions
from studies.answer_ahead.run import retrieve
from studies.demo_options import demo_parser, parse_and_prepare, print_load
from studies.documentation_questions import QUESTIONS

MAX_TOKENS = 96
MAX_MODEL_LEN = 4_096
VOCABULARY = 128_000
NGRAM = {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_min": 3, "prompt_lookup_max": 5}
COMMON: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": MAX_MODEL_LEN,
    "kv_cache_memory_bytes": 1 << 29,
    "max_num_seqs": 8,
}
OURS = scheduler_args("streaming", SchedulerOptions(eviction="recompute"), COMMON)  # nothing is copied to host memory
ARMS: dict[str, dict[str, Any]] = {
    "none": COMMON | OURS,
    "copies": COMMON | OURS | draft_args("streaming", {}),
    "vLLM's ngram": COMMON | {"speculative_config": NGRAM},
}

console = Console(highlight=False, width=None if Console().is_terminal else 120)


class SpeculationStats(EngineStats):
    """Counts the tokens that an engine verified and accepted, as vLLM itself counts them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_verified = self.num_accepted = 0

    def record(self, scheduler_stats: Any, iteration_stats: Any, **ignored: Any) -> None:
        counts = getattr(scheduler_stats, "spec_decoding_stats", None)
        if counts is not None:
            self.num_verified += counts.num_draft_tokens
            self.num_accepted += counts.num_accepted_tokens

    def take(self) -> tuple[int, int]:
        """Return the tokens verified and accepted since the last call."""
        counts = self.num_verified, self.num_accepted
        self.num_verified = self.num_accepted = 0
        return counts


@dataclass(frozen=True)
class Row:
    """One question answered by one engine."""

    arm: str
    question: str
    decode_s: float
    """Seconds from the first token to the last."""
    num_steps: int
    """Steps after that of the first token."""
    num_verified: int
    num_accepted: int
    token_ids: tuple[int, ...] = field(repr=False)
    prompt: tuple[int, ...] = field(repr=False)

    @property
    def quoted_share(self) -> float:
        """Share of the answer's runs of three tokens that stand in the prompt too."""
        runs = [self.token_ids[i : i + NUM_ANCHOR] for i in range(len(self.token_ids) - NUM_ANCHOR + 1)]
        there = {self.prompt[i : i + NUM_ANCHOR] for i in range(len(self.prompt))}
        return sum(run in there for run in runs) / max(len(runs), 1)


async def ask(engine: Any, stats: SpeculationStats, arm: str, question: str, prompt: Sequence[int]) -> Row:
    """Answer one prompt on an empty prefix cache."""
    from vllm.inputs.engine import tokens_input

    await engine.reset_prefix_cache()
    stats.take()
    params = to_vllm(SamplingParams(max_tokens=MAX_TOKENS), engine.vllm_config)
    token_ids: list[int] = []
    first_s, last_s, num_outputs = 0.0, 0.0, 0
    async for output in engine.generate(tokens_input(list(prompt)), params, f"{question}{time.monotonic()}"):
        last_s = time.monotonic()
        first_s = first_s or last_s
        token_ids += output.outputs[0].token_ids
        num_outputs += 1
    await asyncio.sleep(0.05)  # the stats of the last step come after its output
    return Row(arm, question, last_s - first_s, num_outputs - 1, *stats.take(), tuple(token_ids), tuple(prompt))


async def measure(folder: Path, num_questions: int) -> list[Row]:
    """Ask each question of each engine."""
    questions = list(QUESTIONS)[:num_questions]
    found = await retrieve(folder, questions)
    tokenizer = HuggingFaceTokenizer(folder / "model")
    prompts = {}
    for question in questions:
        assembler = PromptAssembler(
            tokenizer, TEMPLATE, question, max_model_len=MAX_MODEL_LEN, max_tokens=MAX_TOKENS, max_context_tokens=3_000
        )
        prompts[question] = assembler.assemble(found[question], is_complete=True, is_ranked=True).prompt.token_ids
    rows: list[Row] = []
    async with AsyncExitStack() as stack:
        engines = {}
        for arm, args in ARMS.items():
            processes = await stack.enter_async_context(aclosing(EngineProcesses(folder / "model")))
            stats = SpeculationStats()
            with console.status(f"starting the engine for: {arm}"):
                engine = await processes.start(args, stat_loggers=[lambda config, index, stats=stats: stats])
            engines[arm] = (engine, stats)
            for question in questions[:2]:  # not counted: vLLM compiles what the first ones need
                await ask(engine, stats, arm, question, prompts[question])
        for number, question in enumerate(track(questions, "asking", console=console, transient=True)):
            order = list(engines)
            order = order[number % len(order) :] + order[: number % len(order)]
            rows += [await ask(*engines[arm], arm, question, prompts[question]) for arm in order]
    return rows


def search_costs() -> dict[int, dict[str, float]]:
    """Return milliseconds of the first search in a prompt of so many tokens, and microseconds of each later step."""
    rng, found = random.Random(0), {}
    answer = [rng.randrange(VOCABULARY) for _ in range(500)]
    for num_tokens in (1_000, 10_000, 100_000):
        prompt = [int(rng.paretovariate(0.7)) % VOCABULARY for _ in range(num_tokens)]
        first_s, step_s = [], []
        for _ in range(7):
            draft = AnswerDraft((), 32, prompt)
            began_s = time.perf_counter()
            draft.next_tokens(answer[:3], 32)
            first_s.append(time.perf_counter() - began_s)
            shown, began_s = answer[:3], time.perf_counter()
            for token in answer[3:]:
                shown.append(token)
                draft.next_tokens(shown, 32)
            step_s.append((time.perf_counter() - began_s) / (len(answer) - 3))
        found[num_tokens] = {"first_ms": 1e3 * min(first_s), "step_us": 1e6 * min(step_s)}
    return found


def summarize(rows: Sequence[Row]) -> dict[str, dict[str, dict[str, float]]]:
    """Return what each arm needed, for the half of the questions that quote most and for the others."""
    plain = {row.question: row for row in rows if row.arm == "none"}
    by_quotes = sorted(plain, key=lambda question: -plain[question].quoted_share)
    halves = {"quote most": by_quotes[: len(by_quotes) // 2], "the others": by_quotes[len(by_quotes) // 2 :]}
    found: dict[str, dict[str, dict[str, float]]] = {}
    for half, questions in halves.items():
        for arm in ARMS:
            of_arm = [row for row in rows if row.arm == arm and row.question in questions]
            num_tokens, num_steps = (
                sum(n) for n in zip(*((len(r.token_ids) - 1, r.num_steps) for r in of_arm), strict=True)
            )
            found.setdefault(half, {})[arm] = {
                "num_answers": len(of_arm),
                "num_equal": sum(row.token_ids == plain[row.question].token_ids for row in of_arm),
                "quoted_share": statistics.mean(row.quoted_share for row in of_arm),
                "tokens_per_step": num_tokens / max(num_steps, 1),
                "num_verified": sum(row.num_verified for row in of_arm),
                "num_accepted": sum(row.num_accepted for row in of_arm),
                "decode_s_mean": statistics.mean(row.decode_s for row in of_arm),
                "ms_per_step": 1e3 * sum(row.decode_s for row in of_arm) / max(num_steps, 1),
                "ratio": statistics.median(plain[row.question].decode_s / max(row.decode_s, 1e-9) for row in of_arm),
            }
    return found


def show(found: dict[str, dict[str, dict[str, float]]]) -> None:
    """Print a table of what was measured."""
    table = Table("questions that", "speculation", "tokens a step", "accepted of verified", "seconds an answer")
    for column in ("ms a step", "ratio", "same tokens"):
        table.add_column(column)
    for half, arms in found.items():
        for arm, row in arms.items():
            table.add_row(
                half,
                arm,
                f"{row['tokens_per_step']:.2f}",
                f"{row['num_accepted']:.0f} of {row['num_verified']:.0f}",
                f"{row['decode_s_mean']:.2f}",
                f"{row['ms_per_step']:.0f}",
                f"{row['ratio']:.2f}x",
                f"{row['num_equal']:.0f} of {row['num_answers']:.0f}",
            )
    console.print(table)


def main() -> int:
    parser = demo_parser(__doc__)
    parser.add_argument("--questions", type=int, default=24, metavar="N", help="(%(default)s)")
    arguments = parse_and_prepare(parser, console)
    rows = asyncio.run(measure(arguments.folder, arguments.questions))
    found, load = summarize(rows), os.getloadavg()[0]
    show(found)
    searches = search_costs()
    for num_tokens, costs in searches.items():
        console.print(
            f"{num_tokens:,} tokens: {costs['first_ms']:.1f} ms to sort, then {costs['step_us']:.1f} us a step"
        )
    print_load(load, console)
    if arguments.json:
        as_json = {
            "date": date.today().isoformat(),
            "versions": versions(),
            "load": load,
            "halves": found,
            "searches": searches,
            "rows": [asdict(row) | {"prompt": len(row.prompt)} for row in rows],
        }
        write_atomic(arguments.json, json.dumps(as_json, indent=1) + "\n")
    return 0 if all(row["num_equal"] == row["num_answers"] for arms in found.values() for row in arms.values()) else 1


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
