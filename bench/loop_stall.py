"""The event loop's worst stall while a crawl and a DiskANN search run, beside that of a process that only ticks.

Run it with `make bench-stall`. A task sleeps for a millisecond again and again, and notes how much later than that it
wakes. The control does the same in a process of its own at the same time, so that both see the same busy machine: what
the loop suffers beyond the control is what streamrag's parts in this process cost it.
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
from contextlib import aclosing
from pathlib import Path

from rich.console import Console
from rich.table import Table

from streamrag import VectorSource, WebSource
from streamrag.core import Source
from streamrag.files import write_whole
from streamrag.sources.index import build_index

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "examples"))

TICK_S = 0.001

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


async def read_all(source: Source, query: str) -> int:
    """The number of events of one query."""
    async with aclosing(source.stream(query)) as events:  # type: ignore[type-var]
        return len([event async for event in events])


async def measure(rounds: int) -> list[dict[str, float | str]]:
    from demo_site import build_site

    rows: list[dict[str, float | str]] = []
    with tempfile.TemporaryDirectory() as folder:
        site, index = Path(folder, "site"), Path(folder, "index")
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
        web, vector = WebSource([url], allow_private=True), VectorSource(index, k=5)
        ticker = Ticker()
        try:
            await asyncio.gather(web.start(print), vector.start(print))
            ticking = asyncio.create_task(ticker.run())
            doings: list[tuple[str, list[Source]]] = [
                ("nothing", []),
                ("a crawl", [web]),
                ("a search", [vector]),
                ("a crawl and 50 searches", [web, *[vector] * 50]),
            ]
            for name, sources in doings:
                for _ in range(rounds):
                    other.stdin.write(b"\n")
                    await other.stdout.readline()
                    ticker.take()
                    if sources:
                        await asyncio.gather(*(read_all(source, "stop a query early") for source in sources))
                    else:
                        await asyncio.sleep(2)
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
        command = "python bench/loop_stall.py --json FILE"
        write_whole(arguments.json, json.dumps({"command": command, "machine": machine, "rounds": rows}, indent=2))


if __name__ == "__main__":
    main()
