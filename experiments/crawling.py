"""What a crawl costs: milliseconds of each step for a page, pages a second, the first page's delay, memory.

The pages are this repository's documentation as a site on loopback. Steps are timed in this process, one page after the
other; whole crawls run with worker processes, as in a program. Servers answer at once, so that nothing but our own work
is measured; a real one takes longer than all of it.

    python experiments/crawling.py
"""

import argparse
import asyncio
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from streamrag import Append, WebSource
from streamrag.core.text import TextPassage, split_markdown
from streamrag.sources.http.robots import parse
from streamrag.sources.pages.near_duplicates import NearDuplicates
from streamrag.sources.pages.relevant_passages import assemble, relevant_stems, select
from streamrag.support.files import write_atomic

ROOT = Path(__file__).resolve().parent.parent
QUERY = "How does a pipeline stream retrieved chunks into the engine?"
ROBOTS = b"User-agent: *\n" + b"".join(b"Disallow: /private/%d/*.html\n" % number for number in range(100))
console = Console(stderr=True)


class Handler(SimpleHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def end_headers(self) -> None:
        self.send_header("Cache-Control", "max-age=3600")
        super().end_headers()

    def log_message(self, *_: object) -> None:
        pass


def serve(folder: str) -> None:
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Handler, directory=folder)) as server:
        print(server.server_port, flush=True)
        server.serve_forever()


def timed(do: Callable[[], Any], times_ms: list[float]) -> Any:
    """What it returns. The time is that of computing: what other programs take does not count."""
    started_s = time.process_time()
    result = do()
    times_ms.append(1e3 * (time.process_time() - started_s))
    return result


def steps(site: Path, scratch: Path) -> dict[str, float]:
    """Median milliseconds of each step for a page."""
    os.environ.update(
        CRAWL4_AI_BASE_DIRECTORY=str(scratch), CRAWL4AI_NO_CLOUD_NOTICE="1", LITELLM_LOCAL_MODEL_COST_MAP="True"
    )
    from fpdf import FPDF

    from streamrag.sources.http.disk_store import DiskStore
    from streamrag.sources.pages.page_cleaner import PageCleaner
    from streamrag.sources.pages.page_content import JSON
    from streamrag.sources.pages.prune import prune
    from streamrag.sources.workers.pdf import read_pdf

    options = {"page_timeout_s": 10.0, "max_page_cpu_s": 60.0, "max_page_memory_bytes": 1 << 30, "cdp_url": None}
    cleaner = PageCleaner(user_agent="streamrag", **options)  # type: ignore[arg-type]
    store = DiskStore(scratch / "cache", 64 << 20)
    store.open()
    times_ms: dict[str, list[float]] = {}
    seen, known = set[bytes](), NearDuplicates()
    pages = sorted(site.glob("*.html"))
    for path in track(pages, "steps", console=console, transient=True):
        body, url = path.read_bytes(), f"http://docs.example/{path.name}"
        job = {"url": url, "kind": "html", "charset": "utf-8", "query": QUERY, "max_chars": 8000}

        def step(name: str, do: Callable[[], Any]) -> Any:
            return timed(do, times_ms.setdefault(name, []))

        rules = step("robots.txt of 100 rules: read (once a host)", lambda: parse(ROBOTS, "streamrag/1"))
        assert rules.parser
        step("robots.txt: look a page up", partial(rules.parser.can_fetch, url, "streamrag/1"))
        pruned = step("prune", partial(prune, url, body.decode()))
        cleaned = step("prune and clean (crawl4ai)", partial(cleaner._read, job, body))
        step("keep on disk", partial(store.put, url, JSON.dump_json(cleaned)))
        step("read from disk what was cleaned", partial(store.get, url))
        passages = step("split into passages", partial(split_markdown, cleaned.text))
        stem = relevant_stems(QUERY, cleaner._stem)
        choose = partial(select, passages, QUERY, title=cleaned.title, max_chars=8000, stem=stem)
        chosen: list[TextPassage] = step("choose what is relevant (BM25)", choose)
        step("assemble, near-duplicates left out", partial(assemble, chosen, seen, known.has))
        known.end_page()
        document = FPDF()
        document.set_font("helvetica", size=10)
        document.add_page()
        document.multi_cell(0, 5, cleaned.text[:3000].encode("latin-1", errors="replace").decode("latin-1"))
        pdf = bytes(document.output())
        step("read a page of PDF, 3,000 characters", partial(read_pdf, pdf, max_chars=10**6, max_cpu_s=60))
        del pruned
    return {name: statistics.median(each) for name, each in times_ms.items()}


def resident_mb(process_id: int) -> float:
    status = Path(f"/proc/{process_id}/status").read_text()
    return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS:"))


async def crawl(source: WebSource) -> tuple[int, float, float]:
    """Pages, seconds to the first, and to the last."""
    started_s = time.perf_counter()
    first_s, num_pages = 0.0, 0
    async with aclosing(source.stream(QUERY)) as events:
        async for event in events:
            first_s = first_s or time.perf_counter() - started_s
            num_pages += isinstance(event, Append)
    return num_pages, first_s, time.perf_counter() - started_s


async def crawls(url: str, cache: Path, rounds: int) -> Iterator[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    arms: dict[str, dict[str, Any]] = {
        "1 worker": {"num_workers": 1},
        "2 workers": {"num_workers": 2},
        "1 worker, nothing kept yet": {"num_workers": 1, "cache_folder": cache},
        "1 worker, all kept on disk": {"num_workers": 1, "cache_folder": cache},
    }
    for name, options in arms.items():
        source = WebSource([url], allow_private=True, max_pages=30, **options)
        started_s = time.perf_counter()
        await source.start(lambda line: None)
        start_s = time.perf_counter() - started_s
        assert source._workers
        try:
            for number in range(1 if "nothing" in name else rounds):
                num_pages, first_s, last_s = await crawl(source)
                worker_mb = max(map(resident_mb, source._workers.process_ids))
                row = {"arm": name, "round": number, "num_pages": num_pages, "first_s": first_s, "last_s": last_s}
                rows.append(row | {"start_s": start_s, "worker_mb": worker_mb, "program_mb": resident_mb(os.getpid())})
        finally:
            await source.aclose()
    return iter(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3, metavar="N", help="crawls of each kind (3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    parser.add_argument("--serve", metavar="FOLDER", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.serve)
        return
    from streamrag.demo.demo_folder import build_site

    with tempfile.TemporaryDirectory() as folder:
        site = Path(folder, "site")
        num_pages = build_site(ROOT / "docs", site)
        (site / "robots.txt").write_bytes(ROBOTS)
        server = subprocess.Popen([sys.executable, __file__, "--serve", str(site)], stdout=subprocess.PIPE, text=True)
        try:
            assert server.stdout
            url = f"http://127.0.0.1:{int(server.stdout.readline())}/index.html"
            with console.status("crawls"):
                rows = list(asyncio.run(crawls(url, Path(folder, "cache"), arguments.rounds)))
            medians_ms = steps(site, Path(folder))
        finally:
            server.terminate()
            server.communicate()
    out = Console()
    table = Table(title=f"Milliseconds of computing for a page, median of {num_pages}", title_justify="left")
    table.add_column("step")
    table.add_column("ms", justify="right")
    for name, median_ms in medians_ms.items():
        table.add_row(name, f"{median_ms:.2f}")
    out.print(table)
    table = Table(title="A crawl of the whole site, medians", title_justify="left")
    for heading in ("", "first page, s", "pages a second", "a worker, MB", "the program, MB", "starting, s"):
        table.add_column(heading, justify="right" if table.columns else "left")
    for arm in dict.fromkeys(row["arm"] for row in rows):
        mine = [row for row in rows if row["arm"] == arm]

        def median(value: Callable[[dict[str, Any]], float], mine: list[dict[str, Any]] = mine) -> float:
            return statistics.median(map(value, mine))

        table.add_row(
            arm,
            f"{median(lambda row: row['first_s']):.2f}",
            f"{median(lambda row: row['num_pages'] / row['last_s']):.1f}",
            f"{median(lambda row: row['worker_mb']):.0f}",
            f"{median(lambda row: row['program_mb']):.0f}",
            f"{median(lambda row: row['start_s']):.1f}",
        )
    out.print(table)
    if arguments.json:
        system = f"{platform.system()} {platform.machine()}"
        machine = {
            "python": platform.python_version(),
            "system": system,
            "num_cpus": os.cpu_count(),
            "load": os.getloadavg()[0],
        }
        command = "python experiments/crawling.py --json FILE"
        found = {"command": command, "machine": machine, "step_ms": medians_ms, "crawls": rows}
        write_atomic(arguments.json, json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
