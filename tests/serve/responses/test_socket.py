"""Bring your own context: a WebSocket of `/v1/responses`, driven by OpenAI's own client library."""

import asyncio
import json
from typing import Any

import anyio
import anyio.lowlevel
import openai
import pytest
import websockets

from streamrag import Append, BackendError
from streamrag.serve import Limits
from streamrag.testing import ScriptedBackend
from tests.serve.responses.talking import QUESTION, client_of, talking
from tests.serve.serving import PARIS, Serving, serving


def texts_of(served: Serving, query: int = -1) -> list[str]:
    decode = served.backend.model.tokenizer.decode
    return [decode(prompt.token_ids) for prompt in served.backend.prompts[query]]


async def one_shot(served: Serving, turns: list[str], **options: Any) -> tuple[int, ...]:
    """The prompt of a POST with all of it at once."""
    items = [{"role": "user", "content": text} for text in turns]
    async with client_of(served) as client:
        await client.responses.create(model="scripted", input=items, tool_choice="none", **options)
    return tuple(served.backend.prompts[-1][-1].token_ids)


async def settled(served: Serving, num_prompts: int, query: int = -1) -> None:
    """Until the engine has so many prompts of a query."""
    async with asyncio.timeout(5):
        while not served.backend.prompts or len(served.backend.prompts[query]) < num_prompts:
            await anyio.lowlevel.checkpoint()


async def freed(served: Serving) -> None:
    async with asyncio.timeout(5):
        while served.service.queries or served.backend.num_requests or served.source.num_streams:
            await anyio.lowlevel.checkpoint()


async def test_pieces_are_one_prompt_that_grows() -> None:
    async with serving() as served:
        async with talking(served) as talk:
            first = await talk.prepare("One.")
            await settled(served, 1)
            second = await talk.prepare("Two.", first)
            await settled(served, 2)
            answer = await talk.create(QUESTION, second)
        assert texts_of(served) == [
            "User: One.",
            "User: One.\n\nUser: Two.",
            f"User: One.\n\nUser: Two.\n\nUser: {QUESTION}\n\nAssistant:",
        ]
        prompts = served.backend.prompts[-1]
        assert [prompt.num_shared for prompt in prompts] == [0, *(len(prompt.token_ids) for prompt in prompts[:2])]
        assert answer.output_text == "It is Paris [1]."
        assert [item.type for item in answer.output] == ["message"]
        assert answer.usage.input_tokens_details.cached_tokens == len(prompts[1].token_ids)
        assert served.source.queries == []
        assert served.watcher.ended == [("websocket", "answered")]
        assert prompts[-1].token_ids == await one_shot(served, ["One.", "Two.", QUESTION])


async def test_going_on_from_an_earlier_id_is_an_update() -> None:
    async with serving() as served:
        async with talking(served) as talk:
            first = await talk.prepare("One.")
            await settled(served, 1)
            await talk.prepare("Tow.", first)
            await settled(served, 2)
            again = await talk.prepare("Two.", first)
            await settled(served, 3)
            answer = await talk.create(QUESTION, again)
        *_, updated, complete = served.backend.prompts[-1]
        assert len(served.backend.prompts) == 1
        assert updated.num_shared == len("User: One.\n\nUser: T")
        assert complete.token_ids == await one_shot(served, ["One.", "Two.", QUESTION])
        assert served.watcher.answers[0].num_invalidated == len("ow.")
        assert answer.status == "completed"


async def test_everything_may_be_prepared_and_the_answer_be_asked_for_alone() -> None:
    async with serving() as served, talking(served) as talk:
        first = await talk.prepare(QUESTION, instructions="Be brief.")
        await talk.create(None, first, instructions="Be brief.")
        assert texts_of(served)[-1] == f"Be brief.\n\nUser: {QUESTION}\n\nAssistant:"


async def test_a_chain_goes_on_after_its_answer() -> None:
    async with serving() as served, talking(served) as talk:
        first = await talk.create(QUESTION, await talk.prepare("One."))
        more = await talk.prepare("Two.", first.id)
        await talk.create("And now?", more)
        assert texts_of(served)[-1] == (
            f"User: One.\n\nUser: {QUESTION}\n\nAssistant: It is Paris [1].\n\n"
            "User: Two.\n\nUser: And now?\n\nAssistant:"
        )
        assert served.source.queries == []
        async with client_of(served) as client:  # and over HTTP
            assert (await client.responses.retrieve(first.id)).output_text == first.output_text
            await client.responses.create(model="scripted", input="Again?", previous_response_id=first.id)
        assert served.source.queries == []


async def test_without_preparation_it_retrieves_as_over_http() -> None:
    async with serving() as served, talking(served) as talk:
        await talk.connection.response.create(input=QUESTION, store=False)
        events = await talk.events()
        assert [event.type for event in events][2:5] == [
            "response.output_item.added",
            "response.file_search_call.in_progress",
            "response.file_search_call.searching",
        ]
        assert [event.sequence_number for event in events] == list(range(len(events)))
        (annotation,) = events[-1].response.output[-1].content[0].annotations
        assert annotation.url == PARIS.uri
        await talk.create("And now?", events[-1].response.id)
        assert served.source.queries == [QUESTION, "And now?"]


async def test_what_is_not_stored_ends_with_its_connection() -> None:
    async with serving() as served:
        async with talking(served) as talk:
            first = await talk.prepare("One.", store=False)
            assert (await talk.create(QUESTION, first, store=False)).status == "completed"
        async with talking(served) as talk:
            error = await talk.create(QUESTION, first)
    assert (error.status, error.error.code, error.error.param) == (
        404,
        "previous_response_not_found",
        "previous_response_id",
    )


async def test_another_clients_states_are_not_there() -> None:
    async with serving(keys={"a-key": "alice", "b-key": "bob"}) as served:
        async with talking(served, "a-key") as alice, talking(served, "b-key") as bob:
            hers = await alice.prepare("One.")
            assert (await bob.create(QUESTION, hers)).status == 404
            assert (await alice.create(QUESTION, hers)).status == "completed"
        with pytest.raises(websockets.InvalidStatus):
            async with talking(served, "none"):
                pass


async def test_lanes_are_apart_and_one_may_fork_anothers_state() -> None:
    async with serving() as served, talking(served) as talk:
        first = await talk.prepare("One.", stream_id="a")
        other = await talk.prepare("Two.", first, stream_id="b")
        assert len(served.service.queries) == 2
        await talk.connection.response.create(input=QUESTION, previous_response_id=first, stream_id="a")
        assert {event.stream_id for event in await talk.events()} == {"a"}
        assert [query.text for query in served.service.queries] == ["Two."]
        await talk.create(QUESTION, other, stream_id="b")
        assert texts_of(served)[-1] == f"User: One.\n\nUser: Two.\n\nUser: {QUESTION}\n\nAssistant:"


async def test_requests_of_a_lane_are_answered_in_their_order() -> None:
    async with serving() as served, talking(served) as talk:
        for text in "abc":
            await talk.connection.response.create(input=text, generate=False, metadata={"text": text})
        ends = [(await talk.events())[-1].response.metadata["text"] for _ in "abc"]
    assert ends == ["a", "b", "c"]


async def test_other_sampling_at_the_end_opens_a_new_stream() -> None:
    async with serving() as served, talking(served) as talk:
        first = await talk.prepare("One.")
        answer = await talk.create(QUESTION, first, max_output_tokens=5)
        assert answer.status == "incomplete"
        assert answer.output_text == "It is"
        assert len(served.backend.prompts) == 2
        assert served.watcher.ended == [("websocket", "left"), ("websocket", "answered")]


async def test_a_question_of_another_kind_lets_go_of_what_was_prepared() -> None:
    async with serving() as served, talking(served) as talk:
        await talk.prepare("One.")
        await talk.create(QUESTION)
        assert served.source.queries == [QUESTION]
        assert served.watcher.ended == [("websocket", "left"), ("websocket", "answered")]
        await freed(served)


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
    async with serving(limits=Limits(max_frame_bytes=65_536)) as served, talking(served) as talk:
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


async def test_what_does_not_fit_is_refused_and_what_was_prepared_stays() -> None:
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
            assert answer.error.message == "out of memory"
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
    limits = Limits(send_timeout_s=0.2, max_tokens=3_000_000, max_queued_tokens=10_000_000)
    backend.model = type(backend.model)("scripted", backend.model.tokenizer, 4_000_000)
    async with serving(backend=backend, limits=limits) as served, talking(served) as talk:
        socket = talk.connection._connection
        socket.transport.pause_reading()
        await talk.connection.response.create(input=QUESTION, tool_choice="none", max_output_tokens=3_000_000)
        await served.watcher.has_begun.wait()
        async with asyncio.timeout(30):
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


async def test_too_many_requests_and_too_many_lanes_are_refused() -> None:
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


async def test_lanes_that_are_done_make_room_for_others() -> None:
    async with serving(limits=Limits(max_queries_per_client=2)) as served, talking(served) as talk:
        held = await talk.prepare("One.", stream_id="held")
        for number in range(5):
            assert (await talk.create(QUESTION, stream_id=f"s{number}")).status == "completed"
        assert (await talk.create(QUESTION, held, stream_id="held")).status == "completed"


async def test_prewarming_is_preparing() -> None:
    async with serving() as served, talking(served) as talk:
        response = await talk.create("One.", prompt_cache_options={"prewarm": True})
        assert (response.status, response.output) == ("completed", [])
        assert (await talk.create(QUESTION, response.id)).output_text == "It is Paris [1]."
        assert served.source.queries == []


async def test_the_synchronous_client_works_too() -> None:
    async with serving() as served:

        def ask() -> str:
            client = openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0)
            with client, client.responses.connect() as connection:
                connection.response.create(input=QUESTION)
                for event in connection:
                    if event.type == "response.completed":
                        return event.response.output_text
            return ""

        assert await asyncio.to_thread(ask) == "It is Paris [1]."
