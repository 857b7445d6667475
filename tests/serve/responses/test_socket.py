"""Bring your own context: a WebSocket of `/v1/responses`, driven by OpenAI's own client library."""

import asyncio
from typing import Any

import openai
import pytest
import websockets

from streamrag.serve import Limits
from tests.serve.responses.talking import QUESTION, client_of, freed, settled, talking
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


async def test_a_whole_prompt_may_be_prepared_before_its_answer_is_asked_for() -> None:
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


async def test_a_response_that_is_not_stored_ends_with_its_connection() -> None:
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


async def test_the_states_of_another_client_cannot_be_found() -> None:
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
