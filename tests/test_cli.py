"""The program as a person uses it; what needs an engine is tried in test_examples and by hand."""

import io
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from rich.console import Console

from streamrag import Append, Chunk, CutShort, HybridSource, Pipeline, Skipped, Update, VectorSource
from streamrag.cli import main, program
from streamrag.cli.answer_display import print_sources, print_timings, watch
from streamrag.cli.source_options import make_source
from streamrag.errors import SourceError, install_line
from streamrag.telemetry import QueryEvent
from streamrag.testing import ScriptedBackend, ScriptedSource


async def seen(source: ScriptedSource, backend: ScriptedBackend, **options: int) -> tuple[str, str]:
    """What a person sees on the standard error and on the standard output."""
    progress, output = (Console(file=io.StringIO(), width=200, highlight=False) for _ in range(2))
    async with Pipeline(source, backend, on_source_error="answer") as pipeline:
        answer = await watch(pipeline.events("Why [b]?", **options), progress, answer_to=output)  # type: ignore[arg-type]
    print_sources(answer, progress)
    print_timings(answer, progress)
    assert isinstance(progress.file, io.StringIO)
    assert isinstance(output.file, io.StringIO)
    return progress.file.getvalue(), output.file.getvalue()


async def test_a_query_is_watched_from_retrieval_to_sources() -> None:
    a, b = Chunk("alpha", "a.md", "A [bold]", score=0.5), Chunk("beta", "b.md")
    source = ScriptedSource([Update((a,)), Skipped("c.md", "it is empty"), Update((b, a)), RuntimeError("broken")])
    progress, output = await seen(source, ScriptedBackend("Because [1]."), max_context_tokens=500)
    assert output == "Because [1].\n"
    for line in (
        "retrieving for 'Why [b]?'",
        "+ A [bold]  a.md#0",
        "- c.md: it is empty",
        "retrieval failed: ScriptedSource failed: RuntimeError: broken",
        "retrieval complete: 2 chunks",
        "[1] b.md",
        "[2] A [bold]  a.md  0.500",
        "ttft_after_retrieval_s",
    ):
        assert line in progress
    assert "invalidated" in progress


async def test_hostile_text_in_a_query_cannot_steer_the_terminal() -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\r\n\x9b31m\u202eb\u2066\u200b[/red]"
    source = ScriptedSource([Append(Chunk("text", hostile, hostile)), Skipped(hostile, hostile)])
    progress, output = await seen(source, ScriptedBackend(hostile))
    for text in (progress, output):
        assert not {*"\x1b\x07\r\x9b\u202e\u2066\u200b"} & set(text)
        assert "[/red]" in text


async def test_an_answer_without_context_is_announced() -> None:
    progress, _ = await seen(ScriptedSource([]), ScriptedBackend("?"))
    assert "retrieval complete: the answer has no context" in progress
    assert "This answer had no context" in progress
    assert "cut short" not in progress


async def test_an_answer_whose_retrieval_was_cut_short_says_so_while_it_happens_and_at_its_end() -> None:
    source = ScriptedSource([Append(Chunk("alpha", "a.md")), CutShort("time is up\x1b[2J")])
    progress, _ = await seen(source, ScriptedBackend("?"))
    assert "retrieval was cut short: time is up" in progress
    assert "Documents may be missing: retrieval was cut short: time is up" in progress.splitlines()[-3]
    progress, _ = await seen(ScriptedSource([SourceError("the site is down")]), ScriptedBackend("?"))
    assert "Documents may be missing: retrieval was cut short: the site is down" in progress


async def test_a_context_is_shown_once_for_each_of_its_changes() -> None:
    a, b, big = Chunk("alpha", "a.md"), Chunk("beta", "b.md"), Chunk("x" * 900, "big.md")
    source = ScriptedSource([Append(a), Append(big), Append(b), Update((b, a))])
    progress, _ = await seen(source, ScriptedBackend("?"), max_context_tokens=100)
    shown = [line.split(",")[0].split("context of ")[1] for line in progress.splitlines() if "context of" in line]
    assert shown == ["1 chunks", "2 chunks", "2 chunks"]


async def test_left_out_and_shortened_chunks_are_named() -> None:
    big = Chunk("x" * 400, "big.md")
    progress, _ = await seen(ScriptedSource([Update((big,))]), ScriptedBackend("?"), max_context_tokens=100)
    assert "left out of the budget of 100 tokens: big.md#0" in progress
    progress, _ = await seen(ScriptedSource([Append(big)]), ScriptedBackend("?"), max_context_tokens=100)
    assert "shortened for the budget of 100 tokens: big.md#0" in progress


COMMANDS = [
    "ask",
    "demo-model",
    "index build",
    "index add",
    "index remove",
    "index verify",
    "record",
    "trace show",
    "trace generate",
    "profile",
    "serve",
    "top",
    "doctor",
]
COMMANDS += ["bench simulate", "bench run", "bench report", "bench timeline", "bench public", "bench compare", "advise"]
OPTIONAL = {"doctor", "serve", "profile", "bench timeline", "bench public", "top"}  # they need no argument


@pytest.mark.parametrize("command", ["", "index", "trace", "bench", *COMMANDS])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command.split(), "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"usage: streamrag {command}".rstrip())
    assert "example" in shown
    assert f"\n  streamrag {command}".rstrip() in shown


def test_retrieval_needs_no_package_of_a_service() -> None:
    program = (
        "import argparse, sys\n"
        "sys.modules.update(dict.fromkeys(('starlette', 'uvicorn', 'prometheus_client')))\n"
        "import streamrag.cli.ask, streamrag.cli.index, streamrag.cli.record\n"
        "from streamrag.cli.source_options import add_source_arguments, make_source\n"
        "parser = argparse.ArgumentParser()\n"
        "add_source_arguments(parser)\n"
        "for where in ('--url=http://example.org', '--index=./index', '--index=./index --no-hybrid'):\n"
        "    print(make_source(parser.parse_args(where.split())).name)\n"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["WebSource", "HybridSource", "VectorSource"]


@pytest.mark.parametrize("command", sorted({*COMMANDS} - OPTIONAL))
def test_the_usage_names_what_must_be_given(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(command.split())
    assert ended.value.code == 2
    usage, _, missing = capsys.readouterr().err.partition("the following arguments are required: ")
    assert missing
    assert [name for name in missing.strip().split(", ") if name.upper() not in usage.upper()] == []


def test_only_the_command_that_is_named_is_imported() -> None:
    code = (
        "import sys; from streamrag.cli.program import make_parser; make_parser(sys.argv[1:])\n"
        "print(*sorted({'ask', 'bench', 'trace'} & {name.rpartition('.cli.')[2] for name in sys.modules}))"
    )
    for words, imported in ((["--help"], ""), (["-h", "ask"], "ask"), (["trace", "bench"], "trace")):
        done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=True)
        assert done.stdout.strip() == imported


@pytest.mark.parametrize("command", [*program.MEASURING_COMMANDS, "bench --help", "trace show x"])
def test_a_command_of_streamrag_bench_names_the_install_line_without_it(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "entry_points", lambda **_: ())
    assert main(command.split()) == 1
    printed = capsys.readouterr().err
    assert printed.count("\n") == 1
    assert f"streamrag-bench is not installed. Install it with:  {install_line('bench')}" in printed


def test_the_help_lists_all_commands_without_streamrag_bench(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(program, "entry_points", lambda **_: ())
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = capsys.readouterr().out
    assert [name for name in (*program.COMMANDS, *program.MEASURING_COMMANDS) if f"\n    {name}" not in commands] == []


def test_an_entry_point_of_an_installed_distribution_adds_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    metadata = tmp_path / "streamrag_bench-0.1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.4\nName: streamrag-bench\nVersion: 0.1.0\n")
    (metadata / "entry_points.txt").write_text("[streamrag.commands]\nbench = other_bench:add_arguments\n")
    (tmp_path / "other_bench.py").write_text(
        "def add_arguments(parser):\n"
        "    parser.add_argument('load')\n"
        "    parser.set_defaults(run=lambda arguments: print(arguments.load) or 7)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["bench", "crawler"]) == 7
    assert capsys.readouterr().out == "crawler\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "ftp://example.org", "--model", "/tmp"], "UnsafeUrlError"),
        (["--index", "/nowhere", "--model", "/nowhere"], "IndexMissingError"),
        (["--url", "http://example.org", "--model", "/nowhere"], "ModelError"),
        (["--url", "http://example.org", "--model", "/tmp", "--api-key", "x"], "--api-key needs --server"),
        (
            ["--url", "http://example.org", "--model", "/tmp", "--sentences", "2"],
            "--rerank and --sentences need --index",
        ),
        (
            ["--url", "http://example.org", "--model", "/tmp", "--rerank", "x"],
            "--rerank and --sentences need --index",
        ),
        (["--url", "http://example.org", "--model", "/tmp", "--max-tokens", "0"], "max_tokens=0"),
    ],
)
def test_a_mistake_is_one_line_with_its_remedy(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ask", "Why?", *arguments]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("question", "options", "message"),
    [
        (" ", [], "the query is empty"),
        ("Why?", ["--deadline", "0"], "deadline_s=0.0 must be greater than 0"),
        ("Why?", ["--max-context-tokens", "-1"], "max_context_tokens=-1"),
    ],
)
def test_a_question_that_cannot_be_asked_is_refused_before_anything_starts(
    question: str, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    nothing_there = ["--url", "http://127.0.0.1:1", "--allow-private", "--server", "http://127.0.0.1:1/v1"]
    assert main(["ask", question, *nothing_there, "--model", "m", *options]) == 1
    assert message in capsys.readouterr().err


def test_a_folder_of_documents_in_place_of_an_index_is_told_before_vllm_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imports: list[str] = []
    monkeypatch.setattr("streamrag.backends.vllm.client.backend.import_vllm", lambda: imports.append("vllm"))
    documents, model = tmp_path / "documents", tmp_path / "model"
    for path in (documents / "a.txt", model / "config.json"):
        path.parent.mkdir()
        path.write_text("{}")
    assert main(["ask", "Why?", "--index", str(documents), "--model", str(model)]) == 1
    written = " ".join(capsys.readouterr().err.split())
    assert f"is no vector index. Make one with: streamrag index build {documents} --out {documents}-index" in written
    assert imports == []


def test_building_from_a_missing_folder_is_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["index", "build", str(tmp_path / "none"), "--out", str(tmp_path / "index")]) == 1
    assert "none" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], (HybridSource, None)),
        (["--no-hybrid"], (VectorSource, None)),
        (["--rerank", "late-interaction", "--sentences", "3"], (HybridSource, "late-interaction")),
    ],
)
def test_an_index_is_searched_as_its_options_say(options: list[str], expected: tuple[type, str | None]) -> None:
    parser = program.make_parser(["ask"])
    source = make_source(parser.parse_args(["ask", "Why?", "--index", "./index", "--model", "m", *options]))
    assert (type(source), getattr(source, "_reranker", None)) == expected


def test_an_index_is_built_added_to_and_taken_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "words.py").write_text("def embed(texts): return [[1 + len(text), text.count('a')] for text in texts]")
    monkeypatch.syspath_prepend(tmp_path)
    documents = tmp_path / "documents"
    documents.mkdir()
    for name in ("a", "b"):
        (documents / f"{name}.txt").write_text(f"{name} text")
    index, embedder = str(tmp_path / "index"), ["--embedder", "words:embed"]
    assert main(["index", "build", str(documents), "--out", index, "--kind", "ivf", *embedder]) == 0
    assert "faiss IVF; 2 passages were embedded" in capsys.readouterr().err
    (documents / "c.txt").write_text("c text")
    assert main(["index", "add", index, str(documents / "c.txt"), "--root", str(documents), *embedder]) == 0
    assert "index: 3 passages of 3 documents" in capsys.readouterr().err
    assert main(["index", "remove", index, "a.txt", *embedder]) == 0
    assert "faiss IVF; 0 passages were embedded" in capsys.readouterr().err
    assert main(["index", "remove", index, "a.txt", *embedder]) == 1
    assert "has no document 'a.txt'" in capsys.readouterr().err


async def test_the_json_result_is_complete() -> None:
    from streamrag.cli.ask import as_json

    steps = [Append(Chunk("alpha", "a.md")), CutShort("time is up")]
    async with Pipeline(ScriptedSource(steps), ScriptedBackend("ok")) as pipeline:
        stream: AsyncIterator[QueryEvent] = pipeline.events("Why?")
        _ = [event async for event in stream]
    written = json.loads(json.dumps(as_json(stream.result)))  # type: ignore[attr-defined]
    assert written["text"] == "ok"
    assert written["citations"][0]["uri"] == "a.md"
    assert written["has_context"] is True
    assert written["timings"]["ttft_s"] > 0
    assert written["cut_short"] == "time is up"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--server", "http://127.0.0.1:1/v1", "--policy", "lcas"], "--policy is for an embedded vLLM"),
        (["--policy", "no_such_policy"], "no_such_policy"),
        (["--strategy", "warming", "--policy", "lcas"], "is for strategy"),
    ],
)
def test_options_of_an_embedded_engine_are_checked_before_it_starts(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    command = ["ask", "Why?", "--url", "http://127.0.0.1:1", "--allow-private", "--model", str(tmp_path), *options]
    assert main(command) == 1
    assert message in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("options", "shown"),
    [([], "overlap immediate, until others were tried"), (["--no-overlap"], "overlap none, overlap=False")],
)
def test_overlap_is_chosen_as_in_a_pipeline(
    options: list[str], shown: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = [Append(Chunk("alpha", "a.md"))]
    monkeypatch.setattr("streamrag.cli.ask.make_source", lambda arguments: ScriptedSource(steps))
    monkeypatch.setattr("streamrag.cli.ask.make_backend", lambda arguments: ScriptedBackend("ok"))
    assert main(["ask", "Why?", "--url", "http://127.0.0.1:1", "--model", "m", *options]) == 0
    assert shown in " ".join(capsys.readouterr().err.split())
