"""Follow a file that grows, and keep questions about its newest lines answered.

    python examples/watch_a_log.py FILE --model FOLDER [--question TEXT ...] [--seconds S]

Each registered question is answered ahead, after each batch of lines, and printed when its answer changes. At the end
stands how long an answer takes that is there already, how long one takes from a context that is kept computed, and how
long from the same lines afresh. Without FILE a log is written, so that there is something to follow.
"""

import argparse
import asyncio
import os
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from pathlib import Path
from statistics import median
from typing import BinaryIO

from rich.console import Console

from streamrag import Pipeline, SamplingParams, VllmBackend, from_passages
from streamrag.sessions import Session, Watch
from streamrag.testing import make_demo_model

QUESTIONS = ["Is there an error in the newest line?", "Is billing slower than search?"]
WINDOW = 3000
TAIL_BYTES = 10_000
ANSWERS = ("yes", "no")
PARAMS = SamplingParams(max_tokens=16)
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


async def follow(session: Session, path: Path, lines: list[str]) -> None:
    async for line in new_lines(path):
        await session.append(line)
        lines.append(line)


async def tell(watch: Watch, began_s: float) -> None:
    async for answered in watch:
        at_s = time.monotonic() - began_s
        console.print(f"{at_s:6.2f} s  line {answered.version:>4}  {watch.question}  [bold]{answered.text!r}[/]")


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


async def first_token_s(session: Session, question: str, answers: tuple[str, ...] = ()) -> float:
    newest = session.state.num_appended
    async with session.ask(question, answers=answers, at_least=newest, params=PARAMS) as answer:
        async for _ in answer:
            pass
    return answer.result.timings.ttft_s


async def run(path: Path, model: Path, questions: list[str], seconds: float, *, writes: bool) -> None:
    backend = VllmBackend(model, engine_args={"block_size": 32})  # small blocks: more of a prompt is shared
    async with Pipeline(from_passages(lambda query: []), backend) as pipeline:
        lines: list[str] = []
        async with pipeline.session(window_tokens=WINDOW) as session:
            began_s = time.monotonic()
            watches = [session.watch(question, answers=ANSWERS) for question in questions]
            telling = [asyncio.create_task(tell(watch, began_s)) for watch in watches]
            feeding = [asyncio.create_task(follow(session, path, lines))]
            feeding += [asyncio.create_task(write_log(path))] if writes else []
            failed, _ = await asyncio.wait(feeding, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
            for task in feeding:
                task.cancel()
            for task in failed:
                task.result()
            for watch in watches:
                await watch.at_least(session.state.num_appended)
            ahead = [await first_token_s(session, question, ANSWERS) for question in questions]
            kept = [await first_token_s(session, f"{question} ({i})") for i, question in enumerate(questions * 3)]
            state = session.state
            for task in telling:
                task.cancel()
        async with pipeline.session(window_tokens=WINDOW) as other:  # another text in front: nothing is shared
            afresh = []
            for line in ["the same lines again:", *lines]:
                await other.append(line)
            afresh.append(await first_token_s(other, questions[0]))
    console.print(
        f"\n{state.num_appended} lines, {state.num_tokens:,} tokens at the end. To the first token of an answer\n"
        f"  that is there already      {1e3 * median(ahead):9.2f} ms\n"
        f"  from context kept computed {1e3 * median(kept):9.2f} ms\n"
        f"  from the same lines afresh {1e3 * median(afresh):9.2f} ms"
    )


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
