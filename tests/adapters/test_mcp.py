"""MCP servers as sources: real servers, as processes, over stdio and HTTP."""

import asyncio
import importlib
import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from streamrag import (
    Chunk,
    ConfigurationError,
    CutShort,
    MissingDependencyError,
    Pipeline,
    Skipped,
    SourceError,
    Update,
)
from streamrag.adapters.mcp import McpResourceSource, McpToolSource
from streamrag.core import SourceEvent
from streamrag.testing import ScriptedBackend

HERE = Path(__file__).parent
STDIO = [sys.executable, str(HERE / "mcp_server.py")]
OLD = [sys.executable, str(HERE / "old_mcp_server.py")]
LIMIT_S = 60


@asynccontextmanager
async def started(source: Any) -> AsyncIterator[Any]:
    async with asyncio.timeout(LIMIT_S):
        await source.start(lambda line: None)
    try:
        yield source
    finally:
        async with asyncio.timeout(LIMIT_S):
            await source.aclose()


async def events(source: Any, query: str) -> list[SourceEvent]:
    async with asyncio.timeout(LIMIT_S), aclosing(source.stream(query)) as stream:
        return [event async for event in stream]


async def asked(server: Any, tool: str, query: str = "printer", **options: Any) -> list[SourceEvent]:
    async with started(McpToolSource(server, tool, **options)) as source:
        return await events(source, query)


@pytest.fixture(scope="module", params=["http", "http json"])
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    server = subprocess.Popen([*STDIO, *request.param.split()], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    try:
        yield f"http://127.0.0.1:{int(server.stdout.readline())}/mcp"
    finally:
        server.kill()
        server.communicate()


def has_ended(process: int, within_s: float = 120) -> bool:
    """`process` is a file descriptor of it."""
    return select.select([process], [], [], within_s)[0] != []


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


async def test_each_text_that_a_tool_returns_is_a_passage() -> None:
    async with started(McpToolSource(STDIO, "search", arguments={"most": 5})) as source:
        assert await events(source, "printer") == [Update((Chunk("The printer jams.", "search"),))]
        assert await events(source, "The") == [
            Update((Chunk("The printer jams.", "search"), Chunk("The scanner is slow.", "search", passage=1)))
        ]
        assert await events(source, "nothing of the kind") == [Update(())]


async def test_a_tool_s_progress_is_read_until_its_result_comes() -> None:
    texts = ["line 0\n", "line 0\nline 1\n", "line 0\nline 1\nline 2\n"]
    async with started(McpToolSource(STDIO, "slow", reads_progress=True)) as source:
        found = await events(source, "printer")
    assert list(dict.fromkeys(found)) == [Update((Chunk(text, "slow"),)) for text in texts]
    async with started(McpToolSource(STDIO, "slow")) as source:
        assert await events(source, "printer") == [Update((Chunk(texts[-1], "slow"),))]


async def test_queries_share_one_server() -> None:
    async with started(McpToolSource(STDIO, "pid")) as source:
        answers = await asyncio.gather(*(events(source, str(number)) for number in range(5)))
    assert all(answer == answers[0] for answer in answers)


async def test_structured_content_keeps_addresses_titles_and_scores(url: str) -> None:
    assert await asked(url, "documents") == [
        Update(
            (
                Chunk("The printer jams.", "notes://printer", "printer", 0, 0.5),
                Chunk("The scanner is slow.", "notes://scanner", "scanner", 0, 0.5),
            )
        )
    ]
    assert await asked(url, "one") == [Update((Chunk("all about printer", "one"),))]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"query": "q", "total": 2, "results": [{"text": "a", "uri": "a.md"}]}, [Update((Chunk("a", "a.md"),))]),
        (
            {"results": [{"text": "a"}, {"text": None, "url": "b.md"}, {"id": 3}, {"text": " "}, None]},
            [
                Skipped("b.md", "it has no text"),
                *(3 * [Skipped("structured", "it has no text")]),
                Update((Chunk("a", "structured"),)),
            ],
        ),
        ({"total": 0, "results": []}, [Update(())]),
        ({"text": "a summary", "results": [{"text": "b"}]}, [Update((Chunk("b", "structured"),))]),
        ({"text": "a", "marks": ["b"]}, [Update((Chunk("a", "structured"),))]),
        (None, [Skipped("structured", "the tool returned nothing")]),
        ({"one": [{"text": "a"}], "two": [{"text": "b"}]}, None),
        ({"results": [{"id": 1}]}, None),
    ],
)
async def test_structured_content_may_have_other_fields_and_entries_without_text(
    value: Any, expected: list[SourceEvent] | None
) -> None:
    text = json.dumps(value)
    found = await asked(STDIO, "structured", text)
    assert found == (expected or [Update((Chunk(text, "structured"),))])


async def test_content_other_than_text_is_skipped_and_reported(url: str) -> None:
    *skipped, update = await asked(url, "mixed", name="notes")
    assert update == Update((Chunk("a text", "notes"), Chunk("a near text", "notes://near")))
    assert [event.uri for event in skipped if isinstance(event, Skipped)] == ["notes", "notes://far", "notes://blob"]


async def test_a_function_reads_results_of_another_shape(url: str) -> None:
    def upper(result: Any) -> list[str]:
        return [content.text.upper() for content in result.content]

    assert await asked(url, "one", passages=upper) == [Update((Chunk("ALL ABOUT PRINTER", "one"),))]


async def test_a_pipeline_starts_the_server_asks_it_and_ends_it() -> None:
    source = McpToolSource(STDIO, "documents", name="notes")
    async with asyncio.timeout(LIMIT_S), Pipeline(source, ScriptedBackend("It jams [1].")) as pipeline:
        async with pipeline.stream("Why?") as answer:
            assert "".join([chunk.text async for chunk in answer]) == "It jams [1]."
    assert [citation.uri for citation in answer.result.citations] == ["notes://printer", "notes://scanner"]


async def test_a_tool_that_fails_says_why_and_the_next_query_works(url: str) -> None:
    async with started(McpToolSource(url, "fails")) as source:
        for _ in range(2):
            with pytest.raises(SourceError, match=r"the tool fails failed: .*no index for printer"):
                await events(source, "printer")


async def test_a_tool_or_an_argument_that_is_not_there_is_named_when_the_source_starts(url: str) -> None:
    with pytest.raises(ConfigurationError, match=r"no tool 'find'. Its tools: search, documents"):
        await asked(url, "find")
    with pytest.raises(ConfigurationError, match=r"'search' has no argument 'q'. It takes: query, most"):
        await asked(url, "search", argument="q")


async def test_a_server_that_cannot_be_started_or_reached_is_named() -> None:
    with pytest.raises(ConfigurationError, match="no program 'no-such-program'"):
        await asked(["no-such-program"], "search")
    with pytest.raises(SourceError, match=r"search.*Is it running"):
        await asked([sys.executable, "-c", "raise SystemExit(3)"], "search")
    with pytest.raises(SourceError, match="search"):
        await asked("http://127.0.0.1:9/mcp", "search", timeout_s=20)
    with pytest.raises(SourceError, match=r"has not answered in 0.5 s"):
        await asked([sys.executable, "-c", "import time; time.sleep(1000)"], "search", timeout_s=0.5)


@pytest.mark.parametrize("tool", ["hangs", "blocks"])
async def test_a_server_that_hangs_is_given_up(tool: str, tmp_path: Path) -> None:
    path = pipe(tmp_path)
    reader = asyncio.create_task(asyncio.to_thread(path.open))
    async with started(McpToolSource(STDIO, tool, timeout_s=20)) as source:
        source._opened._timeout_s = 0.5  # a server takes longer to start
        with pytest.raises(SourceError, match="has not answered"):
            await events(source, str(path))
        (await reader).close()


async def test_a_server_that_dies_fails_its_query_and_is_started_anew_for_the_next() -> None:
    async with started(McpToolSource(STDIO, "pid")) as source:
        first = await events(source, "")
        source._tool = "dies"
        with pytest.raises(SourceError, match="connection to the MCP server is lost"):
            await events(source, "")
        source._tool = "pid"
        assert first != await events(source, "")


async def test_an_answer_of_too_many_bytes_fails_its_query(url: str) -> None:
    assert await asked(url, "floods", "5") == [Update((Chunk("xxxxx", "floods"),))]
    with pytest.raises(SourceError):
        await asked(url, "floods", "3_000_000", max_bytes=1 << 20)
    with pytest.raises(SourceError, match=r"server is lost: one answer has more than 1,048,576 bytes"):
        await asked(STDIO, "floods", "3_000_000", max_bytes=1 << 20)


async def test_a_message_of_too_many_values_is_refused_before_it_is_read(url: str) -> None:
    assert await asked(url, "crowds", "2") == [Update((Chunk("0", "crowds"), Chunk("1", "crowds", passage=1)))]
    with pytest.raises(SourceError, match="65,536 values"):
        await asked(url, "crowds", "20_000")
    text = 20_000 * """,[{"\\'"""  # in a string they are no values
    assert await asked(url, "one", text) == [Update((Chunk(f"all about {text}", "one"),))]


def old_server(folder: Path, case: str, does: str) -> list[str]:
    """The command of the older server, which `does` something else in this case."""
    script = folder / "server.py"
    code = (HERE / "old_mcp_server.py").read_text()
    assert f'case "{case}":' in code
    script.write_text(code.replace(f'case "{case}":', f'case "{case}":\n            {does}'))
    return [sys.executable, str(script)]


async def test_a_server_that_falls_silent_fails_its_query_at_once(tmp_path: Path) -> None:
    server = old_server(tmp_path, "resources/read", "import os, time; os.close(1); time.sleep(1000)")
    async with started(McpResourceSource(server, ["notes://printer"])) as source:
        with pytest.raises(SourceError, match="connection to the MCP server is lost"):
            await events(source, "")


PING = """while True: send(id=1, method="ping")"""
LOG = """while True: send(method="notifications/message", params={"level": "info", "data": "x" * 100_000})"""
SAID = """while True: send(id="nobody asked", result={"text": "x" * 100_000})"""
JUNK = """while True: print("no message", flush=True)"""


@pytest.mark.parametrize(
    ("does", "why"), [(PING, "more than 64 open requests"), (LOG, "too many"), (SAID, "too many"), (JUNK, "too many")]
)
async def test_a_server_that_talks_without_being_asked_is_dropped(does: str, why: str, tmp_path: Path) -> None:
    server = old_server(tmp_path, "resources/read", does)
    async with started(McpResourceSource(server, ["notes://printer"])) as source:
        with pytest.raises(SourceError, match=f"the connection to the MCP server is lost: it has .*{why}"):
            await events(source, "")


async def test_a_server_that_talks_over_http_without_being_asked_is_dropped() -> None:
    def answer(number: int, **result: Any) -> bytes:
        return json.dumps({"jsonrpc": "2.0", "id": number, "result": result}).encode()

    log = {"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x" * 100_000}}

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).lower()
                length = re.search(rb"content-length: (\d+)", head)
                body = json.loads(await reader.readexactly(int(length[1]))) if length else {}
                match body.get("method"):
                    case "initialize":
                        version, info = body["params"]["protocolVersion"], {"name": "old", "version": "1"}
                        says = answer(body["id"], protocolVersion=version, capabilities={}, serverInfo=info)
                    case "tools/list":
                        says = answer(body["id"], tools=[{"name": "search", "inputSchema": {"type": "object"}}])
                    case "tools/call":
                        writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n")
                        while True:
                            writer.write(b"data: " + json.dumps(log).encode() + b"\n\n")
                            await writer.drain()
                    case _:
                        writer.write(b"HTTP/1.1 404 None\r\nContent-Length: 0\r\n\r\n")
                        continue
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n")
                writer.write(b"Content-Length: %d\r\n\r\n" % len(says) + says)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(SourceError, match="is lost: it has sent too many unsolicited messages"):
            await asked(f"http://127.0.0.1:{port}/mcp", "search")


async def test_queries_that_come_after_a_server_hung_have_another_and_those_before_keep_theirs(tmp_path: Path) -> None:
    path = pipe(tmp_path)
    async with started(McpToolSource(STDIO, "blocks")) as source:
        waits = asyncio.create_task(events(source, str(path)))
        with await asyncio.to_thread(path.open) as said:
            process = os.pidfd_open(int(await asyncio.to_thread(said.readline)))
        source._tool = "one"
        source._opened._timeout_s = 0.5  # a server takes longer to start
        with pytest.raises(SourceError, match="has not answered"):
            await events(source, "it")
        source._opened._timeout_s = LIMIT_S
        assert await events(source, "it") == [Update((Chunk("all about it", "blocks"),))]
        assert not waits.done()
        assert not has_ended(process, 0)
        waits.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waits
        assert await asyncio.to_thread(has_ended, process)
        os.close(process)


async def test_no_process_is_left_of_a_server_that_hung_while_others_had_another(tmp_path: Path) -> None:
    path = pipe(tmp_path)
    async with started(McpToolSource(STDIO, "blocks")) as source:
        waits = asyncio.create_task(events(source, str(path)))
        with await asyncio.to_thread(path.open) as said:
            process = os.pidfd_open(int(await asyncio.to_thread(said.readline)))
        source._opened.doubt(source._opened._held.client)
        source._tool = "one"
        assert await events(source, "it") == [Update((Chunk("all about it", "blocks"),))]
    assert has_ended(process)
    with pytest.raises(SourceError, match="is lost"):
        await waits
    os.close(process)


async def test_a_server_that_reads_nothing_keeps_no_query_beyond_its_time(tmp_path: Path) -> None:
    server = old_server(tmp_path, "notifications/initialized", "import time; time.sleep(1000)")
    uri = f"notes://{'x' * 200_000}"  # more than a pipe holds
    async with started(McpResourceSource(server, [uri])) as source:
        source._opened._timeout_s = 0.5
        with pytest.raises(SourceError, match=r"has not answered in 0.5 s"):
            await events(source, "")
        is_left = [task for task in asyncio.all_tasks() if task.get_name() == "McpResourceSource call"]
        assert is_left, "the query has waited until the server was told"


async def test_a_query_that_is_cancelled_cancels_the_call_and_leaves_the_server_to_others(tmp_path: Path) -> None:
    path = pipe(tmp_path)
    async with started(McpToolSource(STDIO, "hangs")) as source:
        query = asyncio.create_task(events(source, str(path)))
        with await asyncio.to_thread(path.open) as said:
            assert await asyncio.to_thread(said.readline) == "begun\n"
            query.cancel()
            with pytest.raises(asyncio.CancelledError):
                await query
            assert await asyncio.to_thread(said.readline) == "cancelled\n"
        source._tool = "one"
        assert await events(source, "it") == [Update((Chunk("all about it", "hangs"),))]


async def test_no_process_is_left_of_a_server_that_ignores_everything(tmp_path: Path) -> None:
    path = pipe(tmp_path)
    async with started(McpToolSource(STDIO, "blocks")) as source:
        query = asyncio.create_task(events(source, str(path)))
        with await asyncio.to_thread(path.open) as said:
            process = os.pidfd_open(int(await asyncio.to_thread(said.readline)))
        query.cancel()
        with pytest.raises(asyncio.CancelledError):
            await query
        assert not has_ended(process, 0)
    assert has_ended(process)
    os.close(process)


async def test_no_process_is_left_when_starting_is_cancelled(tmp_path: Path) -> None:
    path = pipe(tmp_path)
    code = f"""
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
with open({str(path)!r}, "w") as pipe: print(os.getpid(), file=pipe)
time.sleep(1000)
"""
    start = asyncio.create_task(McpToolSource([sys.executable, "-c", code], "search").start(print))
    with await asyncio.to_thread(path.open) as said:
        process = os.pidfd_open(int(await asyncio.to_thread(said.readline)))
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start
    assert has_ended(process)
    os.close(process)


async def test_a_query_that_connects_anew_while_the_source_is_closed_says_so(tmp_path: Path) -> None:
    path, flag = pipe(tmp_path), tmp_path / "second"
    code = f"""
import os, pathlib, runpy, sys, time
if pathlib.Path({str(flag)!r}).exists():
    with open({str(path)!r}, "w") as pipe: print("begun", file=pipe)
    time.sleep(1000)
sys.argv = ["mcp_server.py"]
runpy.run_path({STDIO[1]!r}, run_name="__main__")
"""
    source = McpToolSource([sys.executable, "-c", code], "dies")
    await source.start(lambda line: None)
    with pytest.raises(SourceError, match="is lost"):
        await events(source, "")
    flag.touch()
    query = asyncio.create_task(events(source, ""))
    with await asyncio.to_thread(path.open) as said:
        assert await asyncio.to_thread(said.readline) == "begun\n"
    async with asyncio.timeout(LIMIT_S):
        await source.aclose()
        with pytest.raises(SourceError, match="closed while it connected"):
            await query


def test_a_server_that_reads_its_input_ends_with_the_program_even_if_that_is_killed() -> None:
    code = f"""
import asyncio
from streamrag.adapters.mcp import McpToolSource

async def main():
    source = McpToolSource({STDIO!r}, "pid")
    await source.start(lambda line: None)
    async for event in source.stream(""):
        print(event.chunks[0].text, flush=True)
    await asyncio.sleep(1000)

asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout
        process = os.pidfd_open(int(program.stdout.readline()))
        program.send_signal(signal.SIGKILL)
    assert has_ended(process)
    os.close(process)


async def test_a_resource_that_changes_is_an_update(url: str) -> None:
    uris = ["notes://scanner", "notes://printer"]
    source = McpResourceSource(url, uris, watch_s=LIMIT_S)
    changer = McpToolSource(url, "change")
    async with started(source), started(changer), aclosing(source.stream("")) as stream:
        await anext(stream)
        before = await anext(stream)
        assert isinstance(before, Update)
        scanner, printer = before.chunks
        assert (scanner.uri, printer.uri) == ("notes://scanner", "notes://printer")
        await events(changer, f"printer={printer.text} Still.")
        assert await anext(stream) == Update((scanner, Chunk(f"{printer.text} Still.", "notes://printer")))
        await events(changer, f"printer={printer.text}")
        assert await anext(stream) == before


async def test_a_server_of_an_older_protocol_is_read_but_cannot_be_watched() -> None:
    async with started(McpResourceSource(OLD, ["notes://printer"])) as source:
        assert await events(source, "") == [Update((Chunk("The printer jams.", "notes://printer"),))]
    async with started(McpResourceSource(OLD, ["notes://printer"], watch_s=9)) as source:
        with pytest.raises(SourceError, match="of protocol 2025-06-18, has no subscriptions/listen; use watch_s=0"):
            await events(source, "")


async def test_a_source_that_is_closed_while_a_query_connects_leaves_no_server() -> None:
    async with started(McpResourceSource(OLD, ["notes://printer"])) as source:
        connection = source._connection()
        async with connection.client() as client:
            connection.doubt(client)
        query = asyncio.create_task(events(source, ""))
        await asyncio.sleep(0)
        await source.aclose()
        with pytest.raises(SourceError, match="was closed"):
            await query
        assert not [task for task in asyncio.all_tasks() if task.get_name().endswith("connection")]


async def test_watching_ends_when_its_time_is_up() -> None:
    async with started(McpResourceSource(STDIO, ["notes://printer"], watch_s=0.1)) as source:
        assert await events(source, "") == [Update((Chunk("The printer jams.", "notes://printer"),))]


async def test_watching_ends_though_a_resource_changes_faster_than_it_is_read() -> None:
    async with started(McpResourceSource(STDIO, ["notes://restless/it"], watch_s=0.2)) as source:
        assert isinstance((await events(source, ""))[-1], Update)


async def test_a_server_that_dies_while_it_is_watched_cuts_retrieval_short() -> None:
    server = await asyncio.create_subprocess_exec(*STDIO, "http", stdout=subprocess.PIPE)
    assert server.stdout
    url = f"http://127.0.0.1:{int(await server.stdout.readline())}/mcp"
    async with started(McpResourceSource(url, ["notes://printer"], watch_s=LIMIT_S)) as source:
        async with aclosing(source.stream("")) as stream:
            assert isinstance(await anext(stream), Update)
            server.kill()
            await server.wait()
            assert isinstance(await anext(stream), CutShort)
            assert await anext(stream, None) is None


async def test_resources_are_read_in_order_and_those_that_cannot_be_are_skipped(url: str) -> None:
    uris = ["notes://about/{query}", "notes://none", "notes://picture"]
    async with started(McpResourceSource(url, uris)) as source:
        update, *skipped = await events(source, "paper jams")
    assert update == Update((Chunk("about paper jams", "notes://about/paper%20jams"),))
    assert [event.uri for event in skipped if isinstance(event, Skipped)] == ["notes://none", "notes://picture"]
    async with started(McpResourceSource(url, ["notes://none"])) as source:
        with pytest.raises(SourceError, match="no resource can be read"):
            await events(source, "")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: McpToolSource("server.py", "search"), "a command is a list"),
        (lambda: McpToolSource(STDIO, "search", timeout_s=0), "timeout_s=0"),
        (lambda: McpToolSource(STDIO, "search", max_bytes=0), "max_bytes=0"),
        (lambda: McpToolSource(STDIO, "search", arguments={"query": 1}), "is the query's"),
        (lambda: McpToolSource(STDIO, "search", headers={}), "headers"),
        (lambda: McpResourceSource(STDIO, "notes://a"), "must be a non-empty list"),
        (lambda: McpResourceSource(STDIO, ["notes://a"], watch_s=-1), "watch_s=-1"),
    ],
)
def test_values_that_cannot_work_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        make()


async def test_a_source_that_is_not_started_says_so() -> None:
    with pytest.raises(SourceError, match="not started"):
        await events(McpToolSource(STDIO, "search"), "")


async def test_a_missing_package_names_its_install_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install '\.\[mcp\]'"):
        await McpToolSource(STDIO, "search").start(print)


def test_the_package_is_not_imported_before_a_source_starts() -> None:
    code = "import sys, streamrag.adapters.mcp; raise SystemExit('mcp' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_mcp_package_has_the_parameters_that_the_adapter_uses() -> None:
    """Fails when the interface of `mcp` moves: look at streamrag/adapters/mcp/connection.py then."""
    wanted = {
        ("mcp", "Client"): {"server", "read_timeout_seconds"},
        ("mcp", "stdio_client"): {"server", "errlog"},
        ("mcp.client.streamable_http", "streamable_http_client"): {"url", "http_client", "max_sse_event_size"},
        ("mcp", "StdioServerParameters"): {"command", "args", "env", "cwd"},
    }
    for (module, name), parameters in wanted.items():
        assert parameters <= inspect.signature(getattr(importlib.import_module(module), name)).parameters.keys()
    client = importlib.import_module("mcp").Client
    assert {"resource_subscriptions"} <= inspect.signature(client.listen).parameters.keys()
    assert {"progress_callback"} <= inspect.signature(client.call_tool).parameters.keys()
    assert {"cache_mode"} <= inspect.signature(client.read_resource).parameters.keys()
