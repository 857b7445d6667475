"""Follow a file that grows, and keep questions about its newest lines answered.

    python examples/watch_a_log.py FILE --model FOLDER [--question TEXT ...] [--seconds S]

Each registered question is answered ahead, after each batch of lines, and printed when its answer changes, with how
long it took. At the end stands how long the same questions take, each asked three times, with the same few answers:
when the answer is there already; from a context that is kept computed, of a version that nobody has asked about; and
afresh, in one request with all lines: where vLLM's prefix cache has all but the last ten of them, and where nothing is
cached. Without FILE a log is written, so that there is something to follow.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, BinaryIO

from rich.console import Console

from streamrag import Pipeline, PromptTemplate, SamplingParams, VllmBackend, from_passages
from streamrag.sessions import Session, Watch
from streamrag.testing import make_demo_model

QUESTIONS = ["Is there an error in the newest line?", "Is billing slower than search?"]
WINDOW = 3000
TAIL_BYTES = 10_000
ANSWERS = ("yes", "no")
NUM_SAMPLES = 3
NUM_NEW = 10
TEMPLATE = PromptTemplate(
    system="Answer the question from the data below, in a few words. The newest data stand last.",
    before_context="Data:\n\n",
    passage="{text}\n",
    no_context="(no data yet)\n",
    after_context="\nQuestion: {question}",
)
console = Console(highlight=False)


async def new_lines(path: Path) -> AsyncIterator[str]:
    """The newest that are there, then each as it is written, also after the file was cut or replaced."""
    while True:
        with path.open("rb") as file:
            start = max(file.seek(0, os.SEEK_END) - TAIL_BYTES, 0)
            file.seek(start)
            if start:
                file.readline()  # its beginning is missing
            line = b""
            while True:
                line += file.readline()
                if line.endswith(b"\n"):
                    yield line.decode(errors="replace").rstrip()
                    line = b""
                elif is_over(file, path):
                    break
                else:
                    await asyncio.sleep(0.05)


def is_over(file: BinaryIO, path: Path) -> bool:
    """Whether nothing more comes: it was cut, or another file has its name."""
    try:
        there = path.stat()
    except FileNotFoundError:  # until there is another
        return False
    return there.st_size < file.tell() or not os.path.samestat(there, os.fstat(file.fileno()))


async def tell(watch: Watch, began_s: float) -> None:
    async for answered in watch:
        at_s = time.monotonic() - began_s
        took = f"in {1e3 * answered.took_s:.0f} ms"
        console.print(f"{at_s:6.2f} s  line {answered.version:>4}  {watch.question}  [bold]{answered.text!r}[/] {took}")


async def write_log(path: Path) -> None:
    """Somebody's service."""
    rng = random.Random(0)
    with path.open("a") as file:
        for number in range(100_000):
            kind = rng.choices(["INFO", "WARN", "ERROR"], [90, 8, 2])[0]
            service = rng.choice(["auth", "search", "billing"])
            file.write(f"{number:06} {kind} {service} answered in {rng.expovariate(1 / 80):.0f} ms\n")
            file.flush()
            await asyncio.sleep(0.1)


async def stands(session: Session, version: int) -> None:
    """Wait until questions are answered from this version, or a newer one."""
    async with aclosing(session.versions()) as versions:
        while session.version < version:
            await anext(versions)


async def asked_s(session: Session, question: str, **extra: bool) -> float:
    """To the first token, as a watch has the question asked."""
    async with session.ask(question, answers=ANSWERS, params=SamplingParams(extra=extra)) as answer:
        async for _ in answer:
            pass
    return answer.result.timings.ttft_s


async def plain_s(pipeline: Pipeline, context: list[str], question: str, lines: list[str], system: str) -> float:
    """The same question in a request without a session, about these lines."""
    context[:] = lines
    first_tokens = sorted({pipeline.backend.model.tokenizer.encode(answer)[0] for answer in ANSWERS})
    params = SamplingParams(max_tokens=1, temperature=0.0, extra={"allowed_token_ids": first_tokens})
    template = replace(TEMPLATE, system=system)
    async with pipeline.stream(question, template=template, params=params, overlap=False) as answer:
        async for _ in answer:
            pass
    return answer.result.timings.ttft_after_retrieval_s


async def run(path: Path, model: Path, questions: list[str], seconds: float, *, writes: bool) -> None:
    backend = VllmBackend(model, engine_args={"block_size": 32})  # small blocks: more of a prompt is shared
    context: list[str] = []
    async with Pipeline(from_passages(lambda query: list(context)), backend) as pipeline:
        kept: list[float] = []
        cached: list[float] = []
        uncached: list[float] = []
        async with pipeline.session(template=TEMPLATE, window_tokens=WINDOW) as session:
            began_s = time.monotonic()
            watches = [session.watch(question, answers=ANSWERS) for question in questions]
            telling = [asyncio.create_task(tell(watch, began_s)) for watch in watches]
            feeding: list[asyncio.Task[Any]] = [asyncio.create_task(session.follow(new_lines(path)))]
            feeding += [asyncio.create_task(write_log(path))] if writes else []
            failed, _ = await asyncio.wait(feeding, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in feeding:
                task.cancel()
            await asyncio.wait(feeding)
            for task in failed:
                task.result()
            for watch in watches:
                await watch.at_least(session.state.num_appended)
            ahead = [await asked_s(session, question) for question in questions * NUM_SAMPLES]
            for task in telling:
                task.cancel()
            for watch in watches:
                await watch.aclose()
            state = session.state
            for sample in range(NUM_SAMPLES):
                version = await session.append(f"line {sample} behind the log")  # of it nothing is answered yet
                await stands(session, version)
                lines = [text for _, text in await session.newest(at_most=WINDOW)]
                for question in questions:
                    kept.append(await asked_s(session, question))
                    uncached.append(await asked_s(session, question, skip_reading_prefix_cache=True))
                    own = f"{sample}, {question} {TEMPLATE.system}"  # shares nothing with what others asked
                    await plain_s(pipeline, context, question, lines[:-NUM_NEW], own)
                    cached.append(await plain_s(pipeline, context, question, lines, own))
    console.print(
        f"\n{state.num_appended} lines, {state.num_tokens:,} tokens at the end.\n"
        f"To the first token of an answer, median and most of {len(kept)}:\n"
        f"  that is there already                       {of(ahead)}\n"
        f"  from context kept computed                  {of(kept)}\n"
        f"  afresh, {NUM_NEW} lines after the last, prefix cache {of(cached)}\n"
        f"  afresh, nothing cached                      {of(uncached)}"
    )


def of(times_s: list[float]) -> str:
    return f"{1e3 * median(times_s):9.2f} {1e3 * max(times_s):9.2f} ms"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", nargs="?", type=Path, help="a log that grows; without it one is written")
    parser.add_argument("--model", type=Path, help="a folder; without it a small one that is made for this")
    parser.add_argument("--question", action="append", metavar="TEXT", help="may be given more than once")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="how long (%(default)g)")
    arguments = parser.parse_args()
    if arguments.file is not None and not arguments.file.is_file():
        sys.exit(f"{arguments.file} is no file")
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or make_demo_model(Path(folder) / "model")
        path = arguments.file or Path(folder) / "service.log"
        if arguments.file is None:
            path.touch()
        questions = arguments.question or QUESTIONS
        try:
            asyncio.run(run(path, model, questions, arguments.seconds, writes=arguments.file is None))
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
