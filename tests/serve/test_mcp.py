"""The tool `ask`, called with MCP's own client over a real socket."""

import asyncio
import json
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import anyio
import httpx2
import pytest

from streamrag import Append, SourceError
from streamrag.serve import Limits
from streamrag.testing import ScriptedBackend
from tests.serve.serving import CHUNKS, PARIS, ROME, Serving, serving

mcp = pytest.importorskip("mcp")

QUESTION = {"question": "What is the capital of France?"}


@asynccontextmanager
async def client_of(served: Serving, headers: Mapping[str, str] | None = None, **options: Any) -> AsyncIterator[Any]:
    from mcp.client.streamable_http import streamable_http_client

    async with httpx2.AsyncClient(headers=dict(headers or {}), timeout=120) as http:
        async with mcp.Client(streamable_http_client(f"{served.url}/mcp", http_client=http), **options) as client:
            yield client


async def freed(served: Serving) -> bool:
    """Whether nothing is left once the query has ended."""
    await served.watcher.has_ended.wait()
    return is_free(served)


def is_free(served: Serving) -> bool:
    return not served.service.queries and not served.source.num_streams and not served.backend.num_requests


async def test_a_message_has_few_values_but_a_long_question() -> None:
    arguments = f'{{"question": "Where?", "x": [{"[]," * 1_100}1]}}'
    body = (
        f'{{"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {{"name": "ask", "arguments": {arguments}}}}}'
    )
    async with serving() as served, client_of(served) as client:
        answer = await served.http.post("/mcp", content=body)
        assert (answer.status_code, answer.json()["error"]["code"]) == (413, "too_many_values")
        assert served.source.queries == []
        result = await client.call_tool("ask", {"question": "Where, [{" * 1_100})
    assert not result.is_error


async def test_the_tool_answers_with_its_sources() -> None:
    async with serving() as served, client_of(served) as client:
        (tool,) = (await client.list_tools()).tools
        assert tool.name == "ask"
        assert tool.input_schema["required"] == ["question"]
        assert list(tool.input_schema["properties"]) == ["question"]
        assert set(tool.output_schema["properties"]) == {"answer", "sources"}
        result = await client.call_tool("ask", QUESTION)
    assert not result.is_error
    (content,) = result.content
    assert content.text == f"It is Paris [1].\n\nSources:\n[1] {PARIS.title} {PARIS.uri}"
    assert result.structured_content == {
        "answer": "It is Paris [1].",
        "sources": [
            {"number": 1, "title": PARIS.title, "uri": PARIS.uri, "is_cited": True},
            {"number": 2, "title": ROME.title, "uri": ROME.uri, "is_cited": False},
        ],
    }
    assert served.source.queries == [QUESTION["question"]]
    assert served.watcher.ended == [("mcp", "answered")]


async def test_progress_says_what_was_found_while_it_runs() -> None:
    told: list[tuple[float, str | None]] = []

    async def note(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    async with serving() as served, client_of(served) as client:
        await client.call_tool("ask", QUESTION, progress_callback=note)
    assert told == [
        (1, "1 passage found"),
        (2, "2 passages found"),
        (3, "retrieval is complete: 2 passages"),
        (4, "answering"),
    ]


async def test_a_client_that_leaves_frees_everything(caplog: pytest.LogCaptureFixture) -> None:
    never = anyio.Event()

    async def ignore(progress: float, total: float | None, message: str | None) -> None:
        """So that the response has begun."""

    async with serving([CHUNKS[0], never]) as served:
        async with client_of(served) as client:
            call = asyncio.create_task(client.call_tool("ask", QUESTION, progress_callback=ignore))
            await served.watcher.has_begun.wait()
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            assert await freed(served)
    assert served.watcher.ended == [("mcp", "left")]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


OLD = {
    "accept": "application/json, text/event-stream",
    "content-type": "application/json",
    "mcp-protocol-version": "2025-06-18",
}


def call_of(**arguments: Any) -> dict[str, Any]:
    params = {"name": "ask", "arguments": arguments}
    return {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}


async def test_a_client_of_the_protocol_before_gets_the_same_and_may_leave(caplog: pytest.LogCaptureFixture) -> None:
    never = anyio.Event()
    async with serving() as served:
        answer = await served.http.post("/mcp", json=call_of(**QUESTION), headers=OLD)
        (line,) = (line for line in answer.text.splitlines() if line.startswith("data: {"))
        assert json.loads(line[6:])["result"]["structuredContent"]["answer"] == "It is Paris [1]."
    async with serving([CHUNKS[0], never]) as served:
        async with served.http.stream("POST", "/mcp", json=call_of(**QUESTION), headers=OLD):
            await served.watcher.has_begun.wait()
        assert await freed(served)
    assert served.watcher.ended == [("mcp", "left")]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


async def test_a_refusal_says_when_to_come_again_and_a_failure_what_failed() -> None:
    never = anyio.Event()
    limits = Limits(max_queries=1)
    async with serving([CHUNKS[0], never], limits=limits) as served, client_of(served) as client:
        first = asyncio.create_task(client.call_tool("ask", QUESTION))
        await served.watcher.has_begun.wait()
        refused = await client.call_tool("ask", QUESTION)
        never.set()
        assert not (await first).is_error
    assert refused.is_error
    assert "1 queries are open" in refused.content[0].text
    assert "(try again in 1 s)" in refused.content[0].text
    assert served.watcher.refused == [("anonymous", "mcp", "queries")]
    async with serving([Append(PARIS), SourceError("the index is gone")]) as served, client_of(served) as client:
        failed = await client.call_tool("ask", QUESTION)
    assert failed.is_error
    assert "retrieval failed" in failed.content[0].text
    async with serving(backend=ScriptedBackend(error=RuntimeError("secret"))) as served, client_of(served) as client:
        unforeseen = await client.call_tool("ask", QUESTION)
    assert unforeseen.is_error
    assert "secret" not in unforeseen.content[0].text


async def test_a_deadline_counts() -> None:
    async with serving([anyio.Event()], limits=Limits(deadline_s=0.05)) as served, client_of(served) as client:
        late = await client.call_tool("ask", QUESTION)
    assert late.is_error
    assert "deadline" in late.content[0].text
    assert served.watcher.ended == [("mcp", "deadline")]


async def test_a_call_is_told_that_the_service_stops() -> None:
    async with serving([CHUNKS[0], anyio.Event()]) as served, client_of(served) as client:
        call = asyncio.create_task(client.call_tool("ask", QUESTION))
        await served.watcher.has_begun.wait()
        await served.service.aclose()
        stopped = await call
        late = await client.call_tool("ask", QUESTION)
    assert stopped.is_error
    assert "the service is stopping" in stopped.content[0].text
    assert "the service is stopping" in late.content[0].text
    assert served.watcher.ended == [("mcp", "shut_down")]


async def test_a_key_is_wanted_and_names_the_client() -> None:
    async with serving(keys={"k" * 16: "alice"}) as served:
        refused = await served.http.post("/mcp", json=call_of(**QUESTION), headers={**OLD, "authorization": "Bearer x"})
        async with client_of(served, {"authorization": f"Bearer {'k' * 16}"}) as client:
            await client.call_tool("ask", QUESTION)
    assert refused.status_code == 401
    assert [query.client for query in served.watcher.started] == ["alice"]


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"{", 400),
        (b"[]", 400),
        (b"\xff" * 100, 400),
        (b'{"jsonrpc": "2.0", "id": 1, "method": "nothing"}', 200),
        (json.dumps(call_of(question=7)).encode(), 200),
        (json.dumps(call_of(question="  ")).encode(), 200),
        (json.dumps(call_of(nothing="x")).encode(), 200),
        (b"[" * 1_000, 400),
        (b"[" * 30_000, 413),
        (b"[" * 100_000, 413),
        (b"x" * 2_000_000, 413),
    ],
)
async def test_a_malformed_call_is_refused_and_the_next_call_works(body: bytes, status: int) -> None:
    async with serving() as served:
        answer = await served.http.post("/mcp", content=body, headers=OLD)
        assert answer.status_code == status
        assert "rror" in answer.text
        async with client_of(served) as client:
            assert not (await client.call_tool("ask", QUESTION)).is_error
        assert (await served.http.get("/mcp")).status_code == 405
        assert is_free(served)
