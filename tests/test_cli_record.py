"""`streamrag record`, as a person uses it."""

import io
from pathlib import Path

import pytest

from streamrag import Chunk, RetrieverSource
from streamrag.cli import main, record
from streamrag.errors import SourceError
from streamrag.trace.read import read_trace


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch) -> None:
    """A retriever in place of the crawl."""

    def retrieve(query: str) -> list[Chunk]:
        if "broken" in query:
            raise SourceError("the site\x1b is down")
        return [Chunk("four words are here", "a.md", "A")]

    monkeypatch.setattr(record, "make_source", lambda arguments: RetrieverSource(retrieve))


@pytest.mark.usefixtures("site")
def test_questions_are_recorded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    questions, output = tmp_path / "questions.txt", tmp_path / "trace.jsonl.gz"
    questions.write_text("two?\n\n three? \n")
    command = ["record", "one?", "--questions", str(questions), "--output", str(output), "--url", "http://x"]
    assert main([*command, "--note", "for a test"]) == 0
    assert "3 of 3 retrievals recorded" in " ".join(capsys.readouterr().err.split())
    trace = read_trace(output)
    assert [query.text for query in trace.queries] == ["one?", "two?", "three?"]
    assert (trace.provenance["tokenizer"], trace.provenance["note"]) == ("words", "for a test")


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
    assert main(["record", "one?", "--url", "http://x", "--output", str(path)]) == 1
    assert "traces are written as .jsonl, .jsonl.gz or .jsonl.zst" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_model_s_tokenizer_counts_the_tokens(tiny_model: Path) -> None:
    name, count = record.make_counter(str(tiny_model))
    assert name == tiny_model.name
    assert count("some words") > 0
