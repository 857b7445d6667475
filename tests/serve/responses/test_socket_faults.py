"""What goes wrong in a WebSocket of `/v1/responses`, and who leaves it."""

import asyncio
import json
from typing import Any

import anyio
import anyio.lowlevel
import pytest
import websockets

from streamrag import Append, BackendError
from streamrag.serve import Limits
from streamrag.serve.failures import ENGINE_FAILED
from streamrag.testing import ScriptedBackend
from tests.serve.responses.talking import QUESTION, freed, settled, talking
from tests.serve.serving import PARIS, limits_of, serving

BAD_FRAMES = [
    "{",
    "[]",
    "7",
    "[" * 50_000,
    "{}",
    '{"type": "response.steer"}',
    '{"type": "response.create"}',
    '{"type": "response.create", "input": "\\ud800"}',
    '{"type": "response.create", "input": {"role": "user"}}',
    '{"type": "response.create", "input": "x", "background": true}',
    '{"type": "response.create", "input": "x", "stream_id": ""}',
    '{"type": "response.create", "input": "x", "previous_response_id": "resp_1"}',
    '{"type": "response.create", "input": "x", "temperature": -1}',
    '{"type": "response.create", "input": [{"type": "function_call"}], "generate": false}',
    json.dumps({"type": "response.create", "input": "x" * 70_000}),
]


async def test_a_bad_frame_is_an_error_and_the_socket_stays_usable() -> None:
    async with serving(limits=limits_of(max_frame_bytes=65_536)) as served, talking(served) as talk:
        first = await talk.prepare("One.")
        for frame in BAD_FRAMES:
            await talk.connection.send_raw(frame)
            (error,) = await talk.events()
            assert error.type == "error", frame[:80]
            assert 400 <= error.status < 500, frame[:80]
            assert error.error.message
        await talk.connection.send_raw(b"\xff\xfe")
        assert (await talk.events())[-1].status == 400
        assert (await talk.create(QUESTION, first)).status == "completed"
        assert served.watcher.ended[-1] == ("websocket", "answered")


async def test_input_that_does_not_fit_is_refused_and_prepared_input_stays() -> None:
    backend = ScriptedBackend(max_model_len=400)
    async with serving(backend=backend) as served, talking(served) as talk:
        assert (await talk.create("x" * 1000, generate=False)).error.code == "context_length_exceeded"
        await freed(served)
        first = await talk.prepare("One.")
        error = await talk.create("x" * 1000, first, generate=False)
        assert error.error.code == "context_length_exceeded"
        assert (await talk.create(QUESTION, first)).status == "completed"
        assert len(backend.prompts) == 2


async def test_a_refusal_says_when_to_come_again() -> None:
    async with serving(limits=Limits(max_queries=1)) as served, talking(served) as talk:
        first = await talk.prepare("One.", stream_id="a")
        error = await talk.create("Two.", generate=False, stream_id="b")
        assert (error.status, error.error.code, error.stream_id) == (429, "queries", "b")
        assert int(error.error.headers["retry-after"]) >= 1
        assert (await talk.create(QUESTION, first, stream_id="a")).status == "completed"
    assert served.watcher.refused == [("anonymous", "websocket", "queries")]


async def test_a_client_may_ask_again_as_soon_as_it_has_its_answer() -> None:
    async with serving(limits=Limits(max_queries=1)) as served, talking(served) as talk:
        for number in range(8):
            prepared = await talk.prepare("One.", stream_id=f"p{number}")
            assert (await talk.create(QUESTION, prepared, stream_id=f"p{number}")).status == "completed"
            assert (await talk.create(QUESTION, stream_id=f"r{number}")).status == "completed"


async def test_an_engine_that_fails_in_mid_answer_leaves_the_socket_usable() -> None:
    backend = ScriptedBackend(answer="It is Paris.", error=BackendError("out of memory"))
    async with serving(backend=backend) as served, talking(served) as talk:
        for _ in range(2):
            answer = await talk.create(QUESTION, await talk.prepare("One."))
            assert answer.status == "failed"
            assert answer.error.message == ENGINE_FAILED
            assert answer.output_text == "I"
        await freed(served)
        assert served.watcher.ended == [("websocket", "backend_error")] * 2


class FailsOnce(ScriptedBackend):
    """Fails in the first prefill, as an engine does that is started again."""

    async def generate(self, prompts: Any, params: Any) -> Any:
        is_first = not self.prompts
        async for event in super().generate(prompts, params):
            if is_first:
                raise BackendError("gone")
            yield event


async def test_an_engine_that_fails_in_prefill_is_asked_again() -> None:
    backend = FailsOnce("It is Paris.")
    async with serving(backend=backend) as served, talking(served) as talk:
        first = await talk.prepare("One.")
        await freed(served)
        answer = await talk.create(QUESTION, first)
        assert answer.output_text == "It is Paris."
        assert served.watcher.ended == [("websocket", "backend_error"), ("websocket", "answered")]


async def test_a_lane_that_says_nothing_lets_go_and_can_be_taken_up() -> None:
    async with serving(limits=Limits(idle_s=0.05)) as served, talking(served) as talk:
        first = await talk.prepare("One.")
        await freed(served)
        assert (await talk.create(QUESTION, first)).status == "completed"
        assert served.watcher.ended == [("websocket", "left"), ("websocket", "answered")]


async def test_an_answer_that_takes_too_long_fails() -> None:
    backend = ScriptedBackend(is_endless=True)
    async with serving(backend=backend, limits=Limits(deadline_s=0.05)) as served, talking(served) as talk:
        answer = await talk.create(QUESTION, await talk.prepare("One."))
        assert answer.status == "failed"
        await freed(served)
        assert served.watcher.ended == [("websocket", "deadline")]


@pytest.mark.parametrize("moment", ["prepared", "in prefill", "retrieving", "in decode"])
async def test_a_client_that_leaves_frees_everything(moment: str) -> None:
    backend = ScriptedBackend(hold=anyio.Event() if moment == "in prefill" else None, is_endless=True)
    async with serving([Append(PARIS), anyio.Event()], backend=backend) as served:
        async with talking(served) as talk:
            if moment == "retrieving":
                await talk.connection.response.create(input=QUESTION)
                await served.watcher.has_begun.wait()
            else:
                first = await talk.prepare("One.")
            if moment == "in decode":
                await talk.connection.response.create(input=QUESTION, previous_response_id=first)
                while (await talk.connection.recv()).type != "response.output_text.delta":
                    pass
            assert served.service.queries
        await freed(served)
        assert served.watcher.ended == [("websocket", "left")]


async def test_a_connection_that_breaks_frees_everything() -> None:
    async with serving(backend=ScriptedBackend(is_endless=True)) as served:
        url = served.url.replace("http", "ws") + "/v1/responses"
        async with websockets.connect(url) as socket:
            await socket.send('{"type": "response.create", "input": "One.", "generate": false}')
            await settled(served, 1)
            socket.transport.abort()
            await freed(served)


async def test_a_slow_reader_is_left() -> None:
    backend = ScriptedBackend("x" * 3_000_000)
    limits = limits_of(send_timeout_s=0.2, max_tokens=3_000_000, max_queued_tokens=10_000_000)
    backend.model = type(backend.model)("scripted", backend.model.tokenizer, 4_000_000)
    async with serving(backend=backend, limits=limits) as served, talking(served) as talk:
        socket = talk.connection._connection
        socket.transport.pause_reading()
        await talk.connection.response.create(input=QUESTION, tool_choice="none", max_output_tokens=3_000_000)
        await served.watcher.has_begun.wait()
        async with asyncio.timeout(120):
            await served.watcher.has_ended.wait()
        assert served.watcher.ended == [("websocket", "left")]
        assert (await served.http.get("/healthz")).status_code == 200
        socket.transport.abort()


async def test_stopping_ends_what_is_open() -> None:
    async with serving() as served, talking(served) as talk:
        await talk.prepare("One.")
        await served.service.aclose()
        assert served.watcher.ended == [("websocket", "shut_down")]
        error = await talk.create("Two.", generate=False)
        assert error.status == 503


async def test_too_many_streams_and_too_many_waiting_requests_are_refused() -> None:
    hold = anyio.Event()
    async with serving([hold], limits=Limits(max_queries_per_client=2)) as served, talking(served) as talk:
        for stream_id in "ab":
            await talk.connection.response.create(input=QUESTION, stream_id=stream_id)
        third = await talk.create(QUESTION, stream_id="c")
        assert (third.status, third.error.code) == (429, "too_many_streams")
        for _ in range(65):
            await talk.connection.response.create(input=QUESTION, stream_id="a")
        last = (await talk.events())[-1]
        assert (last.status, last.error.code) == (429, "too_many_waiting")
