"""The comparison of the demo: its intervals, when it stops, and what it keeps."""

import argparse
import importlib
import json
import math
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import anyio
import pytest
from scipy import stats  # type: ignore[import-untyped]

from streamrag import Append, Chunk, Pipeline, SamplingParams
from streamrag.telemetry import DraftChanged, QueryEvent, Timings
from streamrag.testing import ScriptedBackend, ScriptedSource
from tests.query.test_answer_ahead import DraftingBackend

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
QUESTIONS = ("Why does the printer jam?", "Who approves travel?")


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("demo_comparison")


@pytest.fixture
def demo(comparison: ModuleType) -> ModuleType:
    return importlib.import_module("demo")


class ScriptedEngine(ScriptedBackend):
    """A backend with a prefix cache to empty."""

    num_resets = 0

    async def reset_prefix_cache(self) -> None:
        self.num_resets += 1


async def asked(comparison: ModuleType, *, most_s: float, most_pairs: int | None) -> tuple[list[Any], int]:
    """The pairs that are asked, and how often the prefix cache was emptied."""
    source = ScriptedSource([Append(Chunk("Paper jams when damp.", "printers.md"))])
    backend = ScriptedEngine(answer="Damp")
    async with Pipeline(source, backend) as pipeline:
        pairs = comparison.ask_pairs(
            pipeline,
            backend,
            QUESTIONS,
            SamplingParams(max_tokens=4),
            max_context_tokens=100,
            most_s=most_s,
            most_pairs=most_pairs,
        )
        return [pair async for pair in pairs], backend.num_resets


def test_an_interval_is_students_of_the_logarithms(comparison: ModuleType) -> None:
    ratios = [2.1, 1.7, 2.6, 1.9, 2.2]
    logs = [math.log(ratio) for ratio in ratios]
    expected = stats.ttest_1samp(logs, 0).confidence_interval(comparison.CONFIDENCE)
    found = comparison.interval(ratios)
    assert [math.log(end) for end in (found.low, found.high)] == pytest.approx([expected.low, expected.high])
    assert found.middle == pytest.approx(math.prod(ratios) ** (1 / 5))
    turned = comparison.interval([1 / ratio for ratio in ratios])
    assert (turned.low, turned.high) == pytest.approx((1 / found.high, 1 / found.low)), (
        "not streaming is compared alike"
    )


@pytest.mark.parametrize(
    ("ratios", "word"),
    [
        ([2.0, 2.1, 1.9], "faster"),
        ([0.5, 0.6, 0.55], "slower"),
        ([2.0, 0.5, 1.1], "unclear"),
        ([3.0], "unclear"),
    ],
)
def test_the_verdict_is_the_word_for_its_interval(comparison: ModuleType, ratios: list[float], word: str) -> None:
    assert comparison.interval(ratios).verdict == word


def test_an_interval_is_narrow_if_both_ends_are_near(comparison: ModuleType) -> None:
    assert comparison.interval([2.0, 2.02, 1.98, 2.0]).is_narrow
    assert not comparison.interval([2.0, 3.0, 1.5, 2.0]).is_narrow
    assert not comparison.interval([2.0]).is_narrow


def test_first_and_last_token_are_timed_from_the_question_and_after_retrieval(comparison: ModuleType) -> None:
    timings = Timings(0.0, 1.0, retrieval_s=3.0, ttft_s=4.5, ttft_after_retrieval_s=1.5, total_s=9.0)
    assert [(label, measure(timings)) for measure, label in comparison.MEASURES.items()] == [
        ("first token", 4.5),
        ("- after retrieval", 1.5),
        ("last token", 9.0),
        ("- after retrieval", 6.0),
    ]


async def test_no_pair_begins_when_time_has_run_out(comparison: ModuleType) -> None:
    pairs, num_resets = await asked(comparison, most_s=0.0, most_pairs=None)
    assert (len(pairs), num_resets) == (1, 2)


async def test_the_wanted_number_of_pairs_is_asked(comparison: ModuleType) -> None:
    pairs, num_resets = await asked(comparison, most_s=3600.0, most_pairs=7)
    assert [pair.question for pair in pairs] == [QUESTIONS[i % 2] for i in range(7)]
    assert num_resets == 14
    answers = [answer.text for pair in pairs for answer in pair.answers]
    assert answers == ["Damp"] * 14


async def test_narrow_intervals_are_enough(comparison: ModuleType) -> None:
    (pair,), _ = await asked(comparison, most_s=0.0, most_pairs=None)
    same = [pair] * comparison.MIN_PAIRS
    assert comparison.is_enough(same, None)
    assert not comparison.is_enough(same[1:], None)
    assert not comparison.is_enough(same, len(same) + 1), "so many were wanted"


def test_the_load_of_others_leaves_out_our_own(comparison: ModuleType) -> None:
    program = "print(sum(i * i for i in range(20_000_000)))"
    before_all, _, before_own = comparison._core_seconds()
    subprocess.run([sys.executable, "-c", program], check=True, capture_output=True)
    after_all, _, after_own = comparison._core_seconds()
    assert after_own - before_own > 0, "a child that has ended is one's own"
    assert after_all > before_all
    assert 0 <= comparison.OthersLoad().share() <= 1


@pytest.fixture
def interrupted(demo: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of a demo that is interrupted after one pair."""

    async def run(arguments: argparse.Namespace, groups: dict[str, Any], ahead: list[Any]) -> None:
        (pair,), _ = await asked(sys.modules["demo_comparison"], most_s=0.0, most_pairs=None)
        groups["crawl"] = demo.Group(pair, [pair])
        groups["search"] = demo.Group(pair, [])
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
    assert "crawl: 1 pair;" in printed
    assert "unclear" in printed, "one pair shows nothing"
    results = json.loads((interrupted / "results.json").read_text())
    assert 0.0 <= results.pop("share of cores kept busy by others") <= 1.0
    assert {name: len(rows) for name, rows in results.items()} == {"crawl": 2}
    assert (interrupted / "timeline.png").exists()


@pytest.mark.parametrize(("share", "is_warned_of"), [(0.05, False), (0.6, True)])
def test_a_busy_machine_is_warned_of_before_and_after(
    demo: ModuleType,
    interrupted: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    share: float,
    is_warned_of: bool,
) -> None:
    monkeypatch.setattr(demo.psutil, "cpu_percent", lambda interval: share * 100)
    monkeypatch.setattr(demo.OthersLoad, "share", lambda self: share)
    demo.main()
    printed = " ".join(capsys.readouterr().out.split())
    assert (
        "Other programs keep 60% of this machine's cores busy: do not rely on these times" in printed
    ) == is_warned_of
    assert ("Other programs kept 60% of this machine's cores busy" in printed) == is_warned_of


async def test_a_provisional_answer_is_shown_before_retrieval_ends_and_drawn(
    demo: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = sys.modules["demo_ahead"]
    is_drafted = anyio.Event()

    class Engine(DraftingBackend):
        async def reset_prefix_cache(self) -> None: ...

    def show(event: QueryEvent) -> None:
        display.show(event)
        if isinstance(event, DraftChanged) and event.text == "see alpha":
            is_drafted.set()

    backend, params = Engine(), SamplingParams(max_tokens=20)
    source = ScriptedSource([Append(Chunk("alpha", "a.md", "The first page")), is_drafted])
    async with Pipeline(source, backend) as pipeline:
        with part.DraftDisplay(demo.console, demo.printable) as display:
            pair = await part.ask_ahead(pipeline, backend, "Why?", params, max_context_tokens=100, on_event=show)
    lines = [line[10:].strip() for line in capsys.readouterr().out.splitlines()]
    assert lines == [
        "+ The first page",
        "perhaps, after 1 page: see alpha",
        "retrieval complete",
        "answer: see alpha",
    ]
    assert "The answers have the same tokens; 9 of 9 came from the draft." in pair.outcome()
    assert [row["arm"] for row in pair.rows] == ["with drafts", "without drafts"]
    demo.save(tmp_path, {}, [pair], 0.0)
    assert json.loads((tmp_path / "results.json").read_text())["answers ahead"] == pair.rows
    assert (tmp_path / "timeline.png").exists()
