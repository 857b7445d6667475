"""The event loop's worst stall while sources and whole queries run, beside that of a process that only ticks.

Run it with `make -C bench event-loop`. A task sleeps for a millisecond again and again, and notes how much later than
that it wakes. The control does the same in a process of its own at the same time, so that both see the same busy
machine: what the loop suffers beyond the control is what streamrag's parts in this process cost it.

Queries have a real tokenizer, of 8,000 tokens that were learnt from the documentation, and a backend that only reads
its prompts, for a model of 131,072 tokens. Pages of 4 KB are usual, those of 1 MB and 8 MB are somebody's own source's.
"""

import argparse
import asyncio
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from streamrag import CrawlOptions, Pipeline, VectorSource, WebSource
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import Append, Chunk, ModelInfo, Source
from streamrag.sources.index.build import build_index
from streamrag.support.files import write_atomic
from streamrag.testing import ScriptedBackend, ScriptedSource, make_tiny_llama
from studies.folders import ROOT

TICK_S = 0.001
QUERY = "stop a query early"

console = Console(highlight=False)


class Ticker:
    """Collects how late, in seconds, a task wakes that asked for a tick."""

    def __init__(self) -> None:
        self.lateness_s: list[float] = []

    async def run(self) -> None:
        while True:
            before_s = time.perf_counter()
            await asyncio.sleep(TICK_S)
            self.lateness_s.append(time.perf_counter() - before_s - TICK_S)

    def take(self) -> list[float]:
        taken, self.lateness_s = self.lateness_s, []
        return taken


async def control() -> None:
    """The other process: ticks, and reports its lateness for each line that it is sent."""
    ticker = Ticker()
    task = asyncio.create_task(ticker.run())
    while await asyncio.to_thread(sys.stdin.readline):
        print(json.dumps(ticker.take()), flush=True)
    task.cancel()


class ReadingBackend(ScriptedBackend):
    """Reads prompts of a real tokenizer, and answers at once."""

    def __init__(self, model: Path) -> None:
        super().__init__()
        self.model = ModelInfo("tiny", HuggingFaceTokenizer(model), 131_072)


def make_model(folder: Path) -> Path:
    """One whose tokenizer has learnt the documentation."""
    corpus = [path.read_text() for path in sorted((ROOT / "docs").glob("*.md"))]
    return make_tiny_llama(folder, corpus=corpus, vocab_size=8000, max_model_len=131_072)


def pages(num_pages: int, num_characters: int) -> ScriptedSource:
    """A source of so many different pages of documentation, each of this length."""
    text = "".join(path.read_text() for path in sorted((ROOT / "docs").glob("*.md")))
    text *= 1 + num_characters // len(text)
    return ScriptedSource(
        [Append(Chunk(f"Page {number}. {text}"[:num_characters], f"{number}.md")) for number in range(num_pages)]
    )


async def ask(source: Source, backend: ReadingBackend, question: str, num_queries: int) -> None:
    """So many queries at once."""

    async def one() -> None:
        async for _ in pipeline.stream(question):
            pass

    async with Pipeline(source, backend, overlap=True) as pipeline:
        await asyncio.gather(*(one() for _ in range(num_queries)))


async def read_all(source: Source, query: str) -> int:
    """The number of events of one query."""
    async with aclosing(source.stream(query)) as events:  # type: ignore[type-var]
        return len([event async for event in events])


async def measure(rounds: int) -> list[dict[str, float | str]]:
    from streamrag.demo.demo_folder import build_site

    rows: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        site, index = Path(folder, "site"), Path(folder, "index")
        backend = await asyncio.to_thread(lambda: ReadingBackend(make_model(Path(folder, "model"))))
        build_site(ROOT / "docs", site)
        await asyncio.to_thread(build_index, site, index)
        server = await asyncio.create_subprocess_exec(
            sys.executable, str(ROOT / "examples" / "demo_site.py"), str(site), stdout=subprocess.PIPE
        )
        other = await asyncio.create_subprocess_exec(
            sys.executable, __file__, "--control", stdin=subprocess.PIPE, stdout=subprocess.PIPE, limit=1 << 24
        )
        assert server.stdout
        assert other.stdin
        assert other.stdout
        url = f"http://127.0.0.1:{int(await server.stdout.readline())}/index.html"
        web, vector = WebSource([url], CrawlOptions(allow_private=True)), VectorSource(index, k=5)
        ticker = Ticker()
        try:
            await asyncio.gather(web.start(print), vector.start(print))
            ticking = asyncio.create_task(ticker.run())
            doings: list[tuple[str, Callable[[], Awaitable[object]]]] = [
                ("nothing", lambda: asyncio.sleep(2)),
                ("a crawl", lambda: read_all(web, QUERY)),
                ("a search", lambda: read_all(vector, QUERY)),
                (
                    "a crawl and 50 searches",
                    lambda: asyncio.gather(read_all(web, QUERY), *(read_all(vector, QUERY) for _ in range(50))),
                ),
                ("a query, 20 pages of 4 KB", lambda: ask(pages(20, 4_000), backend, QUERY, 1)),
                ("8 queries, 20 pages of 4 KB", lambda: ask(pages(20, 4_000), backend, QUERY, 8)),
                ("a query, 8 pages of 60 KB", lambda: ask(pages(8, 60_000), backend, QUERY, 1)),
                ("a query, a page of 1 MB", lambda: ask(pages(1, 1_000_000), backend, QUERY, 1)),
                ("a query, a page of 8 MB", lambda: ask(pages(1, 8_000_000), backend, QUERY, 1)),
                ("a query of 100 KB", lambda: ask(pages(1, 4_000), backend, (QUERY * 10_000)[:100_000], 1)),
            ]
            for name, do in doings:
                for _ in range(rounds):
                    other.stdin.write(b"\n")
                    await other.stdout.readline()
                    ticker.take()
                    await do()
                    mine = ticker.take()
                    other.stdin.write(b"\n")
                    theirs = json.loads(await other.stdout.readline())
                    rows.append({"doing": name, "loop_ms": 1e3 * max(mine), "control_ms": 1e3 * max(theirs)})
            ticking.cancel()
        finally:
            await asyncio.gather(web.aclose(), vector.aclose())
            for process in (server, other):
                process.terminate()
                await process.wait()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="times to do each thing (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--control", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.control:
        asyncio.run(control())
        return
    rows = asyncio.run(measure(arguments.rounds))
    table = Table(title="Worst lateness of a 1 ms tick, milliseconds", title_justify="left")
    for heading in ("while this process does", "in its loop", "in a process that only ticks", "more"):
        table.add_column(heading, justify="right" if table.columns else "left")
    for row in rows:
        mine, theirs = float(row["loop_ms"]), float(row["control_ms"])
        table.add_row(str(row["doing"]), f"{mine:.1f}", f"{theirs:.1f}", f"{mine - theirs:+.1f}")
    console.print(table)
    console.print("The target is under 20 ms more.")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        machine = {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "num_cpus": os.cpu_count(),
        }
        command = "python -m studies.event_loop.run --json FILE"
        write_atomic(arguments.json, json.dumps({"command": command, "machine": machine, "rounds": rows}, indent=2))


if __name__ == "__main__":
    main()
