"""The WebSocket of a session: what goes in, what comes out, and what goes wrong."""

import asyncio
import base64
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import anyio
import pytest
import websockets

from streamrag.errors import BackendError
from streamrag.serve import Limits
from streamrag.testing import ScriptedBackend
from tests.serve.responses.talking import freed as all_freed
from tests.serve.serving import Serving, limits_of, serving
from tests.serve.test_sessions import events_of, opened

GIVE_UP_S = 120.0


class Talk:
    """One socket."""

    def __init__(self, connection: websockets.ClientConnection) -> None:
        self.socket = connection

    async def send(self, type: str, **values: object) -> None:
        await self.socket.send(json.dumps({"type": type, **values}))

    async def next(self, *types: str, id: str | None = None) -> dict[str, Any]:
        """The next frame of one of these types, and of this id; those before it are read."""
        async with asyncio.timeout(GIVE_UP_S):
            while True:
                frame: dict[str, Any] = json.loads(await self.socket.recv())
                if frame["type"] in types and (id is None or frame.get("id") == id):
                    return frame

    async def closed(self) -> int | None:
        """How the other side closes."""
        async with asyncio.timeout(GIVE_UP_S):
            with suppress(websockets.ConnectionClosed):
                while True:
                    await self.socket.recv()
        return self.socket.close_code


@asynccontextmanager
async def talking(served: Serving, url: str, query: str = "", **options: Any) -> AsyncIterator[Talk]:
    address = served.url.replace("http", "ws") + f"{url}/socket{query}"
    async with websockets.connect(address, close_timeout=1, **options) as connection:
        yield Talk(connection)


async def freed(served: Serving) -> None:
    """All but the session's own stream."""
    while served.service.queries or served.backend.num_requests > 1:
        await anyio.lowlevel.checkpoint()


async def test_data_and_questions_go_in_and_all_that_comes_of_them_goes_out() -> None:
    async with serving(backend=ScriptedBackend(answer="Yes.")) as served:
        url = await opened(served)
        async with talking(served, url) as talk:
            session = await talk.next("session")
            assert (url.endswith(session["id"]), session["version"], session["watches"]) == (True, 0, {})
            assert 0 < session["num_frozen_tokens"] == session["num_tokens"] < session["window_tokens"]
            await talk.send("append", data=["one", {"text": "two", "uri": "feed"}], id="a")
            appended = await talk.next("appended")
            assert appended == {"type": "appended", "version": 2, "num_dropped": 0, "id": "a"}
            assert (await served.http.post(f"{url}/data", json={"data": ["three"]})).json()["version"] == 3
            updated = await talk.next("data_updated")
            while updated["version"] < 3:
                updated = await talk.next("data_updated")
            assert (updated["num_appended"], updated["num_dropped"]) == (3, 0)
            assert updated["num_tokens"] > session["num_tokens"]
            await talk.send("ask", id="q", question="Rising?", at_least=3)
            pieces = [await talk.next("tokens_generated", "answered") for _ in range(5)]
            assert "".join(piece["text"] for piece in pieces[:-1]) == "Yes."
            assert {piece["id"] for piece in pieces} == {"q"}
            assert (pieces[-1]["type"], pieces[-1]["answer"]["version"]) == ("answered", 3)
            await talk.send("ask", id="q", question="Falling?", stream=False)
            frame = json.loads(await talk.socket.recv())
            assert (frame["type"], frame["answer"]["text"]) == ("answered", "Yes.")
            await served.http.put(f"{url}/watches/alarm", json={"question": "Any?"})
            ready = await talk.next("flash_ready")
            assert (ready["name"], ready["answer"], ready["version"]) == ("alarm", "Yes.", 3)
            assert ready["event_id"] > updated["event_id"]
            assert ready["age_s"] >= 0
        assert served.watcher.ended == [("sessions", "answered")] * 2


async def test_several_questions_are_open_at_once_and_each_can_be_cancelled() -> None:
    backend = ScriptedBackend(answer="Yes.", is_endless=True)
    async with serving(backend=backend) as served:
        url = await opened(served)
        async with talking(served, url) as talk:
            for id in "abc":
                await talk.send("ask", id=id, question=f"{id}?")
            for id in "abc":
                await talk.next("tokens_generated", id=id)
            assert len(served.service.queries) == 3
            await talk.send("ask", id="a", question="Again?")
            assert (await talk.next("error", id="a"))["error"]["code"] == "id_in_use"
            await talk.send("cancel", id="b")
            assert await talk.next("cancelled") == {"type": "cancelled", "id": "b"}
            assert [query.text for query in served.service.queries] == ["a?", "c?"]
            await talk.send("cancel", id="b")
            assert (await talk.next("error", id="b"))["error"]["code"] == "ask_not_found"
            await talk.send("ask", id="b", question="And now?")
            await talk.next("tokens_generated", id="b")
        await freed(served)
        assert served.watcher.ended == [("sessions", "left")] * 4


async def test_open_questions_of_a_socket_are_bounded() -> None:
    backend = ScriptedBackend(answer="Yes.", is_endless=True)
    async with serving(backend=backend, limits=Limits(max_queries_per_client=2)) as served:
        async with talking(served, await opened(served)) as talk:
            for id in "abc":
                await talk.send("ask", id=id, question="Rising?")
            assert (await talk.next("error", id="c"))["error"]["code"] == "too_many_asks"
            await talk.send("cancel", id="a")
            await talk.next("cancelled", id="a")
            await talk.send("ask", id="c", question="Rising?")
            await talk.next("tokens_generated", id="c")


BAD_FRAMES: list[tuple[str | bytes, str | None]] = [
    ("{", None),
    ("[]", None),
    ("7", None),
    ("[" * 50_000, None),
    ("{}", None),
    ('{"id": "x"}', "x"),
    ('{"type": "steer", "id": "x"}', "x"),
    ('{"type": "ask", "id": "x"}', "x"),
    ('{"type": "ask", "question": "x"}', None),
    ('{"type": "ask", "id": 7, "question": "x"}', None),
    ('{"type": "ask", "id": "", "question": "x"}', None),
    ('{"type": "ask", "id": "x", "question": " "}', "x"),
    ('{"type": "ask", "id": "x", "question": "\\ud800"}', None),
    ('{"type": "ask", "id": "x", "question": "x", "at_least": 7}', "x"),
    ('{"type": "ask", "id": "x", "question": "x", "temperature": -1}', "x"),
    ('{"type": "ask", "id": "x", "question": "x", "temperature": 1e999}', "x"),
    ('{"type": "append", "id": "x", "data": []}', "x"),
    ('{"type": "append", "id": "x", "data": [3]}', "x"),
    ('{"type": "append", "data": "x"}', None),
    ('{"type": "cancel", "id": "x"}', "x"),
    (json.dumps({"type": "append", "id": "x", "data": ["x" * 70_000]}), None),
    (b"\xff\xfe", None),
]


async def test_a_bad_frame_is_an_error_with_its_id_and_harms_no_other_connection() -> None:
    backend = ScriptedBackend(answer="Yes.")
    async with serving(backend=backend, limits=limits_of(max_frame_bytes=65_536)) as served:
        url = await opened(served)
        async with talking(served, url) as talk, talking(served, url) as other:
            for frame, id in BAD_FRAMES:
                await talk.socket.send(frame)
                error = await talk.next("error")
                assert error.get("id") == id, frame[:80]
                assert 400 <= error["status"] < 500, frame[:80]
                assert error["error"]["message"]
            await talk.socket.send(b'{"type": "ask", "id": "q", "question": "x"}')
            assert (await talk.next("answered"))["answer"]["text"] == "Yes."
            await other.send("ask", id="q", question="y")
            assert (await other.next("answered", "error"))["type"] == "answered"
        assert (await served.http.get(url)).json()["num_appended"] == 0


async def test_an_engine_that_fails_is_an_error_with_the_questions_id() -> None:
    backend = ScriptedBackend(answer="Yes.", error=BackendError("out of memory"))
    async with serving(backend=backend) as served, talking(served, await opened(served)) as talk:
        for id in "ab":
            await talk.send("ask", id=id, question="Rising?")
            error = await talk.next("error")
            assert (error["id"], error["status"], error["error"]["message"]) == (
                id,
                502,
                "the engine failed; see the service's log",
            )


async def test_a_socket_goes_on_behind_the_event_that_its_client_saw_last() -> None:
    async with serving(backend=ScriptedBackend(answer="Yes.")) as served:
        url = await opened(served)
        async with talking(served, url) as talk:
            for number in range(1, 4):
                await talk.send("append", data=["x"])
                seen = await talk.next("data_updated")
                assert (seen["event_id"], seen["version"]) == (number, number)
        async with talking(served, url, "?last_event_id=1") as talk:
            assert (await talk.next("session"))["version"] == 3
            missed = [json.loads(await talk.socket.recv()) for _ in range(2)]
            assert [(event["type"], event["event_id"]) for event in missed] == [
                ("data_updated", 2),
                ("data_updated", 3),
            ]
        async with talking(served, url, "?last_event_id=999") as talk:  # of another session
            assert (await talk.next("data_updated"))["event_id"] == 1
        for bad in ("x", "-1", "%C2%B2", "9" * 40):
            async with talking(served, url, f"?last_event_id={bad}") as talk:
                assert (await talk.next("error"))["status"] == 400
                assert await talk.closed() == 1008


@pytest.mark.parametrize("moment", ["waiting for data", "in prefill", "in decode", "breaking off"])
async def test_a_client_of_a_socket_that_leaves_frees_its_questions(moment: str) -> None:
    hold = anyio.Event() if moment == "in prefill" else None
    backend = ScriptedBackend(answer="Yes.", hold=hold, is_endless=True)
    async with serving(backend=backend) as served:
        url = await opened(served)
        async with talking(served, url) as talk:
            if moment == "waiting for data":
                served.backend._hold = anyio.Event()
                await talk.send("append", data=["x"])
                version = (await talk.next("appended"))["version"]
                await talk.send("ask", id="q", question="Rising?", at_least=version)
            else:
                await talk.send("ask", id="q", question="Rising?")
            if moment in ("in decode", "breaking off"):
                await talk.next("tokens_generated")
            else:
                while not served.service.queries:
                    await anyio.lowlevel.checkpoint()
            began_s = asyncio.get_running_loop().time()
            if moment == "breaking off":
                talk.socket.transport.abort()
                await freed(served)
        await freed(served)
        print(f"freed after {1000 * (asyncio.get_running_loop().time() - began_s):.0f} ms")
        assert served.watcher.ended == [("sessions", "left")]
        assert (await served.http.get(url)).status_code == 200


async def test_a_socket_that_is_not_read_is_closed_and_others_go_on() -> None:
    backend = ScriptedBackend("x" * 8_000)
    limits = limits_of(send_timeout_s=0.2, max_tokens=8_000, max_queued_tokens=10_000_000)
    backend.model = type(backend.model)("scripted", backend.model.tokenizer, 50_000)
    async with serving(backend=backend, limits=limits) as served:
        url = await opened(served)
        narrow = socket.socket()
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        narrow.connect((served.http.base_url.host, served.http.base_url.port))
        async with talking(served, url, sock=narrow, compression=None) as slow, talking(served, url) as other:
            slow.socket.transport.pause_reading()
            await slow.send("ask", id="\U0001f600" * 128, question="Long?", max_tokens=8_000)
            await served.watcher.has_begun.wait()
            await other.send("append", data=["x"])
            await other.next("data_updated")
            async with asyncio.timeout(120):
                await served.watcher.has_ended.wait()
            assert served.watcher.ended == [("sessions", "left")]
            slow.socket.transport.resume_reading()
            assert await slow.closed() == 1013
            await other.send("append", data=["y"])
            await other.next("data_updated")


async def test_a_slow_reader_gets_the_newest_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamrag.serve.connections.json_socket import Frames

    may_send, sends = anyio.Event(), Frames.send

    async def send(self: Frames, values: dict[str, Any]) -> None:
        await sends(self, values)
        if values["type"] == "data_updated":
            await may_send.wait()

    monkeypatch.setattr(Frames, "send", send)
    monkeypatch.setattr("streamrag.serve.session_store.served_session.UPDATE_GAP_S", 0)
    async with serving(backend=ScriptedBackend(answer="no")) as served:
        url = await opened(served)
        await served.http.put(f"{url}/watches/alarm", json={"question": "Any?"})
        async with talking(served, url) as talk:
            await talk.next("flash_ready")
            for number in range(1, 6):
                served.backend._answer = f"no, {number}"
                await served.http.post(f"{url}/data", json={"data": ["x"]})
                async for event in events_of(served, url):
                    if event.event == "flash_ready" and json.loads(event.data)["answer"] == f"no, {number}":
                        ready = int(event.id)
                        break
            may_send.set()
            frames = [await talk.next("data_updated", "flash_ready") for _ in range(3)]
        newest = {frame["type"]: frame for frame in frames}
        assert [newest["flash_ready"]["event_id"], newest["flash_ready"]["answer"]] == [ready, "no, 5"]
        assert newest["data_updated"]["version"] == 5
        assert [frame["version"] for frame in frames if frame["type"] == "data_updated"] == [1, 5]


async def test_a_socket_ends_with_its_session_and_with_the_service() -> None:
    async with serving(backend=ScriptedBackend(answer="Yes.", is_endless=True)) as served:
        url, other = await opened(served), await opened(served)
        async with talking(served, url) as talk, talking(served, other) as stays:
            await talk.send("ask", id="q", question="Rising?")
            await talk.next("tokens_generated")
            assert (await served.http.delete(url)).status_code == 204
            error = await talk.next("error")
            assert (error["id"], error["error"]["code"]) == ("q", "session_not_found")
            assert await talk.closed() == 1000
            await stays.send("ask", id="q", question="Rising?")
            await stays.next("tokens_generated")
            await served.service.aclose()
            error = await stays.next("error")
            assert (error["id"], error["status"]) == ("q", 503)
            assert await stays.closed() == 1001
        await all_freed(served)


def offering(key: str) -> list[str]:
    """As a browser gives its key."""
    return ["streamrag", "streamrag-key." + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")]


async def test_only_clients_with_a_valid_key_and_origin_connect_to_a_session() -> None:
    async with serving(keys={"a-key": "alice", "b?key>": "bob"}) as served:
        url = await opened(served)
        alice = {"authorization": "Bearer a-key"}
        refused: list[dict[str, Any]] = [
            {},
            {"additional_headers": {"authorization": "Bearer wrong"}},
            {"subprotocols": offering("wrong")},
            {"subprotocols": ["streamrag", "streamrag-key.a"]},
            {"additional_headers": {**alice, "origin": "https://evil.example"}},
        ]
        for options in refused:
            with pytest.raises(websockets.InvalidStatus):
                async with talking(served, url, **options):
                    pass
        async with talking(served, url, subprotocols=offering("b?key>")) as talk:
            assert (await talk.next("session", "error"))["error"]["code"] == "session_not_found"
            assert await talk.closed() == 1008
        at = {"host": "127.0.0.1", "port": served.http.base_url.port, "additional_headers": alice}
        with pytest.raises(websockets.InvalidStatus):
            async with websockets.connect(f"ws://evil.example{url}/socket", **at):
                pass
        async with talking(served, url, additional_headers=alice) as talk:
            assert talk.socket.subprotocol is None
            await talk.next("session")
        async with talking(served, url, subprotocols=offering("a-key")) as talk:
            assert talk.socket.subprotocol == "streamrag"
            await talk.next("session")
            served.app.set_keys({"b?key>": "bob"})
            await talk.send("append", data=["x"])
            assert await talk.closed() == 1008


async def test_each_question_hears_how_it_ended_before_its_session_closes_the_socket() -> None:
    backend = ScriptedBackend(answer="Yes.", is_endless=True)
    async with serving(backend=backend) as served:
        url, ids = await opened(served), {f"q{i}" for i in range(30)}
        async with talking(served, url, max_queue=1) as talk:
            for id in ids:
                await talk.send("ask", id=id, question="Rising?")
            for id in ids:
                await talk.next("tokens_generated", id=id)
            assert (await served.http.delete(url)).status_code == 204
            assert {(await talk.next("error"))["id"] for _ in ids} == ids
            assert await talk.closed() == 1000


async def test_questions_that_have_failed_wait_for_their_reader_in_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    from streamrag.serve.connections.json_socket import Frames

    may_send, sends, begun = anyio.Event(), Frames.send, []

    async def send(self: Frames, values: dict[str, Any]) -> None:
        if values["type"] == "error":
            begun.append(values["id"])
            await may_send.wait()
        await sends(self, values)

    monkeypatch.setattr(Frames, "send", send)
    async with serving(limits=Limits(max_queries_per_client=3)) as served:
        async with talking(served, await opened(served)) as talk:
            for id in "abcdefgh":
                await talk.send("ask", id=id, question="Rising?", temperature=-1)
            async with asyncio.timeout(GIVE_UP_S):
                await (await talk.socket.ping())  # behind all of them
                while len(begun) < 3:
                    await anyio.lowlevel.checkpoint()
            await anyio.wait_all_tasks_blocked()
            assert begun == ["a", "b", "c"]
            may_send.set()
            assert {(await talk.next("error"))["id"] for _ in range(8)} == set("abcdefgh")
