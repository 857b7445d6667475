"""Too many, too late, gone, too slow: what a service does about it, on every interface, over real sockets."""

import asyncio
import json
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import Any

import anyio
import pytest

from streamrag import Append, Chunk
from streamrag.serve import Limits
from streamrag.testing import ScriptedBackend
from tests.serve.raw import FINISH, OPEN, Raw, append, raw
from tests.serve.serving import CHUNKS, PARIS, ROME, Serving, limits_of, serving

QUESTION = "What is the capital of France?"
MESSAGES = {"messages": [{"role": "user", "content": QUESTION}]}

BODIES: dict[str, tuple[str, Any]] = {
    "chat": ("/v1/chat/completions", MESSAGES),
    "chat stream": ("/v1/chat/completions", {**MESSAGES, "stream": True}),
    "ask": ("/v1/ask", {"question": QUESTION}),
    "retrieve": ("/v1/retrieve", {"query": QUESTION}),
}

ASKED = [*BODIES, "streams"]


async def ask(client: Raw, interface: str, *lines: Any) -> None:
    """A query; a stream gets the first line, and more."""
    if interface == "streams":
        await client.post("/v1/streams")
        await client.line(OPEN, *lines)
    else:
        await client.post(*BODIES[interface])


# ------------------------------------------------------------------------------------------------------- too many


@pytest.mark.parametrize("interface", ASKED)
@pytest.mark.parametrize(
    ("limits", "why"),
    [
        (Limits(max_queries=1), "queries"),
        (Limits(max_queries_per_client=1), "client_queries"),
        (Limits(max_requests_per_minute=1), "client_rate"),
    ],
)
async def test_a_query_over_a_limit_is_told_when_to_come_again(interface: str, limits: Limits, why: str) -> None:
    async with serving([anyio.Event()], limits=limits) as served, raw(served.url) as first, raw(served.url) as second:
        await ask(first, "ask")
        await served.watcher.has_begun.wait()
        answer = await served.http.post("/v1/ask", json={"question": QUESTION})
        assert answer.status_code == 429
        assert 1 <= int(answer.headers["retry-after"]) <= 60
        await ask(second, interface)
        assert await second.status() == 429
        error = json.loads(await second.text())["error"]
        assert (error["code"], error["type"]) == (why, "rate_limit_error")
        assert served.service.admission.num_queries == 1
    name = interface.partition(" ")[0]
    assert served.watcher.refused == [("anonymous", "ask", why), ("anonymous", name, why)]


@pytest.mark.parametrize("interface", ["chat", "chat stream", "ask", "streams"])
async def test_tokens_that_wait_are_bounded_and_retrieval_needs_none(interface: str) -> None:
    async with (
        serving([anyio.Event()], limits=Limits(max_queued_tokens=300)) as served,
        raw(served.url) as first,
        raw(served.url) as second,
        raw(served.url) as third,
    ):
        await ask(first, "ask")
        await served.watcher.has_begun.wait()
        await ask(second, interface)
        assert await second.status() == 429
        assert json.loads(await second.text())["error"]["code"] == "tokens"
        await ask(third, "retrieve")
        assert await third.status() == 200


async def test_a_client_that_asks_too_much_takes_no_place_from_another() -> None:
    limits = Limits(max_queries_per_client=1)
    async with serving(limits=limits, keys={"a": "alice", "b": "bob"}) as served, raw(served.url) as greedy:
        await greedy.post("/v1/streams", headers={"authorization": "Bearer a"})
        await greedy.line(OPEN)
        assert await greedy.status() == 200
        for key, status in (("a", 429), ("b", 200)):
            answer = await served.http.post(
                "/v1/ask", json={"question": QUESTION}, headers={"authorization": f"Bearer {key}"}
            )
            assert answer.status_code == status


# ------------------------------------------------------------------------------------------------------- too late


@pytest.mark.parametrize("interface", ASKED)
async def test_a_deadline_ends_a_query_with_an_error(interface: str) -> None:
    limits = limits_of(deadline_s=0.3, stream_s=0.3)
    async with serving([anyio.Event()], limits=limits) as served, raw(served.url) as client:
        await ask(client, interface)
        status = await client.status()
        text = await client.text()
        assert status == (504 if interface == "chat" else 200)
        assert "deadline_exceeded" in text
        await freed(served, time.monotonic())
    assert [outcome for _, outcome in served.watcher.ended] == ["deadline"]


# ------------------------------------------------------------------------------------------------------------ gone


def before_retrieval() -> dict[str, Any]:
    return {"steps": [anyio.Event(), *CHUNKS]}


def between_chunks() -> dict[str, Any]:
    return {"steps": [Append(PARIS), anyio.Event(), Append(ROME)]}


def in_prefill() -> dict[str, Any]:
    return {"steps": CHUNKS, "backend": ScriptedBackend(hold=anyio.Event())}


def in_decode() -> dict[str, Any]:
    return {"steps": CHUNKS, "backend": ScriptedBackend(answer="It is", is_endless=True)}


REACHED: dict[Callable[[], dict[str, Any]], Callable[[Serving], object]] = {
    before_retrieval: lambda served: served.service.queries,
    between_chunks: lambda served: "ChunkArrived" in names(served),
    in_prefill: lambda served: "ContextChanged" in names(served),
    in_decode: lambda served: "TokensGenerated" in names(served),
}


def names(served: Serving) -> set[str]:
    return {type(event).__name__ for event in served.watcher.events}


async def until(condition: Callable[[], object]) -> None:
    while not condition():  # noqa: ASYNC110 -- nothing of it has an event
        await asyncio.sleep(0)


async def freed(served: Serving, since_s: float) -> None:
    """Nothing of any query is left."""
    service = served.service
    await until(
        lambda: (
            not service.queries
            and not service.admission.num_queries
            and not served.source.num_streams
            and not served.backend.num_requests
        )
    )
    print(f"freed after {(time.monotonic() - since_s) * 1000:.1f} ms")


@pytest.mark.parametrize("moment", REACHED, ids=lambda moment: moment.__name__)
@pytest.mark.parametrize("interface", ASKED)
async def test_a_client_that_leaves_frees_everything(interface: str, moment: Callable[[], dict[str, Any]]) -> None:
    if interface == "retrieve" and moment in (in_prefill, in_decode):
        moment = between_chunks
    async with serving(**moment()) as served:
        async with raw(served.url) as client:
            lines = {between_chunks: [append("a")], in_prefill: [append("a")], in_decode: [append("a"), FINISH]}
            await ask(client, interface, *lines.get(moment, []))
            await until(lambda: REACHED[moment](served))
        left_s = time.monotonic()
        await freed(served, left_s)
        await until(lambda: served.watcher.ended)
    assert [outcome for _, outcome in served.watcher.ended] == ["left"]


async def test_a_client_that_leaves_in_mid_line_frees_everything() -> None:
    async with serving() as served:
        async with raw(served.url) as client:
            await ask(client, "streams")
            await client.piece(b'{"type": "append", "chu')
            assert await client.status() == 200
        await freed(served, time.monotonic())


async def test_a_body_that_is_cut_off_frees_everything() -> None:
    async with serving() as served:
        async with raw(served.url) as client:
            await ask(client, "streams", append("a"))
            assert await client.status() == 200
            client.writer.write_eof()  # in mid-body, with the other direction still open
            await freed(served, time.monotonic())


# -------------------------------------------------------------------------------------------------------- too slow

MUCH = [Append(Chunk("x" * 1_000_000, f"https://geo.example/{number}")) for number in range(40)]


def asked_for_much(limits: Limits) -> AbstractAsyncContextManager[Serving]:
    """A service that is to send 40 MB to whoever asks for "much", which is more than the sockets between take."""
    return serving(lambda query: MUCH if query == "much" else CHUNKS, limits=limits)


async def test_a_slow_reader_holds_up_itself_only() -> None:
    async with asked_for_much(limits_of(send_timeout_s=3_600.0)) as served, raw(served.url) as slow:
        slow.writer.transport.pause_reading()
        await slow.post("/v1/retrieve", {"query": "much"})
        await served.watcher.has_begun.wait()
        answers = await asyncio.gather(*(served.http.post("/v1/ask", json={"question": QUESTION}) for _ in range(20)))
        assert all("event: answered" in answer.text for answer in answers)
        assert len(served.service.queries) == 1, "the slow one has had its answer already"


async def test_a_slow_reader_is_left_after_a_while() -> None:
    async with asked_for_much(limits_of(send_timeout_s=0.2)) as served, raw(served.url) as slow:
        slow.writer.transport.pause_reading()
        await slow.post("/v1/retrieve", {"query": "much"})
        await served.watcher.has_ended.wait()
        assert served.watcher.ended == [("retrieve", "left")]
        await freed(served, time.monotonic())
        slow.writer.transport.resume_reading()
        assert await slow.is_closed()


async def test_many_streams_at_once_do_not_mix() -> None:
    async with serving() as served, AsyncExitStack() as clients:
        streams = [await clients.enter_async_context(raw(served.url)) for _ in range(30)]
        for number, client in enumerate(streams):
            await ask(client, "streams", append(f"passage {number}"))
        for number, client in enumerate(streams):
            assert await client.status() == 200
            await client.line(append(f"another of {number}"), FINISH)
        for number, client in enumerate(streams):
            answer = (await client.until("answered"))["answer"]
            assert [each["text"] for each in answer["citations"]] == [f"passage {number}", f"another of {number}"]
