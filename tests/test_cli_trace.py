"""`streamrag record` and `streamrag trace`, as a person uses them."""

import io
import json
from pathlib import Path

import pytest

from streamrag import Chunk, RetrieverSource
from streamrag.cli import main, record
from streamrag.errors import SourceError
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery
from streamrag.trace.write import write_trace


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retriever in place of the crawl."""

    def retrieve(query: str) -> list[Chunk]:
        if "broken" in query:
            raise SourceError("the site\x1b is down")
        return [Chunk("four words are here", "a.md", "A")]

    monkeypatch.setattr(record, "make_source", lambda arguments: RetrieverSource(retrieve))


@pytest.mark.usefixtures("site")
def test_questions_are_recorded_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions, output = tmp_path / "questions.txt", tmp_path / "trace.jsonl.gz"
    questions.write_text("two?\n\n three? \n")
    command = ["record", "one?", "--questions", str(questions), "--output", str(output), "--url", "http://x"]
    assert main([*command, "--note", "for a test"]) == 0
    assert "3 of 3 retrievals recorded" in " ".join(capsys.readouterr().err.split())
    trace = read_trace(output)
    assert [query.text for query in trace.queries] == ["one?", "two?", "three?"]
    assert (trace.provenance["tokenizer"], trace.provenance["note"]) == ("words", "for a test")
    assert main(["trace", "show", str(output)]) == 0
    shown = capsys.readouterr().out
    assert "3 queries, mode plain, with texts" in shown
    assert "tokens per query" in shown
    assert (tmp_path / "trace.jsonl.gz.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("site")
def test_a_retrieval_that_fails_is_named_and_the_others_are_recorded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trace.jsonl"
    arguments = ["--output", str(output), "--url", "http://x", "--text", "hash", "--at-once", "2"]
    assert main(["record", "broken?", "whole?", *arguments]) == 1
    printed = capsys.readouterr().err
    assert "failed: broken?: " in printed
    assert "the site\N{REPLACEMENT CHARACTER} is down" in printed
    assert "1 of 2 retrievals recorded" in " ".join(printed.split())
    assert {query.outcome for query in read_trace(output).queries} == {"failed", "complete"}
    assert "four words" not in output.read_text()


@pytest.mark.usefixtures("site")
def test_no_trace_is_begun_if_every_retrieval_fails_for_a_reason_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "trace.jsonl"
    command = ["record", "broken?", "broken again?", "--output", str(output), "--url", "http://x"]
    assert main(command) == 1
    printed = capsys.readouterr().err
    assert "failed: broken? (and 1 more): " in printed
    assert printed.count("is down") == 1
    assert f"{output}: not written" in printed
    assert not output.exists()
    assert main(["record", "whole?", *command[3:]]) == 0
    assert "appended to the existing trace" not in capsys.readouterr().err
    assert main(command) == 1
    assert "0 of 2 retrievals recorded" in (printed := capsys.readouterr().err)
    assert "appended to the existing trace" in printed
    assert [query.outcome for query in read_trace(output).queries] == ["complete", "failed", "failed"]


@pytest.mark.usefixtures("site")
def test_sizes_in_words_are_said_to_be_no_tokens(
    tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for options, is_noted in (([], True), (["--tokenizer", str(tiny_model)], False)):
        output = tmp_path / f"{is_noted}.jsonl"
        assert main(["record", "one?", "--output", str(output), "--url", "http://x", *options]) == 0
        assert ("record --tokenizer MODEL" in capsys.readouterr().err) == is_noted
        assert main(["trace", "show", str(output), "--no-plot"]) == 0
        assert ("record --tokenizer MODEL" in capsys.readouterr().out) == is_noted


def test_recording_nothing_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--output", str(tmp_path / "x.jsonl"), "--url", "http://x"]) == 1
    assert "there is no question" in capsys.readouterr().err
    arguments = ["--questions", str(tmp_path / "none"), "--output", str(tmp_path / "x.jsonl"), "--url", "http://x"]
    assert main(["record", *arguments]) == 1
    assert "none cannot be read" in " ".join(capsys.readouterr().err.split())


def test_questions_are_not_read_from_a_closed_standard_input(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["record", "--questions", "-", "--output", str(tmp_path / "x.jsonl"), "--url", "http://x"]) == 1
    assert "--questions - cannot be read: the standard input is closed" in capsys.readouterr().err


@pytest.mark.usefixtures("site")
def test_questions_may_begin_with_a_byte_order_mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    questions, output = tmp_path / "questions.txt", tmp_path / "trace.jsonl"
    questions.write_bytes("one?\r\nzwei ä?".encode("utf-8-sig"))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(questions.read_bytes())))
    for file in (str(questions), "-"):
        assert main(["record", "--questions", file, "--output", str(output), "--url", "http://x"]) == 0
    assert [query.text for query in read_trace(output).queries] == ["one?", "zwei ä?"] * 2


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("one?".encode("utf-16"), "cannot be read: it is in UTF-16; save it in UTF-8"),
        (b"one?\ntw\xe4?", "line 2 is not in UTF-8"),
        (b"x" * ((16 << 20) + 1), "more than 16 MiB"),
    ],
)
def test_questions_that_cannot_be_read_say_why(
    content: bytes, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = tmp_path / "questions.txt"
    questions.write_bytes(content)
    options = ["--output", str(tmp_path / "x.jsonl"), "--url", "http://x"]
    assert main(["record", "--questions", str(questions), *options]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("suffix", [".bz2", ".xz", ".ZIP"])
def test_a_name_that_promises_another_compression_is_refused(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"trace.jsonl{suffix}"
    assert main(["trace", "generate", "crawler", "--queries", "1", "--output", str(path)]) == 1
    assert "traces are written as .jsonl, .jsonl.gz or .jsonl.zst" in capsys.readouterr().err
    assert main(["record", "one?", "--url", "http://x", "--output", str(path)]) == 1
    assert "traces are written as" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []
    path.write_bytes(b"x")
    assert main(["trace", "show", str(path)]) == 1
    assert "decompress it, or use gzip" in capsys.readouterr().err


@pytest.mark.parametrize("width", ["80", "60"])
def test_the_figures_of_a_large_trace_are_whole_in_a_narrow_terminal(
    width: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    path = tmp_path / "trace.jsonl"
    chunks = (TracedAppend(0.0, TracedChunk("a", 2_000_000_123)), TracedAppend(123456.0, TracedChunk("b", 1)))
    write_trace(Trace((TracedQuery("1", 0.0, "why?", chunks, 1234567.0),)), path)
    assert main(["trace", "show", str(path), "--no-plot"]) == 0
    printed = capsys.readouterr().out
    assert printed.count("2,000,000,124") == 6
    assert printed.count("1,234,567.00") == 12
    assert "…" not in printed


def test_a_trace_whose_provenance_says_anything_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "a $x$ trace.jsonl"
    provenance = {"notes": 5, "num_sessions": "x", "x": "\ud800", "tokenizer": [], "deep": [[[{}]]]}
    header = {"format": "streamrag-trace", "version": 1, "provenance": provenance}
    query = {"kind": "query", "id": "\ud800", "arrival_s": 0, "text": "\ud800 \u202e why?"}
    end = {"kind": "end", "query": "\ud800", "end_s": 1, "outcome": "failed", "error": "\x1b[2J"}
    path.write_text("".join(json.dumps(line) + "\n" for line in (header, query, end)))
    assert main(["trace", "show", str(path)]) == 0
    assert main(["trace", "show", str(path), "--json"]) == 0
    assert "Traceback" not in capsys.readouterr().err
    assert path.with_name(f"{path.name}.png").exists()


def test_a_model_s_tokenizer_counts_the_tokens(tiny_model: Path) -> None:
    name, count = record.make_counter(str(tiny_model))
    assert name == tiny_model.name
    assert count("some words") > 0


def test_a_trace_is_shown_as_json_without_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    query = TracedQuery("1", 0.0, "why?", (TracedAppend(0.5, TracedChunk("a", 7)),), 1.0, outcome="failed")
    write_trace(Trace((query,), {"by": "hand"}), path)
    assert main(["trace", "show", str(path), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["tokens_per_query"]["p50"], shown["num_incomplete"], shown["provenance"]["by"]) == (7, 1, "hand")
    assert [each.name for each in tmp_path.iterdir()] == ["trace.jsonl"]


def test_hostile_text_in_a_trace_cannot_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(Trace((), {"by\x1b[2J": "x\x07\x9b31m"}), path)
    assert main(["trace", "show", str(path), "--no-plot"]) == 0
    printed = capsys.readouterr()
    assert not {"\x1b", "\x07", "\x9b"} & set(printed.out + printed.err)


def test_a_broken_trace_is_an_error_and_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "trace.jsonl").write_text("{}\n")
    assert main(["trace", "show", str(tmp_path / "trace.jsonl")]) == 1
    assert "is not a trace of streamrag" in " ".join(capsys.readouterr().err.split())
