"""A client brings its own context, as lines that it sends while they come about."""

import asyncio
import json
from typing import Any

import anyio
import pytest

from streamrag.serve import Limits
from streamrag.testing import ScriptedBackend
from tests.serve.raw import FINISH, OPEN, Raw, append, raw
from tests.serve.serving import limits_of, serving


async def opened(client: Raw, **options: Any) -> None:
    """A stream that is answered already, though nothing but its first line was sent."""
    await client.post("/v1/streams")
    await client.line({**OPEN, **options})
    assert await client.status() == 200
    await client.until("retrieval_started")


async def test_lines_of_a_request_are_answered_while_its_body_still_comes() -> None:
    async with serving() as served, raw(served.url) as client:
        await opened(client)
        for text in ("Paris is in France.", "Rome is in Italy."):
            await client.line(append(text))
            assert (await client.until("chunk_arrived"))["chunk"]["text"] == text
            computed = await client.until("prefill_progressed")
        assert computed["num_tokens"] > 0
        assert served.backend.num_requests == 1
        await client.line(FINISH)
        answer = (await client.until("answered"))["answer"]
    assert answer["text"] == "It is Paris [1]."
    assert [each["text"] for each in answer["citations"]] == ["Paris is in France.", "Rome is in Italy."]
    assert served.source.queries == []
    assert served.watcher.ended == [("streams", "answered")]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
async def test_a_stream_may_begin_with_a_byte_order_mark(encoding: str) -> None:
    lines = [{"type": "open", "query": "Where is Paris?"}, append("Paris is in Île-de-France."), FINISH]
    body = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines).encode(encoding)
    async with serving() as served:
        response = await served.http.post("/v1/streams", content=body)
    assert json.dumps("Île-de-France")[1:-1] in response.text
    assert '"text":"It is Paris [1]."' in response.text.replace('": ', '":')


async def test_events_of_a_growing_context_carry_each_chunk_once() -> None:
    async with serving() as served, raw(served.url) as client:
        await opened(client)
        await client.line(*(append(f"chunk {i}", f"https://geo.example/{i}") for i in range(100)), FINISH)
        changes = [values["splice"] async for name, values in client.events() if name == "context_changed"]
    assert sum(len(change["chunks"]) for change in changes) == 100
    assert not any(change["num_removed"] for change in changes)


async def test_updates_replace_the_context_and_what_was_left_out_is_said() -> None:
    async with serving() as served, raw(served.url) as client:
        await opened(client, max_tokens=7)
        await client.line(
            append("old"),
            {"type": "update", "chunks": [{"text": "new", "uri": "u", "title": "t", "passage": 3, "score": 0.5}]},
            {"type": "skipped", "uri": "v", "reason": "404"},
            {"type": "cut_short", "reason": "time is up"},
            FINISH,
        )
        events = [each async for each in client.events()]
    names = [name for name, _ in events]
    assert "document_skipped" in names
    answer = events[-1][1]["answer"]
    (citation,) = answer["citations"]
    assert {name: citation[name] for name in ("text", "uri", "title", "passage", "score")} == {
        "text": "new",
        "uri": "u",
        "title": "t",
        "passage": 3,
        "score": 0.5,
    }
    assert answer["cut_short"] == "time is up"
    assert answer["num_output_tokens"] == 7


async def test_lines_may_come_byte_by_byte_or_many_at_once() -> None:
    lines = [OPEN, append("Zürich is no capital."), FINISH]
    whole = "".join(json.dumps(line, ensure_ascii=False) + "\r\n" for line in lines).encode()
    async with serving() as served:
        for size in (1, 7, len(whole)):
            async with raw(served.url) as client:
                await client.post("/v1/streams")
                for start in range(0, len(whole), size):
                    await client.piece(whole[start : start + size])
                await client.end()
                assert await client.status() == 200
                assert (await client.until("answered"))["answer"]["citations"][0]["text"] == "Zürich is no capital."


async def test_curl_sends_and_reads_at_once() -> None:
    async with serving() as served:
        curl = await asyncio.create_subprocess_exec(
            *("curl", "-sN", "-T", ".", "-X", "POST", f"{served.url}/v1/streams"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
        )
        assert curl.stdin is not None
        assert curl.stdout is not None
        seen = b""
        lines = [OPEN, append("Paris is in France."), FINISH]
        for line, name in zip(lines, (b"retrieval_started", b"prefill_progressed", b"answered"), strict=True):
            curl.stdin.write(json.dumps(line).encode() + b"\n")
            async with asyncio.timeout(120):
                while name not in seen:
                    seen += await curl.stdout.readline()
        curl.stdin.close()
        seen += await curl.stdout.read()
        assert await curl.wait() == 0
    assert b"It is Paris [1]." in seen


@pytest.mark.parametrize(
    ("line", "param"),
    [
        (b"{", None),
        (b"[]", None),
        (b"null", None),
        (b"\xff\xfe", None),
        (b"[" * 10_000, None),
        (b'{"type": "append", "chunk": {"text": "\\ud800", "uri": "u"}}', None),
        (b'{"type": "open", "query": "another"}', "type"),
        (b'{"type": "upend"}', None),
        (b"{}", None),
        (b'{"type": "append"}', "chunk"),
        (b'{"type": "append", "chunk": {"text": 1, "uri": "u"}}', "chunk.text"),
        (b'{"type": "append", "chunk": {"text": "x", "uri": "u", "passage": -1}}', "chunk.passage"),
        (b'{"type": "append", "chunk": {"text": "x", "uri": "u", "score": NaN}}', "chunk.score"),
        (b'{"type": "append", "chunk": {"text": "x", "uri": "u"}, "hint": {"num_chunk": 1}}', "hint.num_chunk"),
        (b'{"type": "update", "chunks": {}}', "chunks"),
        (b'{"type": "skipped", "uri": "u"}', "reason"),
        (b'{"type": "finish", "now": true}', "now"),
    ],
)
async def test_a_bad_line_ends_its_stream_and_says_which_it_is(line: bytes, param: str | None) -> None:
    async with serving() as served, raw(served.url) as other, raw(served.url) as client:
        await opened(other)
        await opened(client)
        await client.piece(b"\n" + json.dumps(append("good")).encode() + b"\n" + line + b"\n")
        error = (await client.until("error"))["error"]
        assert error["line"] == 4
        assert error["message"].startswith("line 4: ")
        assert error["param"] == param
        assert error["code"] == "invalid_line"
        assert await client.is_closed()
        await other.line(FINISH)
        await other.until("answered")
    assert served.watcher.ended == [("streams", "invalid"), ("streams", "answered")]


@pytest.mark.parametrize(
    ("line", "status"),
    [
        (FINISH, 400),
        (append("first"), 400),
        ({**OPEN, "query": ""}, 400),
        ({**OPEN, "max_token": 3}, 400),
        ({**OPEN, "max_tokens": -3}, 400),
        ({**OPEN, "history": [{"role": "bard", "content": "x"}]}, 400),
        (append("x" * 20_000), 413),
    ],
)
async def test_a_stream_that_does_not_begin_well_has_a_status(line: object, status: int) -> None:
    async with serving(limits=limits_of(max_frame_bytes=10_000)) as served, raw(served.url) as client:
        await client.post("/v1/streams")
        await client.line(line)
        assert await client.status() == status
        assert json.loads(await client.text())["error"]["message"]
        assert await client.is_closed()
    assert served.watcher.started == []


@pytest.mark.parametrize("begins", [False, True])
async def test_a_body_that_ends_without_finish_is_not_answered(begins: bool) -> None:
    async with serving() as served, raw(served.url) as client:
        if begins:
            await opened(client)
            await client.line(append("Paris is in France."))
            await client.end()
            assert (await client.until("error"))["error"]["code"] == "not_finished"
        else:
            await client.post("/v1/streams")
            await client.end()
            assert await client.status() == 400
    assert served.backend.num_requests == 0


async def test_a_body_that_ends_may_count_as_finish() -> None:
    async with serving() as served, raw(served.url) as client:
        await opened(client, finish_at_end=True)
        await client.piece(json.dumps(append("Paris is in France.")).encode())  # without the end of its line
        await client.end()
        assert len((await client.until("answered"))["answer"]["citations"]) == 1


async def test_a_line_that_is_too_long_ends_its_stream_before_it_has_come() -> None:
    async with serving(limits=limits_of(max_frame_bytes=2000)) as served, raw(served.url) as client:
        await opened(client)
        await client.piece(b"x" * 3000)
        error = (await client.until("error"))["error"]
    assert (error["line"], "2,000 bytes" in error["message"]) == (2, True)


async def test_a_stream_that_is_too_long_ends() -> None:
    async with serving(limits=limits_of(max_stream_bytes=4000)) as served, raw(served.url) as client:
        await opened(client)
        for _ in range(5):
            await client.line(append("x" * 1000))
        assert (await client.until("error"))["error"]["code"] == "body_too_long"
        assert await client.is_closed()
    assert served.watcher.ended == [("streams", "invalid")]


async def test_a_client_that_says_nothing_is_left_unless_it_shows_that_it_lives(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop = asyncio.get_running_loop()
    past_s, time_of = 0.0, loop.time
    monkeypatch.setattr(loop, "time", lambda: time_of() + past_s)
    async with serving(limits=Limits(idle_s=100)) as served, raw(served.url) as client, raw(served.url) as silent:
        await opened(client)
        await opened(silent)
        told = asyncio.create_task(silent.until("error"))
        for _ in range(4):
            past_s += 40
            await client.piece(b"\n")
            for _ in range(20):  # turns of the loop, in which the service reads it
                await asyncio.sleep(0)
        assert (await told)["error"]["code"] == "idle"
        await client.line(FINISH)
        await client.until("answered")


async def test_a_stream_that_is_never_opened_is_left_sooner_since_it_has_no_place() -> None:
    async with serving(limits=limits_of(body_s=0.3)) as served, raw(served.url) as client:
        await client.post("/v1/streams")
        await client.piece(b'{"type": "open", "que')
        assert await client.status() == 408
        assert served.service.admission.num_queries == 0


async def test_a_client_that_is_ahead_of_the_engine_is_held_up() -> None:
    """The backend takes no second prompt, so what is sent waits: in the service up to a frame, then in TCP."""
    backend = ScriptedBackend(answer="It is Paris.", hold=anyio.Event())
    limits = limits_of(max_frame_bytes=50_000, max_stream_bytes=1 << 30)
    num_sent = 0
    async with serving(backend=backend, limits=limits) as served, raw(served.url) as client:
        await opened(client)

        async def send() -> None:
            nonlocal num_sent
            for number in range(2000):
                await client.line(append("x" * 20_000, f"https://geo.example/{number}"))
                num_sent += 1

        sending = asyncio.create_task(send())
        last = -1
        while last != num_sent:
            last = num_sent
            await asyncio.wait([sending], timeout=0.3)
        assert 0 < num_sent < 2000, "40 MB would be taken from a client that nobody listens to"
        sending.cancel()
