"""`streamrag bench public`, `bench compare` and `advise` as a person uses them, on the simulator."""

import json
from pathlib import Path

import pytest

from streamrag.cli import main
from streamrag.trace.read import read_trace

SMALL = ["--queries", "6", "--warm-up", "1", "--output-tokens", "2"]
TRACE = Path(__file__).resolve().parents[1] / "traces" / "langchain-two-retrievers.jsonl.gz"


def test_engines_are_simulated_and_compared_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["bench", "public", "--simulate", "h200-llama8b-tp2", "--output", str(tmp_path), *SMALL]
    assert main(command) == 0
    shown = capsys.readouterr().out
    assert shown.count("simulated") >= 2
    assert "0 of 5" in shown
    page = tmp_path / "page.html"
    results = [str(tmp_path / f"{name}.json") for name in ("vllm-simulated", "streamrag-simulated")]
    assert main(["bench", "compare", *results, "--page", str(page)]) == 0
    assert "streamrag-simulated is simulated, not measured" in page.read_text()
    assert json.loads(Path(results[0]).read_text())["is_simulated"] is True


def test_wrong_options_are_refused_before_a_benchmark_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "streamrag-simulated.json").write_text("precious")
    command = ["bench", "public", "--simulate", "h200-llama8b-tp2", "--output", str(tmp_path), *SMALL]
    for options, problem in (
        (["--engine", "vllm,streamrag"], "give another --output, --name or --engine"),
        (["--engine", "vllm,vllm"], "give another --output, --name or --engine"),
        (["--engine", "vllm,vllm-sessions", "--retrieval", "search"], "can only append"),
        (["--engine", "vllm", "--seeds", "1,1"], "must be different"),
    ):
        assert main([*command, *options]) == 1
        assert problem in " ".join(capsys.readouterr().err.split())
    assert [path.name for path in tmp_path.iterdir()] == ["streamrag-simulated.json"]
    assert main([*command[:-7], str(tmp_path / "streamrag-simulated.json" / "new"), *SMALL, "--engine", "vllm"]) == 1
    assert "streamrag-simulated.json" in "".join(capsys.readouterr().err.split())


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, problem in (
        ([], "give either a model or"),
        (["--simulate", "x"], "no profile 'x'"),
        (["--simulate", "h200-llama8b-tp2", "--engine", "sglang"], "engine"),
        (["--simulate", "h200-llama8b-tp2", "--name", "../a", "--engine", "vllm"], "must be a file name"),
        (["--url", "http://127.0.0.1:9", "--model", "m"], "cannot be reached"),
    ):
        assert main(["bench", "public", *options, "--output", str(tmp_path), *SMALL]) == 1
        assert problem in capsys.readouterr().err
    (tmp_path / "new.json").write_text('{"benchmark": "streamrag-public", "format": 2}')
    assert main(["bench", "compare", str(tmp_path / "new.json"), "--page", str(tmp_path / "a.html")]) == 1
    assert "format 2, and this version reads only format 1" in capsys.readouterr().err
    assert not (tmp_path / "a.html").exists()


def test_advice_on_a_log_is_one_page_or_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "copy.jsonl.gz"
    assert main(["advise", str(TRACE), "--output-tokens", "2", "--trace", str(copy)]) == 0
    shown = capsys.readouterr().out
    for word in ("simulated on 2 x NVIDIA H200", "VllmBackend", "OpenAIBackend", "Settings", "Error", "bench-validity"):
        assert word in shown
    assert len(shown.splitlines()) < 40
    assert read_trace(copy).queries == read_trace(TRACE).queries
    assert main(["advise", str(TRACE), "--output-tokens", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["is_simulated"] is True
    (tmp_path / "log.csv").write_text("a,b\n")
    assert main(["advise", str(tmp_path / "log.csv")]) == 1
    assert "line 1: it is no event of a log" in capsys.readouterr().err
