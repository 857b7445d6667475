"""The demo: the timing that it gives to retrieval, and what it keeps when it is interrupted."""

import argparse
import importlib
import json
import statistics
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest

from streamrag import Append, Chunk, Pipeline, SamplingParams
from streamrag.telemetry import DraftChanged, QueryEvent
from streamrag.testing import ScriptedSource
from streamrag.trace import Trace, TracedAppend, TracedChunk, TracedQuery, TracedSkip, TracedUpdate
from streamrag_bench.compare.pairs import ComparedGroup, ask_round
from tests.query.test_answer_ahead import DraftingBackend

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"


@pytest.fixture
def demo(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo")


@pytest.fixture
def timing(demo: ModuleType) -> ModuleType:
    return sys.modules["demo_timing"]


class Engine(DraftingBackend):
    """A backend with a prefix cache to empty."""

    async def reset_prefix_cache(self) -> bool:
        return True


async def asked_pair(source: ScriptedSource) -> Any:
    async with Pipeline(source, Engine()) as pipeline:
        (pair,) = await ask_round(pipeline, ["Why?"], {"params": SamplingParams(max_tokens=20)})
        return pair


def crawled(name: str, *pages: str) -> TracedQuery:
    """A crawl of quick pages, each with a chunk for each letter, and of as many that were of no use."""
    events = [
        TracedAppend(0.01 * number, TracedChunk(f"{name} {number} {letter}", 1, letter, f"page-{number}"))
        for number, page in enumerate(pages)
        for letter in page
    ]
    skipped = tuple(TracedSkip(0.01 * number + 0.005, "a", "of no use") for number in range(len(pages)))
    return TracedQuery(name, 0.0, name, tuple(events), 1.0, skipped=skipped)


def test_pages_get_the_times_of_real_crawls(timing: ModuleType) -> None:
    queries = [crawled(str(number), *("ab" for _ in range(3 + number))) for number in range(5)]
    found = timing.as_on_the_web(Trace(tuple(queries))).queries
    assert [len(query.events) for query in found] == [6, 8, 10, 12, 14], "no chunk is lost"
    for query in found:
        times = {event.chunk.uri: event.at_s for event in query.events}
        assert len({(event.chunk.uri, event.at_s) for event in query.events}) == len(times), "pages come whole"
        assert query.events[0].at_s < 0.5 * query.end_s
        assert [*times.values()] == sorted(times.values())
        assert max(times.values()) <= query.end_s
        assert query.events[0].hint is not None
    ends = [query.end_s for query in found]
    assert ends == sorted(ends)
    assert statistics.median(ends) == pytest.approx(8.7, rel=0.05)


def test_a_crawl_without_pages_and_one_with_very_many_get_times_too(timing: ModuleType) -> None:
    skipped = TracedQuery("nothing", 0.0, "nothing", (), 0.2, skipped=(TracedSkip(0.1, "a", "gone"),))
    many = crawled("many", *"x" * 40)
    empty, full = timing.as_on_the_web(Trace((skipped, many))).queries
    assert (empty.events, empty.end_s > 1) == ((), True)
    assert len(full.events) == 40
    assert full.events[-1].at_s <= full.end_s


def test_a_search_takes_as_long_as_with_a_hosted_reranker(timing: ModuleType) -> None:
    chunk = TracedChunk("a", 1, "a", "a")
    query = TracedQuery("q", 0.0, "q", (TracedUpdate(0.05, (chunk,)), TracedUpdate(0.1, (chunk,))), 0.1)
    (found,) = timing.as_with_a_hosted_reranker(Trace((query,))).queries
    assert [event.at_s for event in found.events] == pytest.approx([0.38, 0.76])
    assert found.end_s == pytest.approx(0.76)


@pytest.fixture
def interrupted(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a demo that is interrupted after one pair."""

    async def run(arguments: argparse.Namespace, groups: list[ComparedGroup], ahead: list[Any]) -> None:
        groups[0].rounds.append((await asked_pair(ScriptedSource([Append(Chunk("Damp.", "printers.md"))])),))
        raise KeyboardInterrupt

    monkeypatch.setattr(demo, "run", run)
    monkeypatch.setattr(demo, "prepare", lambda arguments: None)
    monkeypatch.setattr(sys, "argv", ["demo.py", "--out", str(tmp_path)])
    return tmp_path


def test_ctrl_c_keeps_what_was_measured(
    demo: ModuleType, interrupted: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main() == 130
    printed = capsys.readouterr().out
    assert "crawl, 1 pair:" in printed
    assert "one pair shows too little" in " ".join(printed.split())
    assert "unclear" in printed, "one pair shows nothing"
    results = json.loads((interrupted / "results.json").read_text())
    assert 0.0 <= results.pop("share of cores kept busy by others") <= 1.0
    assert {name: len(rows) for name, rows in results.items()} == {"crawl": 2}
    assert (interrupted / "timeline.png").exists()


async def test_a_provisional_answer_is_shown_before_retrieval_ends_and_drawn(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = sys.modules["demo_ahead"]
    is_drafted = anyio.Event()

    def show(event: QueryEvent) -> None:
        display.show(event)
        if isinstance(event, DraftChanged) and event.text == "see alpha":
            is_drafted.set()

    alpha = Append(Chunk("alpha", "a.md", "The first page"))
    without = await asked_pair(ScriptedSource([alpha]))
    backend = Engine()
    async with Pipeline(ScriptedSource([alpha, is_drafted]), backend) as pipeline:
        with part.DraftDisplay(demo.console, demo.printable) as display:
            pair = await part.ask_ahead(pipeline, backend, without, {"params": SamplingParams(max_tokens=20)}, show)
    lines = [line[10:].strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "+ The first page",
        "perhaps, after 1 page: see alpha",
        "retrieval complete",
        "answer: see alpha",
    ]
    assert "The answers have the same tokens; 9 of 9 came from the draft." in pair.outcome()
    assert [row["arm"] for row in pair.rows] == ["with drafts", "without drafts"]
    demo.save(tmp_path, [], [pair], 0.0)
    assert json.loads((tmp_path / "results.json").read_text())["answers ahead"] == pair.rows
    assert (tmp_path / "timeline.png").exists()
