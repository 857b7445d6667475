"""`streamrag serve` as a program of its own, in front of a server that answers at once; asked with curl."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrag.cli import main
from streamrag.trace import Trace, TracedAppend, TracedChunk, TracedQuery, write_trace
from tests.test_cli_doctor import Server
from tests.test_cli_doctor import serving as completions

KEY = "k" * 32
QUESTION = "Why does it jam?"

pytestmark = pytest.mark.usefixtures("default_signals")


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    page = TracedAppend(0.0, TracedChunk("a", 4, "The printer jams.", "printer.md", title="Printers"))
    path = tmp_path_factory.mktemp("trace") / "search.jsonl"
    write_trace(Trace((TracedQuery("1", 0.0, QUESTION, (page,), 0.0),)), path)
    return path


class Program:
    """One that runs, and what it has said."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.said: list[str] = []

    def line(self, pattern: str) -> str:
        """Its next line with that in it."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.said.append(line)
            if re.search(pattern, line):
                return line
        raise AssertionError(f"it ended, and said {''.join(self.said)}")

    def end(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.process.wait(timeout=60)


@contextmanager
def running(*options: str, environment: dict[str, str] | None = None) -> Iterator[tuple[Program, str]]:
    """The program, once it is ready, and its address."""
    command = [sys.executable, "-m", "streamrag", "serve", "--model", "tiny", "--port", "0", *options]
    with completions(Server(reuses=True)) as server:
        process = subprocess.Popen(
            [*command, "--server", server], stderr=subprocess.PIPE, text=True, env={**os.environ, **(environment or {})}
        )
        program = Program(process)
        try:
            with process:
                try:
                    ready = program.line("^ready: ")
                    yield program, ready.split()[1].rstrip("/")
                finally:
                    process.kill()
        finally:
            process.wait()


def curl(url: str, *options: str, body: object = None) -> str:
    data = [] if body is None else ["-d", json.dumps(body), "-H", "Content-Type: application/json"]
    command = [shutil.which("curl") or "curl", "-sS", "-N", "--max-time", "30", *options, *data, url]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def asked(question: str = QUESTION) -> dict[str, object]:
    return {"stream": True, "messages": [{"role": "user", "content": question}]}


needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


@needs_curl
def test_curl_gets_a_stream_and_sigterm_ends_the_service(trace: Path) -> None:
    with running("--trace", str(trace)) as (program, url):
        chunks = curl(f"{url}/v1/chat/completions", body=asked()).lstrip("\n").split("\n\n")
        assert curl(f"{url}/readyz") == "ready\n"
        assert json.loads(curl(f"{url}/v1/models"))["data"][0]["id"] == "tiny"
        assert program.end() == 0
    assert chunks[-2:] == ["data: [DONE]", ""]
    first, *others = (json.loads(chunk.removeprefix("data: ")) for chunk in chunks[:-2])
    assert first["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in others) == "x"
    assert others[-1]["streamrag"]["citations"] == [{"number": 1, "uri": "printer.md", "title": "Printers"}]


def test_sigterm_while_it_starts_ends_it(tmp_path: Path) -> None:
    server = Server(reuses=True)
    is_over = threading.Event()

    class Models(dict[str, int | None]):
        def items(self) -> Any:
            is_over.wait(60)
            return super().items()

    server.models = Models()
    with completions(server) as url:
        command = [sys.executable, "-m", "streamrag", "serve", "--model", "tiny", "--port", "0", "--server", url]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            try:
                program = Program(process)
                program.line("^connecting to ")
                assert program.end() == 128 + signal.SIGTERM
            finally:
                process.kill()
                is_over.set()


@needs_curl
def test_keys_are_asked_for_and_read_anew_on_sighup(trace: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'alice = "{KEY}"\n')
    keys.chmod(0o600)
    new = KEY[::-1].replace("k", "n")
    with running("--trace", str(trace), "--keys", str(keys), "--host", "0.0.0.0") as (program, url):
        assert "Authorization: Bearer $KEY" in program.line("curl")
        status = ("-o", os.devnull, "-w", "%{http_code}")
        assert curl(f"{url}/v1/models", *status) == "401"
        assert curl(f"{url}/v1/models", *status, "-H", f"Authorization: Bearer {KEY}") == "200"
        keys.write_text(f'bob = "{new}"\n')
        program.process.send_signal(signal.SIGHUP)
        program.line("^loaded 1 keys")
        assert curl(f"{url}/v1/models", *status, "-H", f"Authorization: Bearer {KEY}") == "401"
        assert curl(f"{url}/v1/models", *status, "-H", f"Authorization: Bearer {new}") == "200"
        keys.chmod(0o644)
        program.process.send_signal(signal.SIGHUP)
        program.line("the keys are unchanged: .* can be read by others")
        assert curl(f"{url}/v1/models", *status, "-H", f"Authorization: Bearer {new}") == "200"
        assert program.end() == 0
    assert KEY not in "".join(program.said)


def said_of(capsys: pytest.CaptureFixture[str], *options: str) -> tuple[int, str, str]:
    status = main(["serve", *options])
    printed = capsys.readouterr()
    return status, printed.out, printed.err


def test_check_says_all_that_is_wrong(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(f'alice = "{KEY}"\n')
    keys.chmod(0o644)
    (tmp_path / "index").mkdir()
    (tmp_path / "model").mkdir()
    file = tmp_path / "service.toml"
    file.write_text("[limits]\nmax_querys = 3\n[prompt]\npassage = '{text} {nonsense}'\n[engine]\npolicy = 'best'\n")
    with completions(Server(reuses=True)) as taken:
        status, out, err = said_of(
            capsys,
            "--check",
            *("--config", str(file)),
            *("--model", str(tmp_path / "model")),
            *("--index", str(tmp_path / "index")),
            *("--keys", str(keys)),
            *("--port", taken.rpartition(":")[2]),
            *("--source.max_pages", "7"),
        )
    assert (status, out) == (1, "")
    for wanted in (
        f"{file}, line 2: limits.max_querys: [limits] has no max_querys\n  Did you mean max_queries?",
        "option --source.max_pages: is for source.urls, which is not set",
        f"option --source.index: {tmp_path}/index is no vector index",
        f"option --model.name: {tmp_path}/model has no config.json",
        "'best'",
        "prompt: PromptTemplate.passage=",
        f"option --keys.file: {keys} can be read by others than its owner",
        "option --server.port: cannot listen on 127.0.0.1",
    ):
        assert wanted in err
    assert len(re.findall(r"^\S.*: ", err, re.MULTILINE)) == 8


def test_check_prints_what_holds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, trace: Path
) -> None:
    monkeypatch.setenv("STREAMRAG__KEYS__PAIRS", f"alice={KEY}")
    monkeypatch.setenv("STREAMRAG__LIMITS__MAX_QUERIES", "8")
    status, out, err = said_of(
        capsys, "--check", "--server", "http://127.0.0.1:1", "--model", "tiny", "--trace", str(trace), "--port", "0"
    )
    assert status == 0
    assert "\nnot checked: http://127.0.0.1:1/v1 cannot be reached: " in err
    assert "max_queries = 8\n" in out
    assert 'pairs = "(hidden)"' in out
    assert KEY not in out


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "model.name: there is no model\n  Name one"),
        (
            ("--host", "0.0.0.0"),
            "option --server.host: listens on 0.0.0.0 without keys, where anybody could send requests\n  Give it keys",
        ),
        (("--url", "http://a.example", "--trace", "x"), "option --source.urls and option --source.trace: only one of"),
        (("--url", "ftp://a.example"), "option --source.urls: 'ftp://a.example' is not fetched"),
        (("--trace", "/nowhere/x"), "option --source.trace: there is no /nowhere/x"),
        (("--server", "http://["), "option --model.server: Invalid IPv6 URL"),
        (("--model", "./nowhere"), "option --model.name: there is no model at nowhere"),
        (("--rerank", "late-interaction"), "option --source.rerank: is for source.index, which is not set"),
        (("--model", "a", "--server", "http://a", "--policy", "lcas"), "option --engine.policy: is for an embedded"),
        (("--model", "a", "--model.tokenizer", "b"), "option --model.tokenizer: is for model.server, which is not set"),
        (("--replicas", "2", "--model", "a", "--server", "http://a"), "option --replicas.number: is for an embedded"),
        (("--replicas", "2", "--replicas.router", "best"), "option --replicas.router: there is no router 'best'"),
        (("--replicas", "2", "--replicas.max_number", "1"), "max_number=1 must be at least number=2"),
        (("--replicas.max_open", "8"), "option --replicas.max_open: is for replicas.number, which is not set"),
        (("--engine.lanes", "1"), "option --engine.lanes"),
        (("--engine.lanes", "1+1", "--replicas", "2"), "option --engine.lanes: is for engines of the service's own"),
        (("--replicas.decode", "1"), "option --replicas.decode: is for replicas.number, which is not set"),
        (("--replicas", "2", "--replicas.max_decode", "2"), "option --replicas.max_decode: is for replicas.decode"),
        (
            ("--replicas", "2", "--replicas.decode", "2", "--replicas.max_decode", "1"),
            "max_decode=1 must be at least decode=2",
        ),
        (("--observe.otel_endpoint", "collector:4318"), "'collector:4318' is not an http or https address"),
        (("--postgres", "env:NOT_THERE"), "there is no environment variable NOT_THERE"),
    ],
)
def test_settings_that_cannot_work_are_explained_before_the_service_starts(
    capsys: pytest.CaptureFixture[str], options: Sequence[str], said: str
) -> None:
    status, _, err = said_of(capsys, "--port", "0", *options)
    assert status == 1
    assert said in err


def test_keys_are_no_options(capsys: pytest.CaptureFixture[str]) -> None:
    for option in ("--keys.pairs", "--model.api_key"):
        with pytest.raises(SystemExit):
            main(["serve", option, "x"])
        assert f"unrecognized arguments: {option}" in capsys.readouterr().err


def test_elsewhere_than_on_loopback_without_keys_only_names_of_this_machine_count() -> None:
    from streamrag.serve.config.checks import permitted_hosts
    from streamrag.serve.config.layers import load

    def names(has_keys: bool, **server: str) -> frozenset[str] | None:
        options = {f"server.{name}": value for name, value in server.items()}
        return permitted_hosts(load(None, {}, options).settings, has_keys=has_keys)

    assert names(True, host="0.0.0.0") is None
    assert names(True) == {"localhost", "127.0.0.1", "::1"}
    assert names(False, host="0.0.0.0", hosts="rag.example") >= {"localhost", "rag.example"}
    assert names(True, host="0.0.0.0", hosts="rag.example") is not None
    assert names(False, hosts="*") is None


@pytest.mark.long
@needs_curl
def test_the_demo_makes_its_pages_once_and_serves_them(tmp_path: Path) -> None:
    pytest.importorskip("sentence_transformers")
    folder = tmp_path / "demo"
    with running("--demo", "--demo-folder", str(folder)) as (program, url):
        assert f"made the demo's files in {folder}\n" in program.said
        answer = curl(f"{url}/v1/chat/completions", body=asked("How do I stop a query early?"))
        assert program.end() == 0
    cited = re.findall(r'"uri":"([\w-]+\.html)"', answer)
    assert len(cited) == 2
    assert all((folder / "site" / name).exists() for name in cited)
    with running("--demo", "--demo-folder", str(folder)) as (program, _):
        assert f"using the demo's files in {folder}\n" in program.said
