"""`streamrag trace`, as a person uses it."""

import json
from pathlib import Path

import pytest

from streamrag.cli import main
from streamrag.trace.values import Trace, TracedAppend, TracedChunk, TracedQuery
from streamrag.trace.write import write_trace

QUERY = TracedQuery("1", 0.0, "why?", (TracedAppend(0.5, TracedChunk("a", 7, "four words are here")),), 1.0)


def test_a_trace_is_shown_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "trace.jsonl.gz"
    write_trace(Trace((QUERY,)), path)
    assert main(["trace", "show", str(path)]) == 0
    shown = capsys.readouterr().out
    assert "1 queries, mode plain, with texts" in shown
    assert "tokens per query" in shown
    assert (tmp_path / "trace.jsonl.gz.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("tokenizer", "is_noted"), [("words", True), ("tiny-llama", False)])
def test_sizes_in_words_are_said_to_be_no_tokens(
    tokenizer: str, is_noted: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    write_trace(Trace((QUERY,), {"tokenizer": tokenizer}), path)
    assert main(["trace", "show", str(path), "--no-plot"]) == 0
    assert ("record --tokenizer MODEL" in capsys.readouterr().out) == is_noted


@pytest.mark.parametrize("suffix", [".bz2", ".xz", ".ZIP"])
def test_a_name_that_promises_another_compression_is_refused(
    suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / f"trace.jsonl{suffix}"
    assert main(["trace", "generate", "crawler", "--queries", "1", "--output", str(path)]) == 1
    assert "traces are written as .jsonl, .jsonl.gz or .jsonl.zst" in capsys.readouterr().err
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
