"""Do steps take longer while KV is copied to host memory beside them? On the real engine, in one run.

    python -m studies.gpu.copy_overlap [--model MODEL] [--engine-args JSON] [--json FILE]

Four steps copy as much as can be copied while they compute, the next four nothing, and so on; each four that copy are
compared with those before and after them. First with steps that prefill, then with steps that decode. A GPU copies
beside what it computes: the goal is 5 %. A CPU does both itself, one after the other. Two minutes with the tiny model
that is made where none is named; random weights will do: {"load_format": "dummy"}.
"""

import argparse
import asyncio
import json
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamrag.backends.vllm.client.arguments import scheduler_args
from streamrag.backends.vllm.facts import EngineFacts
from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.errors import BackendError
from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama
from streamrag_bench.measured_engine import EngineClient, running_engine
from streamrag_bench.profile.step_times import FreshTokens, answer, warm_up
from streamrag_bench.provenance import versions

from .copying_scheduler import KEY, PHASE

GOAL = 0.05
NUM_ROUNDS = 5
NUM_PREFILLS = 10 * PHASE
"""Steps in a round."""
NUM_DECODES, NUM_DECODED = 8, 16 * PHASE
"""Requests that decode at a time, and the tokens of their answers."""
NUM_COPIED = 4 * PHASE
"""Steps for which there is enough to copy, at least."""
LONGEST_HELD = 2_048
"""Tokens of a partial prompt."""
LONGEST_WAIT_S, POLL_S = 120.0, 0.01
MODEL: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_model_len": 12_288,
}


@dataclass(frozen=True, slots=True)
class Size:
    """So that steps and copies take about as long as each other."""

    budget: int
    """Tokens of a step."""
    num_held: int
    """Tokens of partial prompts, whose KV is copied."""
    host_kv_bytes: int


CPU, CUDA = Size(256, 16_384, 1 << 30), Size(512, 98_304, 16 << 30)

console = Console(highlight=False, width=None if Console().is_terminal else 120)


@dataclass(frozen=True, slots=True)
class Step:
    """As the scheduler took it down."""

    num_tokens: int
    num_requests: int
    num_blocks: int
    """Copied to host memory beside it."""
    duration_s: float
    copies_s: float
    """What these copies take."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Steps that copy, with those around them that do not."""

    ratio: float
    step_s: float
    """Without copies."""
    num_blocks: float
    """A step."""
    share: float
    """Share of the time in which copies were under way."""


# ------------------------------------------------------------------------------------------------------------ measuring


@asynccontextmanager
async def held(client: EngineClient, tokens: FreshTokens, num_tokens: int) -> AsyncIterator[None]:
    """Inside, partial prompts of so many tokens are computed."""
    before, wanted = len(client.steps), 0
    async with AsyncExitStack() as stack:
        for num in sizes(client, num_tokens):
            wanted += num - 1  # of a partial prompt the last token waits
            await stack.enter_async_context(client.stream("partial", tokens.take(num), 1))
        await until(lambda: sum(step.num_tokens for step in client.steps[before:]) >= wanted)
        yield


def sizes(client: EngineClient, num_tokens: int) -> Iterator[int]:
    """Lengths of prompts that together have `num_tokens`, none of them too long."""
    most = min(client.facts.max_model_len - 2, LONGEST_HELD)
    for num_before in range(0, num_tokens, most):
        yield min(most, num_tokens - num_before)


async def together(client: EngineClient, prompts: Sequence[list[int]], num_output_tokens: int) -> None:
    """Ask all, and wait for all answers."""
    async with asyncio.TaskGroup() as tasks:
        for index, prompt in enumerate(prompts):
            tasks.create_task(answer(client, f"beside {index}", prompt, num_output_tokens))


async def until(is_true: Callable[[], bool]) -> None:
    """:raises BackendError: that takes too long."""
    for _ in range(int(LONGEST_WAIT_S / POLL_S)):
        if is_true():
            return
        await asyncio.sleep(POLL_S)
    raise BackendError(f"the engine has not computed the prompts in {LONGEST_WAIT_S:.0f} s")


async def measure(
    model: str, args: Mapping[str, Any], size: Size, folder: Path, done: Callable[[str], None]
) -> EngineFacts:
    on, tokens = folder / "on", FreshTokens("overlap")
    async with running_engine(model, args, policy=None) as client:
        facts = client.facts
        await warm_up(client, facts.max_num_batched_tokens, facts.max_model_len)
        for number in range(NUM_ROUNDS):
            async with held(client, tokens, size.num_held):
                on.touch()
                # One: with several, those that copy might all be the first or the last steps of a prompt.
                await together(client, [tokens.take(min(NUM_PREFILLS * size.budget, facts.max_model_len - 2))], 1)
                on.unlink()
            done(f"round {number + 1}: prefill")
            async with held(client, tokens, size.num_held):
                on.touch()
                await together(client, [tokens.take(32) for _ in range(NUM_DECODES)], NUM_DECODED)
                on.unlink()
            done(f"round {number + 1}: decode")
    return facts


# ------------------------------------------------------------------------------------------------------------ comparing


def read_steps(path: Path) -> list[Step]:
    return [Step(**json.loads(line)) for line in path.read_text().splitlines()]


def compare(steps: Sequence[Step], is_of_kind: Callable[[Step], bool]) -> Iterator[Comparison]:
    """Each phase that copies in all its steps but the first, with the two around it that do not copy at all.

    Not the first step of a phase: a copy may still be under way that began in the one before.
    """
    phases = [steps[i + 1 : i + PHASE] for i in range(0, len(steps) - PHASE + 1, PHASE)]
    for before, copying, after in zip(phases, phases[1:], phases[2:], strict=False):
        if not all(map(is_of_kind, (*before, *copying, *after))):
            continue
        if any(step.num_blocks for step in (*before, *after)) or not all(step.num_blocks for step in copying):
            continue
        step_s = (mean_s(before) + mean_s(after)) / 2
        share = sum(min(s.copies_s, s.duration_s) for s in copying) / sum(s.duration_s for s in copying)
        yield Comparison(mean_s(copying) / step_s, step_s, mean(step.num_blocks for step in copying), share)


def mean_s(steps: Sequence[Step]) -> float:
    return mean(step.duration_s for step in steps)


def told(comparisons: Sequence[Comparison]) -> dict[str, float]:
    ratios = sorted(c.ratio for c in comparisons)
    return {
        "num_comparisons": len(ratios),
        "ratio": median(ratios),
        "ratio_p10": ratios[len(ratios) // 10],
        "ratio_p90": ratios[len(ratios) * 9 // 10],
        "step_s": median(c.step_s for c in comparisons),
        "blocks_per_step": median(c.num_blocks for c in comparisons),
        "share_of_time_copying": median(c.share for c in comparisons),
    }


def show(found: Mapping[str, Mapping[str, float]], facts: EngineFacts) -> None:
    table = Table(title=f"{facts.model} on {facts.device}: steps with copies, without = 1", title_justify="left")
    table.add_column("steps that")
    for name in ("compared", "ratio", "P10..P90", "ms without", "blocks", "MB", "copying", ""):
        table.add_column(name, justify="right")
    for kind, of in found.items():
        table.add_row(
            kind,
            f"{of['num_comparisons']} x {PHASE - 1}",
            f"{of['ratio']:.3f}",
            f"{of['ratio_p10']:.2f}..{of['ratio_p90']:.2f}",
            f"{1e3 * of['step_s']:.2f}",
            f"{of['blocks_per_step']:.0f}",
            f"{of['blocks_per_step'] * facts.block_bytes / 1e6:.1f}",
            f"{of['share_of_time_copying']:.0%}",
            "" if not facts.is_cuda else "met" if of["ratio"] <= 1 + GOAL else f"over {GOAL:.0%}",
        )
    console.print(table)
    if not facts.is_cuda:
        console.print("A CPU copies and computes one after the other: copies are expected to add their own time.")


def engine_args(given: Mapping[str, Any], size: Size, folder: Path) -> dict[str, Any]:
    args: dict[str, Any] = {**given, "max_num_batched_tokens": size.budget}
    args |= scheduler_args(
        "streaming", SchedulerOptions(policy="fcfs", eviction="swap"), args, host_kv_bytes=size.host_kv_bytes
    )
    args["additional_config"] |= {KEY: (str(folder), size.num_held // NUM_COPIED)}
    args["additional_config"]["streamrag"]["num_partial_tokens"] = None  # all steps are full
    return args | {"scheduler_cls": "studies.gpu.copying_scheduler.scheduler"}


def run(arguments: argparse.Namespace, folder: Path) -> tuple[EngineFacts, list[Step]]:
    import torch

    size = CUDA if torch.cuda.is_available() else CPU
    model = arguments.model or str(make_tiny_llama(folder / "tiny-llama", **MODEL))
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting the engine", total=2 * NUM_ROUNDS)
        done = partial(bar.update, task, advance=1)
        args = engine_args(arguments.engine_args, size, folder)
        facts = asyncio.run(measure(model, args, size, folder, lambda what: done(description=what)))
    return facts, read_steps(folder / "steps.jsonl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", metavar="MODEL", help="folder or name of a model for vLLM (a tiny one, made here)")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="of vLLM, as a JSON object")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="streamrag-") as folder:
        facts, steps = run(arguments, Path(folder))
    budget = facts.max_num_batched_tokens
    kinds: dict[str, Callable[[Step], bool]] = {
        "prefill": lambda step: step.num_tokens == budget and step.num_requests <= 2,
        "decode": lambda step: step.num_tokens == step.num_requests == NUM_DECODES,
    }
    compared = {kind: list(compare(steps, is_of_kind)) for kind, is_of_kind in kinds.items()}
    if empty := [kind for kind, of in compared.items() if not of]:
        console.print(f"nothing to compare of {' and '.join(empty)} in {len(steps)} steps")
        return 1
    found = {kind: told(of) for kind, of in compared.items()}
    show(found, facts)
    if arguments.json:
        made = {
            "command": " ".join(["python", *sys.argv]),
            "versions": versions(),
            "model": facts.model,
            "device": facts.device,
            "block_bytes": facts.block_bytes,
            "max_num_batched_tokens": budget,
            "results": found,
        }
        write_atomic(arguments.json, json.dumps(made, indent=2) + "\n")
    return int(facts.is_cuda and any(of["ratio"] > 1 + GOAL for of in found.values()))


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    sys.exit(main())
