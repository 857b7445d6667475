"""`streamrag compare`, as a person uses it."""

import argparse
import json
import signal
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest

from streamrag import Append, Chunk, ConfigurationError, SourceError
from streamrag.cli import program
from streamrag.sources.index.index_folder import PASSAGES, passage_line
from streamrag.testing import ScriptedBackend, ScriptedSource, Step
from streamrag.trace import Trace, TracedAppend, TracedChunk, TracedQuery, write_trace
from streamrag_bench.cli import compare

MODEL = ["--url", "http://127.0.0.1:1", "--model", "m", "--minutes", "1e-9"]


def run(command: list[str]) -> int:
    parser = program.Parser()
    compare.add_arguments(parser)
    return compare.run(parser.parse_args(command))


@pytest.fixture
def questions(tmp_path: Path) -> str:
    path = tmp_path / "questions.txt"
    path.write_text("Why does the printer jam?\nWho approves travel?\n")
    return str(path)


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> ScriptedSource:
    """A source that fails for questions with "fail", which the command uses, with a model that answers at once."""

    def steps(query: str) -> Iterable[Step]:
        yield SourceError("the site is down") if "fail" in query else Append(Chunk("Paper jams.", "printers.md"))

    source = ScriptedSource(steps)
    monkeypatch.setattr(compare, "make_source", lambda arguments: source)
    monkeypatch.setattr(compare, "make_backend", lambda arguments: ScriptedBackend("Damp"))
    return source


def test_a_comparison_prints_a_verdict(
    questions: str, source: ScriptedSource, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([questions, *MODEL]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "streaming without ratio 95% interval first token, from the" in shown
    assert "Verdict, one at a time: it is unclear whether streaming is faster here" in shown
    assert "in 1 of 1 pairs, and the answer in 1 of those" in shown
    assert "measure longer with --minutes 2e-09" in shown
    assert source.queries == ["Why does the printer jam?"] * 3, "the first one does not count"


def test_a_load_is_compared_too_and_written_as_json_and_a_page(
    questions: str, source: ScriptedSource, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    assert run([questions, *MODEL, "--concurrency", "2", "--json", "--html", str(page)]) == 0
    shown = capsys.readouterr()
    found = json.loads(shown.out)
    assert [(group["name"], len(group["pairs"])) for group in found["groups"]] == [
        ("one at a time", 1),
        ("2 at once", 2),
    ]
    assert found["sentences"][0].startswith("Verdict, one at a time")
    assert "2 at once" in page.read_text()
    assert f"page: {page}" in shown.err


def test_an_error_in_the_middle_prints_what_is_known(
    source: ScriptedSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_text("Why?\nDoes it fail?")
    with pytest.raises(SourceError, match="the site is down"):
        run([str(questions), *MODEL[:-1], "1"])
    assert "Verdict, one at a time" in capsys.readouterr().out


def test_ctrl_c_prints_what_is_known(
    questions: str, source: ScriptedSource, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
    default_signals: None,
) -> None:  # fmt: skip
    class Lines:
        def __init__(self, console: object) -> None: ...

        def show(self, step: str, count: str = "") -> None:
            if count == "round 1":
                signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(compare, "StepLines", Lines)
    with pytest.raises(KeyboardInterrupt):
        run([questions, *MODEL[:-1], "1"])
    assert "Verdict, one at a time" in capsys.readouterr().out


def arguments(**given: object) -> argparse.Namespace:
    return argparse.Namespace(**{"questions": None, "index": None, "trace": None, "concurrency": 1, **given})


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """A trace with a failed retrieval, and with two recordings of a question that found different passages."""
    texts = {"1": "Paper jams.", "2": "Damp paper jams.", "3": "Call IT.", "4": "Nothing."}
    chunks = [TracedAppend(0.0, TracedChunk(text, 3, text)) for text in texts.values()]
    asked = zip(texts, ("b?", "a?", "b?", "c?"), chunks, strict=True)
    queries = [TracedQuery(number, 0.0, text, (chunk,), 0.01) for number, text, chunk in asked]
    failed = replace(queries.pop(), outcome="failed", error="it is down")
    path = tmp_path / "trace.jsonl"
    write_trace(Trace((*queries, failed)), path)
    return str(path)


def test_a_trace_has_questions_of_its_own_whose_retrieval_is_the_same_both_ways(
    trace: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert compare.find_questions(arguments(trace=trace)) == ["b?", "a?"]
    monkeypatch.setattr(compare, "make_backend", lambda arguments: ScriptedBackend("Damp"))
    assert run(["--trace", trace, "--model", "m", "--minutes", "1e-9", "--concurrency", "2"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "the context was the same both ways in 1 of 1 pairs" in shown
    assert "the context was the same both ways in 2 of 2 pairs" in shown


def test_a_trace_without_a_complete_retrieval_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(Trace((TracedQuery("1", 0.0, "a?", (), 0.1, outcome="failed", error="down"),)), path)
    with pytest.raises(ConfigurationError, match="has no complete retrieval"):
        compare.find_questions(arguments(trace=str(path)))


def test_a_page_that_cannot_be_written_is_refused_before_anything_is_measured(questions: str) -> None:
    with pytest.raises(ConfigurationError, match=r"--html /nowhere/page\.html: there is no such folder"):
        run([questions, *MODEL, "--html", "/nowhere/page.html"])


def test_an_index_gives_ten_questions_about_its_titles_evenly_chosen(tmp_path: Path) -> None:
    titles = [f"Title {number}" for number in range(25) for _ in range(3)]
    titles += ["", "two\nlines \x1b[31m", "long " * 1000]
    lines = [passage_line({"uri": "a.md", "title": title, "passage": 0, "text": "t"}) for title in titles]
    (tmp_path / PASSAGES).write_text("".join(lines))
    found = compare.questions_about(tmp_path)
    assert found[:2] == ["What is important about Title 0?", "What is important about Title 2?"]
    assert len(found) == len(set(found)) == 10
    (tmp_path / PASSAGES).write_text("".join(lines[-3:]))
    untitled, control, long = compare.questions_about(tmp_path)
    assert untitled == "What is important about a.md?"
    assert "\n" not in control
    assert "\x1b" not in control
    assert len(long) < 300


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "there are no questions: name a file with one per line"),
        ({"questions": "/nowhere"}, "/nowhere cannot be read"),
    ],
)
def test_missing_questions_are_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        compare.find_questions(arguments(**given))


def test_questions_at_once_must_be_different_ones(questions: str) -> None:
    with Path(questions).open("a") as file:
        file.write("Who approves travel?\n")
    with pytest.raises(ConfigurationError, match="there are only 2 different questions, fewer than --concurrency 3"):
        compare.find_questions(arguments(questions=questions, concurrency=3))


@pytest.mark.parametrize("minutes", ["0", "-1", "nan", "inf", "x", "1441"])
def test_minutes_are_a_number_that_ends(minutes: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run(["q.txt", *MODEL[:-1], minutes])
    assert "must be a number of minutes above 0" in capsys.readouterr().err
