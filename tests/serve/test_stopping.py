"""SIGTERM, and the death of the engine, as whoever started the service sees them: errors, and an exit status."""

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from streamrag.errors import ConfigurationError
from streamrag.serve import Service, create_app, engine_watch
from streamrag.serve.engine_watch import RestartBudget
from streamrag.serve.server import listen, serve
from streamrag.testing import ScriptedBackend
from tests.serve.raw import FINISH, OPEN, raw
from tests.serve.scripted_server import MortalBackend
from tests.serve.serving import serving

pytestmark = pytest.mark.usefixtures("default_signals")


@asynccontextmanager
async def running(
    backend: str = "instant", limits: dict[str, Any] | None = None, **options: Any
) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """A service in a process of its own, and its address."""
    given = json.dumps({"backend": backend, "limits": limits or {}, **options})
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.serve.scripted_server", given), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process, json.loads(await process.stdout.readline())["url"]
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def test_sigterm_refuses_what_is_new_and_lets_end_what_is_open() -> None:
    async with running(limits={"drain_s": 1000}) as (process, url), raw(url) as client, raw(url) as late:
        await client.post("/v1/streams")
        await client.line(OPEN)
        assert await client.status() == 200
        await client.until("retrieval_started")
        process.send_signal(signal.SIGTERM)
        status = 200
        while status == 200:  # the signal takes its time
            await late.post("/v1/ask", {"question": "What?"})
            status = await late.status()
            body = await late.text()
        assert status == 503
        assert json.loads(body)["error"]["code"] == "draining"
        await client.line(FINISH)
        await client.until("answered")
        assert await process.wait() == 0


async def test_sigterm_aborts_what_does_not_end_in_time() -> None:
    async with running("endless", {"drain_s": 0.3}) as (process, url), raw(url) as ask, raw(url) as stream:
        await ask.post("/v1/ask", {"question": "What?"})
        assert await ask.status() == 200
        await ask.until("tokens_generated")
        await stream.post("/v1/streams")
        await stream.line(OPEN)
        assert await stream.status() == 200
        process.send_signal(signal.SIGTERM)
        for client in (ask, stream):
            assert (await client.until("error"))["error"]["code"] == "draining"
        assert await process.wait() == 3


MESSAGES = [{"role": "user", "content": "What?"}]
CALL = {"name": "ask", "arguments": {"question": "What?"}, "_meta": {"progressToken": 1}}
STREAMED: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES, "stream": True},
    "/v1/responses": {"input": "What?", "stream": True},
    "/v1/retrieve": {"query": "wait for ever"},
    "/mcp": {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": CALL},
}


async def test_every_open_stream_says_that_the_service_is_stopping() -> None:
    headers = {"accept": "application/json, text/event-stream", "content-type": "application/json"}
    async with running("endless", {"drain_s": 0.1}) as (process, url), AsyncExitStack() as clients:
        streaming = []
        for path, body in STREAMED.items():
            client = await clients.enter_async_context(raw(url))
            await client.post(path, body, headers)
            if (status := await client.status()) != 404 or path != "/mcp":  # which is an extra
                assert status == 200, path
                streaming.append(client)
        process.send_signal(signal.SIGTERM)
        for client in streaming:
            assert "the service is stopping" in await client.text()
        assert await process.wait() == 3


async def test_a_second_sigterm_aborts_at_once() -> None:
    async with running("endless", {"drain_s": 1000}) as (process, url), raw(url) as client:
        await client.post("/v1/ask", {"question": "What?"})
        assert await client.status() == 200
        await client.until("tokens_generated")
        process.send_signal(signal.SIGTERM)
        async with raw(url) as late:
            status = 200
            while status != 503:
                await late.send(b"GET /readyz HTTP/1.1\r\nhost: localhost\r\n\r\n")
                status = await late.status()
                await late.text()
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGTERM):
            process.send_signal(number)
        assert (await client.until("error"))["error"]["code"] == "draining"
        assert await process.wait() == 3


async def test_the_exit_status_says_that_the_engine_died() -> None:
    async with running("endless") as (process, url), raw(url) as client, raw(url) as killer:
        await client.post("/v1/ask", {"question": "What?"})
        assert await client.status() == 200
        await client.until("tokens_generated")
        await killer.post("/v1/ask", {"question": "die"})
        assert await killer.status() == 200
        for each in (client, killer):
            assert (await each.until("error"))["error"]["code"] == "engine_dead"
        assert await process.wait() == 4


@pytest.mark.parametrize("hangs", [False, True])
async def test_an_engine_that_dies_answers_every_open_request_with_an_error_and_is_started_again(hangs: bool) -> None:
    backend = MortalBackend(answer="It is Paris.", is_endless=True, hangs=hangs)
    async with (
        serving(backend=backend, restarts=RestartBudget()) as served,
        raw(served.url) as ask,
        raw(served.url) as stream,
    ):
        await ask.post("/v1/ask", {"question": "What?"})
        assert await ask.status() == 200
        await ask.until("tokens_generated")
        await stream.post("/v1/streams")
        await stream.line(OPEN)
        assert await stream.status() == 200
        await stream.until("retrieval_started")
        backend.died.set()
        for client in (ask, stream):
            assert (await client.until("error"))["error"]["code"] == "engine_dead"
        while not served.service.is_ready or backend.died.is_set():  # noqa: ASYNC110 -- has no event
            await asyncio.sleep(0)
        async with raw(served.url) as again:
            await again.post("/v1/streams")
            await again.line(OPEN, FINISH)
            assert await again.status() == 200
            await again.until("tokens_generated")
    assert {outcome for _, outcome in served.watcher.ended} <= {"engine_dead", "left", "shut_down"}


async def test_a_restart_that_takes_its_time_is_said_at_readyz() -> None:
    backend = MortalBackend(answer="It is Paris.")
    may_start, start = asyncio.Event(), backend.start

    async def slowly(progress: Any) -> None:
        await may_start.wait()
        await start(progress)

    async with serving(backend=backend, restarts=RestartBudget()) as served:
        backend.start = slowly  # type: ignore[method-assign]
        backend.died.set()
        while (await served.http.get("/readyz")).status_code == 200:
            pass
        answer = await served.http.get("/readyz")
        assert answer.text == "not ready: the engine died; restart 1 of at most 5\n"
        assert answer.headers["retry-after"] == "5"
        assert (await served.http.get("/healthz")).status_code == 200
        may_start.set()
        while (await served.http.get("/readyz")).status_code != 200:
            pass


async def test_an_engine_that_cannot_be_started_again_ends_the_service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(engine_watch, "FIRST_BACKOFF_S", 0.01)
    backend = MortalBackend(answer="It is Paris.")
    async with serving(backend=backend, restarts=RestartBudget(3)) as served:

        async def fails(progress: object) -> None:
            raise RuntimeError("no device")

        backend.start = fails  # type: ignore[method-assign]
        backend.died.set()
        await served.service.dead.wait()
        assert [(await served.http.get(path)).status_code for path in ("/healthz", "/health")] == [503, 503]
        answer = await served.http.post("/v1/ask", json={"question": "What?"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "not_ready")
    assert [record.getMessage() for record in caplog.records if record.name == "streamrag.serve"] == [
        "the engine died; restart 1 of at most 3, in 0 s: the engine was killed",
        "the engine died; restart 2 of at most 3, in 0.01 s: no device",
        "the engine died; restart 3 of at most 3, in 0.02 s: no device",
        "the engine died and will not be restarted: no device",
    ]


def test_restarts_wait_longer_each_time_end_at_a_limit_and_are_forgotten() -> None:
    restarts = RestartBudget(9, 300.0)
    assert [restarts.begin(float(i)) for i in range(10)] == [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, None]
    assert [restarts.begin(303.0) for _ in range(5)] == [16.0, 32.0, 60.0, 60.0, None], "four are of long ago"
    assert restarts.begin(1000.0) == 0.0


async def test_an_engine_that_dies_in_a_drain_is_not_started_again() -> None:
    async with running("endless", {"drain_s": 1000}, restarts=True) as (process, url):
        async with raw(url) as client, raw(url) as stream:
            await stream.post("/v1/streams")
            await stream.line(OPEN)
            assert await stream.status() == 200
            await client.post("/v1/ask", {"question": "wait and die"})
            assert await client.status() == 200
            await client.until("retrieval_started")
            process.send_signal(signal.SIGTERM)
            for each in (client, stream):
                assert (await each.until("error"))["error"]["code"] == "engine_dead"
            assert await process.wait() == 4


async def test_sighup_while_the_engine_is_started_again_ends_the_service() -> None:
    async with running("endless", restarts=True) as (process, url), raw(url) as killer:
        await killer.post("/v1/ask", {"question": "die"})
        assert await killer.status() == 200
        assert (await killer.until("error"))["error"]["code"] == "engine_dead"
        process.send_signal(signal.SIGHUP)
        assert await process.wait() == 0


async def test_many_signals_in_retrieval_and_in_prefill_end_with_the_same_status() -> None:
    async with running("held", {"drain_s": 1000}) as (process, url), raw(url) as retrieving, raw(url) as prefilling:
        await retrieving.post("/v1/ask", {"question": "wait for ever"})
        await prefilling.post("/v1/ask", {"question": "What?"})
        for client in (retrieving, prefilling):
            assert await client.status() == 200
            await client.until("context_changed")
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGTERM):
            process.send_signal(number)
        for client in (retrieving, prefilling):
            assert (await client.until("error"))["error"]["code"] == "draining"
        assert await process.wait() == 3


async def test_the_second_service_at_one_address_says_that_it_cannot_listen() -> None:
    service = Service(ScriptedBackend())
    with listen("127.0.0.1", 0) as first, listen("127.0.0.1", first.getsockname()[1]) as second:
        await service.start()
        first.listen()
        with pytest.raises(ConfigurationError, match="cannot listen: Address already in use"):
            await serve(create_app(service), service, second, on_ready=lambda: pytest.fail("it does not listen"))
    assert not service.is_ready
