"""Every example runs, as its docstring says, and prints what it is there to show."""

import asyncio
import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest

from scripts.notebook import NOTEBOOK, executed
from streamrag_bench.advice.logs import read_log
from tests.backends.tools.tool_model import make_tool_llama
from tests.serve.serving import serving

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

SHORT = [
    "agent_hand_over",
    "agent_over_http",
    "haystack_pipeline",
    "langchain_chain",
    "langchain_retriever",
    "langgraph_agent",
    "livekit_agent",
    "llamaindex_query_engine",
    "mcp_source",
    "merged_sources",
    "open_question",
    "own_source",
    "pipecat_bot",
    "refresh_an_answer",
    "search_the_web",
    "postgres_search",
]


def run(name: str, *arguments: str) -> str:
    command = [sys.executable, "-W", "error::ResourceWarning", str(EXAMPLES / name), *arguments]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1"}  # GiB, which are all written when an engine starts
    finished = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=400)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    return finished.stdout


@pytest.fixture
def run_here(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """As `run`, but in this process, which has imported vLLM already."""

    def run_it(name: str, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *arguments])
        monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capsys.readouterr().out

    return run_it


def test_every_example_is_tested_here() -> None:
    tested = Path(__file__).read_text()
    examples = sorted([*EXAMPLES.glob("*.py"), *EXAMPLES.glob("*.ipynb")])
    assert [path.name for path in examples if f'"{path.name}"' not in tested] == []


@pytest.mark.parametrize("name", SHORT)
def test_an_example_to_start_from_fits_on_a_screen(name: str) -> None:
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) < 40


def test_own_source() -> None:
    lines = run("own_source.py").splitlines()
    assert lines[-2:] == [
        "[1] T-101: The printer jams on thick paper.",
        "[2] T-103: A new printer.",
    ]
    assert sum("known already" in line for line in lines) == 4


def test_the_examples_of_voice_frameworks_are_tested_where_these_are_installed() -> None:
    """`make test-long` runs "livekit_agent.py" and "pipecat_bot.py", without what this file imports."""
    for name in ("livekit", "pipecat"):
        tests = EXAMPLES.parent / "tests" / "adapters" / f"test_{name}.py"
        assert f"examples/{name}_" in tests.read_text()


def test_open_question() -> None:
    *retrieved, answer, timing = run("open_question.py").splitlines()
    assert retrieved[-1] == "retrieving for 'how do I cancel a task?'"
    assert answer == "Cancel its scope [1]."
    assert re.fullmatch(r"answered within \d\.\d s of the commit", timing)


def test_refresh_an_answer() -> None:
    first, found, last = run("refresh_an_answer.py").splitlines()
    assert re.fullmatch(r"new, for 'Tessa Quill.*': Tessa Quill was born in Dunmere\.", found)
    assert first + last == "Tessa Quill designed it [1], and she was born in Dunmere [2]."


def test_agent_hand_over() -> None:
    report, _, *prompts = run("agent_hand_over.py").splitlines()
    assert report == "The printer jams on thick paper. Its driver is new."
    *partial, complete = [[int(number) for number in re.findall(r"\d+", line)] for line in prompts]
    assert len(partial) == 6, "the head and five parts of the report"
    assert complete[0] == partial[-1][1], "only the question was left to compute"


def test_search_the_web() -> None:
    class Site(BaseHTTPRequestHandler):
        """A search engine, and the page that it finds."""

        def do_GET(self) -> None:
            host = f"http://127.0.0.1:{self.server.server_port}"  # type: ignore[attr-defined]
            pages = {
                "/search": json.dumps({"results": [{"url": f"{host}/printers"}, {"url": "file:///etc/passwd"}]}),
                "/printers": "<title>Printers</title><p>The printer jams when the paper is thick.</p>",
            }
            page = pages.get(self.path.partition("?")[0], "")
            self.send_response(200 if page else 404)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(page.encode())

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Site) as server:
        threading.Thread(target=server.serve_forever).start()
        host = f"http://127.0.0.1:{server.server_port}"
        lines = run("search_the_web.py", "--allow-private", host, "Why does the printer jam?").splitlines()
        server.shutdown()
    assert lines[2:] == [
        "file:///etc/passwd is left out: 'file:///etc/passwd' is not fetched: only http:// and https:// addresses are",
        f"{host}/printers: The printer jams when the paper is thick.",
    ]


def test_mcp_source() -> None:
    assert run("mcp_source.py").splitlines() == ["It jams [1].", "[1] T-101: The printer on floor 2 jams."]


def test_record_and_replay(tmp_path: Path) -> None:
    recorded, replayed, slower = run("record_and_replay.py", str(tmp_path / "trace.jsonl.gz")).splitlines()
    assert recorded == "recorded: 1 query, 2 chunks"
    assert replayed == "replayed: ['note-0', 'note-1']"
    assert 2 < float(slower.split()[2]) < 4


def test_record_and_replay_keeps_nothing_without_a_file_and_explains_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("record_and_replay.py").startswith("recorded: 1 query, 2 chunks")
    assert "usage: record_and_replay.py [-h] [trace]" in run("record_and_replay.py", "--help")
    assert list(tmp_path.iterdir()) == []


def test_postgres_search(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toys = Path(__file__).resolve().parent / "sources"
    monkeypatch.syspath_prepend(toys)
    monkeypatch.setenv("PYTHONPATH", str(toys))
    server = importlib.import_module("postgres_server")
    (tmp_path / "notes").mkdir()
    for name, text in {"a": "The printer jams on thick paper.", "b": "Travel needs approval."}.items():
        (tmp_path / "notes" / f"{name}.txt").write_text(text)
    with server.postgres_server() as dsn:
        question = str(tmp_path / "notes"), "Why does the printer jam?"
        ask = (*question, dsn, "toy_embedder:embed")
        built, *_, update, text = run("postgres_search.py", *ask).splitlines()
        again, *_ = run("postgres_search.py", *ask).splitlines()
    assert [built, again] == [f"2 passages of 2 documents, {number} embedded" for number in (2, 0)]
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # for a server of its own, which is gone afterwards
    alone = run("postgres_search.py", *question, "", "toy_embedder:embed").splitlines()
    assert (alone[0], alone[-2:]) == (built, [update, text])
    assert {path.name for path in tmp_path.iterdir()} <= {"notes", ".lockfile"}  # the latter is the package's
    assert update == "update: a.txt#0, b.txt#0"
    assert text == "The printer jams on thick paper."


def test_merged_sources() -> None:
    *arrived, citations = run("merged_sources.py").splitlines()
    found = [line.split()[2] for line in arrived]
    assert [uri for uri in found if uri[0] == "T"] == ["T-101:", "T-103:"]  # how the two mix is up to the machine
    assert [uri for uri in found if uri[0] == "h"] == ["handbook#12:", "handbook#40:", "handbook#7:"]
    assert citations == "[1] T-101 [2] handbook#7 [3] T-103"


@pytest.fixture
def without_numpy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an environment with streamrag's extra `langchain` alone."""
    (tmp_path / "numpy.py").write_text("raise ImportError('numpy is not installed here')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("lang*.py")), ids=lambda path: path.stem)
def test_an_example_of_langchain_names_the_packages_that_it_imports(path: Path) -> None:
    header, _, code = path.read_text().partition('"""\n\n')
    imported = set(re.findall(r"^ *(?:from|import) (\w+)", code, re.MULTILINE)) - sys.stdlib_module_names
    installed = re.search(r"pip install '\.\[langchain.*\]'(.*)", header)
    assert installed
    assert imported - {"streamrag", "langchain_core"} == {*installed[1].split()}


@pytest.mark.usefixtures("without_numpy")
def test_langchain_retriever() -> None:
    *found, answer = run("langchain_retriever.py").splitlines()
    assert found == ["found T-101", "found T-103"]
    assert answer == "T-101 The printer on floor 2 jams when the paper is thick."


@pytest.mark.usefixtures("without_numpy")
def test_langchain_log(tmp_path: Path) -> None:
    assert len((EXAMPLES / "langchain_log.py").read_text().splitlines()) < 70
    log = tmp_path / "langchain.jsonl"
    log.write_text(run("langchain_log.py"))
    trace = read_log(log, usual_tokens=250)
    assert [[len(query.events), query.num_output_tokens] for query in trace.queries] == [[8, None], [8, None]]
    for query in trace.queries:
        first, *_, last = query.events
        assert 0.1 < first.at_s < last.at_s <= query.end_s


def test_langchain_log_has_retrievers_in_tools_and_alone_but_none_in_another(
    capsys: pytest.CaptureFixture[str],
) -> None:
    log = runpy.run_path(str(EXAMPLES / "langchain_log.py"))["RetrievalLog"]()
    documents = [SimpleNamespace(page_content="x" * 40)]
    log.on_chain_start(run_id="q")
    log.on_chat_model_start(parent_run_id="q")
    log.on_tool_start(run_id="tool", parent_run_id="q")
    log.on_retriever_start(run_id="both", parent_run_id="tool")
    log.on_chain_start(run_id="rewrite", parent_run_id="both")
    log.on_chat_model_start(parent_run_id="rewrite")
    log.on_retriever_start(run_id="one", parent_run_id="both")
    log.on_retriever_end(documents, run_id="one", parent_run_id="both")
    log.on_retriever_end(documents * 2, run_id="both", parent_run_id="tool")
    log.on_chat_model_start(parent_run_id="q")
    log.on_retriever_start(run_id="alone")
    log.on_retriever_end(documents, run_id="alone")
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["query"], line["event"], line.get("tokens")) for line in lines] == [
        ("q", "question", None),
        ("q", "end", None),
        ("q", "chunks", [10, 10]),
        ("q", "end", None),
        ("alone", "question", None),
        ("alone", "chunks", [10]),
    ]


@pytest.mark.usefixtures("without_numpy")
def test_langchain_chain() -> None:
    assert run("langchain_chain.py").splitlines() == [
        "It jams on thick paper [1].",
        "[1] T-101: The printer jams on thick paper.",
    ]


def test_langgraph_agent() -> None:
    called, *found, tool, answer = run("langgraph_agent.py").splitlines()
    assert called == "ai: ''"
    assert found == ["found T-101", "found T-103"]
    assert tool == r"tool: 'The printer jams on thick paper.\n\nIts driver is new.'"
    assert answer == "ai: 'It jams on thick paper.'"


async def test_agent_over_http() -> None:
    async with serving() as served:
        command = [sys.executable, str(EXAMPLES / "agent_over_http.py"), served.url]
        program = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
        printed, _ = await program.communicate()
        assert program.returncode == 0
        prompts = [served.backend.model.tokenizer.decode(each.token_ids) for each in served.backend.prompts[0]]
    assert "event: answered" in printed.decode()
    assert len(prompts) > 3
    order = ["ticket, line 0", "log, line 0", "log, line 19", "Why does the printer jam?"]
    places = [prompts[-1].index(each) for each in order]
    assert places == sorted(places)


@pytest.mark.long
@pytest.mark.engine
def test_langgraph_tools(tmp_path: Path, run_here: Callable[..., str]) -> None:
    model = make_tool_llama(tmp_path / "model", max_model_len=2048)
    question, called, result, answer = run_here("langgraph_tools.py", str(model)).splitlines()
    assert question == "human: 'Is the ticket of the printer still open?'"
    assert re.fullmatch(r"ai: \[\{'name': 'ticket_state', 'args': \{'number': 'T-101'\}, .*\]", called)
    assert result == "tool: 'T-101 is open.'"
    assert answer.startswith("ai: ")  # noise: the weights are random


def test_llamaindex_query_engine() -> None:
    lines = run("llamaindex_query_engine.py").splitlines()
    assert lines[0] == "A scope does."
    assert [line.partition("): ")[2] for line in lines if line.startswith("> Source")] == [
        "Cancelling a scope cancels every task in it.",
        "An event wakes every task that waits for it.",
    ]


def test_haystack_pipeline() -> None:
    assert run("haystack_pipeline.py").splitlines() == ["A scope does.", "from: Scopes"]


def shown(notebook: nbformat.NotebookNode) -> dict[str, list[str]]:
    """By cell: its lines without times, sorted, since what happens at once may swap; and its other kinds of output."""
    lines: dict[str, list[str]] = {}
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            text = output.text if output.output_type == "stream" else " ".join(sorted(output.data))
            lines[cell.id] = sorted(re.sub(r"\d+\.\d\d s", "t s", text).splitlines())
    return lines


def test_the_notebook_shows_a_query_and_holds_what_it_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If it holds something else, `.venv/bin/python scripts/notebook.py` writes it anew."""
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    assert NOTEBOOK == EXAMPLES / "a_query_live.ipynb"
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    lines = shown(executed(notebook))
    assert lines == shown(notebook)
    assert {"t s  read     874 tokens", "Because tray 1 bends thick paper [2]. Put it into tray 3."} <= {*lines["ask"]}
    assert lines["picture"] == ["image/png text/plain"]


def test_the_notebook_is_small_and_tells_nothing_of_the_machine_that_ran_it() -> None:
    text = NOTEBOOK.read_text()
    assert len(text) < 60_000
    assert re.findall(r"/(?:home|root|tmp|usr|var|opt|work)/|site-packages|iopub", text) == []


@pytest.mark.long
@pytest.mark.engine
def test_wrap_a_function(tiny_model: Path) -> None:
    lines = run("wrap_a_function.py", str(tiny_model)).splitlines()
    assert lines[-2:] == [
        "[1] Cancelling a scope cancels every task that runs in it.",
        "[2] An event wakes every task that waits for it.",
    ]


@pytest.mark.long
@pytest.mark.engine
def test_push_tokens(tiny_model: Path, run_here: Callable[..., str]) -> None:
    *_, made, shared = run_here("push_tokens.py", str(tiny_model)).splitlines()
    assert re.fullmatch(r"5 chunks made a prompt of \d+ tokens", made)
    common = [int(number) for number in re.findall(r"\d+", shared)]
    assert common[0] == 0
    assert common[1] < common[2]  # each page is appended
    assert 0 < common[3] < common[1]  # the update keeps a part of the draft
    assert common[4] > common[3]


@pytest.mark.long
@pytest.mark.engine
def test_watch_a_log(tiny_model: Path) -> None:
    lines = run("watch_a_log.py", "--model", str(tiny_model), "--seconds", "3").splitlines()
    assert any(re.search(r"line +\d+ .*'(yes|no)' in \d+ ms$", line) for line in lines)
    times = [re.search(r"([\d.]+) +([\d.]+) ms$", line) for line in lines[-4:]]
    for time in times:  # median and most
        assert 0 <= float(time[1]) <= float(time[2])


@pytest.mark.long
@pytest.mark.engine
def test_own_policy(tiny_model: Path) -> None:
    lines = run("own_policy.py", str(tiny_model)).splitlines()
    assert ["2 chunks" in line for line in lines if line.startswith("finished after")] == [True] * 3


@pytest.mark.engine
def test_ask_the_web(tiny_model: Path, tmp_path: Path, run_here: Callable[..., str]) -> None:
    (tmp_path / "index.html").write_text(
        "<title>Printers</title><h1>Printers</h1><p>The printer on floor two jams when the paper is thick.</p>"
    )
    site = subprocess.Popen(
        [sys.executable, str(EXAMPLES / "demo_site.py"), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert site.stdout
        url = f"http://127.0.0.1:{int(site.stdout.readline())}/index.html"
        question = "Why does the printer jam?"
        lines = run_here("ask_the_web.py", "--allow-private", str(tiny_model), question, url).splitlines()
    finally:
        site.terminate()
        site.communicate()
    assert lines[-1] == f"1 Printers {url}"


def test_the_demo_explains_itself() -> None:
    assert "usage: demo.py [-h]" in run("demo.py", "--help")


@pytest.mark.long
@pytest.mark.engine
def test_the_demo_draws_its_timeline_and_saves_its_numbers(tmp_path: Path) -> None:
    """Its timing is from "demo_timing.py", and its drafts from "demo_ahead.py"."""
    printed = run("demo.py", "--tiny", "--queries", "1", "--max-tokens", "4", "--out", str(tmp_path / "demo"))
    assert "crawl, from the question" in printed
    results = json.loads((tmp_path / "demo" / "results.json").read_text())
    assert 0 <= results.pop("share of cores kept busy by others") <= 1
    assert [len(rows) for rows in results.values()] == [2, 2, 2]
    assert all(row["ttft_s"] >= row["ttft_after_retrieval_s"] > 0 for rows in results.values() for row in rows)
    assert (tmp_path / "demo" / "timeline.png").read_bytes().startswith(b"\x89PNG")
