"""Responses over HTTP, asked with OpenAI's own client library over a real socket."""

import asyncio
import json

import anyio
import openai
import pytest

from streamrag import Append, BackendError, SourceError
from streamrag.serve import Limits
from streamrag.serve.failures import RETRIEVAL_FAILED
from streamrag.testing import ScriptedBackend
from tests.serve.responses.talking import NOTE, QUESTION, client_of
from tests.serve.serving import CHUNKS, PARIS, serving

ORDER = [
    "response.created",
    "response.in_progress",
    "response.output_item.added",
    "response.file_search_call.in_progress",
    "response.file_search_call.searching",
    "response.file_search_call.completed",
    "response.output_item.done",
    "response.output_item.added",
    "response.content_part.added",
    "response.output_text.delta",
    "response.output_text.annotation.added",
    "response.output_text.done",
    "response.content_part.done",
    "response.output_item.done",
    "response.completed",
]


def without_ids(response: openai.types.responses.Response) -> object:
    values = response.model_dump()
    for item in (values, *values["output"]):
        item.pop("id")
    return {name: value for name, value in values.items() if name not in ("created_at", "completed_at")}


async def test_an_answer_has_text_annotations_usage_and_what_was_searched() -> None:
    async with serving() as served, client_of(served) as client:
        answer = await client.responses.create(model="scripted", input=QUESTION, include=["file_search_call.results"])
    search, message = answer.output
    assert search.queries == [QUESTION]
    assert search.status == "completed"
    assert [result.text for result in search.results] == [event.chunk.text for event in CHUNKS]
    assert [result.attributes["number"] for result in search.results] == [1, 2]
    assert answer.output_text == "It is Paris [1]."
    (annotation,) = message.content[0].annotations
    assert answer.output_text[annotation.start_index : annotation.end_index] == "[1]"
    assert (annotation.type, annotation.url, annotation.title) == ("url_citation", PARIS.uri, PARIS.title)
    assert answer.status == "completed"
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.usage.input_tokens_details.cached_tokens == 0
    assert served.watcher.ended == [("responses", "answered")]


async def test_a_stream_has_the_protocols_order_and_ends_with_the_whole() -> None:
    async with serving() as served, client_of(served) as client:
        whole = await client.responses.create(model="scripted", input=QUESTION)
        stream = await client.responses.create(model="scripted", input=QUESTION, stream=True)
        events = [event async for event in stream]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == list(dict.fromkeys(ORDER))
    assert [kind for kind in kinds if kind != "response.output_text.delta"] == [
        kind for kind in ORDER if kind != "response.output_text.delta"
    ]
    mark = kinds.index("response.output_text.annotation.added")
    text = "".join(event.delta for event in events[:mark] if event.type == "response.output_text.delta")
    assert text.endswith("[1]"), "an annotation comes as soon as its mark is there"
    assert without_ids(events[-1].response) == without_ids(whole)
    assert events[0].response.status == "in_progress"
    assert events[0].response.output == []


async def test_the_clients_own_accumulator_reads_it() -> None:
    async with (
        serving() as served,
        client_of(served) as client,
        client.responses.stream(model="scripted", input=QUESTION) as stream,
    ):
        async for _ in stream:
            pass
        final = await stream.get_final_response()
    assert final.output_text == "It is Paris [1]."


async def test_a_document_that_is_not_on_the_web_is_cited_as_a_file() -> None:
    backend = ScriptedBackend(answer="See [2, 1] and [7].")
    async with serving([*CHUNKS[:1], Append(NOTE)], backend=backend) as served, client_of(served) as client:
        answer = await client.responses.create(model="scripted", input=QUESTION, include=["file_search_call.results"])
    search, message = answer.output
    file, page = message.content[0].annotations
    assert (file.type, file.filename, file.index) == ("file_citation", "germany now.md", 4)
    assert file.file_id == search.results[1].file_id
    assert page.url == PARIS.uri


async def test_a_chain_is_history_and_instructions_are_not_carried_on() -> None:
    async with serving() as served, client_of(served) as client:
        first = await client.responses.create(model="scripted", input="Hello.", instructions="Speak like a pirate.")
        items = [
            {"role": "developer", "content": "Be brief."},
            {
                "role": "user",
                "content": [{"type": "input_text", "text": "And "}, {"type": "input_text", "text": "you?"}],
            },
        ]
        second = await client.responses.create(model="scripted", input=items, previous_response_id=first.id)
        prompts = [served.backend.model.tokenizer.decode(each[-1].token_ids) for each in served.backend.prompts]
        again = await client.responses.retrieve(second.id)
    assert served.source.queries == ["Hello.", "And you?"]
    assert "pirate" in prompts[0]
    assert "pirate" not in prompts[1]
    assert prompts[1].index("Hello.") < prompts[1].index("It is Paris [1].") < prompts[1].index("Be brief.")
    assert prompts[1].index("Be brief.") < prompts[1].index(PARIS.text)
    assert again == second
    assert second.previous_response_id == first.id


async def test_a_whole_output_may_be_sent_back() -> None:
    async with serving() as served, client_of(served) as client:
        first = await client.responses.create(model="scripted", input="Hello.")
        items = [
            {"role": "user", "content": "Hello."},
            *(item.model_dump() for item in first.output),
            {"role": "user", "content": "And you?"},
        ]
        await client.responses.create(model="scripted", input=items)
    assert served.source.queries == ["Hello.", "And you?"]


async def test_without_retrieval_the_prompt_is_the_conversation_alone() -> None:
    async with serving() as served, client_of(served) as client:
        answer = await client.responses.create(
            model="scripted", input=QUESTION, instructions="Be brief.", tool_choice="none"
        )
    assert [item.type for item in answer.output] == ["message"]
    (prompt,) = served.backend.prompts[-1]
    assert served.backend.model.tokenizer.decode(prompt.token_ids) == f"Be brief.\n\nUser: {QUESTION}\n\nAssistant:"
    assert served.source.queries == []
    assert served.watcher.answers[-1].num_prompt_tokens == len(prompt.token_ids)


@pytest.mark.parametrize("stream", [False, True])
async def test_an_answer_that_was_cut_is_incomplete(stream: bool) -> None:
    async with serving() as served, client_of(served) as client:
        asked = client.responses.create(model="scripted", input=QUESTION, max_output_tokens=5, stream=stream)
        if stream:
            events = [event async for event in await asked]
            assert events[-1].type == "response.incomplete"
            answer = events[-1].response
        else:
            answer = await asked
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
    assert answer.output_text == "It is"
    assert answer.output[-1].status == "incomplete"


async def test_a_response_not_stored_or_deleted_cannot_be_retrieved() -> None:
    async with serving() as served, client_of(served) as client:
        kept = await client.responses.create(model="scripted", input=QUESTION)
        unkept = await client.responses.create(model="scripted", input=QUESTION, store=False)
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(unkept.id)
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="scripted", input=QUESTION, previous_response_id=unkept.id)
        with pytest.raises(openai.BadRequestError, match="Cannot cancel a synchronous response") as cancelled:
            await client.responses.cancel(kept.id)
        assert (cancelled.value.type, cancelled.value.param) == ("invalid_request_error", "response_id")
        await client.responses.delete(kept.id)
        for asking in (client.responses.retrieve, client.responses.delete, client.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await asking(kept.id)


async def test_the_responses_of_another_client_cannot_be_found() -> None:
    async with serving(keys={"a-key": "alice", "b-key": "bob"}) as served:
        async with client_of(served, "a-key") as alice, client_of(served, "b-key") as bob:
            hers = await alice.responses.create(model="scripted", input=QUESTION)
            with pytest.raises(openai.NotFoundError):
                await bob.responses.retrieve(hers.id)
            with pytest.raises(openai.NotFoundError):
                await bob.responses.create(model="scripted", input=QUESTION, previous_response_id=hers.id)
            assert (await alice.responses.retrieve(hers.id)).id == hers.id


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        (b"{", 400, None),
        (b"\xff", 400, None),
        (b"[" * 30_000, 400, None),
        (b"[" * 100_000, 413, None),
        ({}, 400, "input"),
        ({"input": ""}, 400, None),
        ({"input": []}, 400, "input"),
        ({"input": 7}, 400, None),
        ({"input": "\ud800"}, 400, None),
        ({"input": QUESTION, "instructions": "\udfff"}, 400, None),
        ({"input": [{"type": "function_call_output", "call_id": "1", "output": "x"}]}, 400, "input.0.type"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, 400, "input.0.type"),
        ({"input": [{"role": "bard", "content": "x"}]}, 400, "input.0.role"),
        ({"input": [{"role": ["user"], "content": "x"}]}, 400, "input.0.role"),
        ({"input": [{"role": "assistant", "content": "x"}]}, 400, "input"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, 400, "input.0.content"),
        ({"input": QUESTION, "model": "gpt-9"}, 404, "model"),
        ({"input": QUESTION, "background": True}, 400, "background"),
        ({"input": QUESTION, "conversation": "conv_1"}, 400, "conversation"),
        ({"input": QUESTION, "generate": False}, 400, "generate"),
        ({"input": QUESTION, "include": ["message.output_text.logprobs"]}, 400, "include"),
        ({"input": QUESTION, "max_output_tokens": 0}, 400, None),
        ({"input": QUESTION, "metadata": {"a": 1}}, 400, "metadata.a"),
        ({"input": QUESTION, "previous_response_id": "resp_1"}, 404, "previous_response_id"),
        ({"input": QUESTION, "reasoning": {"effort": "high"}}, 400, "reasoning"),
        ({"input": QUESTION, "stream_id": "a"}, 400, "stream_id"),
        ({"input": QUESTION, "temperature": -1}, 400, None),
        ({"input": QUESTION, "text": {"format": {"type": "json_object"}}}, 400, "text.format"),
        ({"input": QUESTION, "tool_choice": {"type": "function", "name": "f"}}, 400, "tool_choice"),
        ({"input": QUESTION, "tools": [{"type": "function", "name": "f"}]}, 400, "tools"),
        ({"input": QUESTION, "truncation": "auto"}, 400, "truncation"),
        ({"input": QUESTION, "max_tool_calls": 0}, 400, "max_tool_calls"),
        ({"input": QUESTION, "moderation": {}}, 400, "moderation"),
        ({"input": QUESTION, "prompt": {"id": "pmpt_1"}}, 400, "prompt"),
        ({"input": QUESTION, "context_management": [{}]}, 400, "context_management"),
        ({"input": QUESTION, "logit_bias": {"5": 1}}, 400, "logit_bias"),
        ({"input": QUESTION, "stop": ["."]}, 400, "stop"),
    ],
)
async def test_a_responses_request_that_cannot_be_answered_is_refused(
    body: object, status: int, param: str | None
) -> None:
    async with serving() as served:
        content = body if isinstance(body, bytes) else json.dumps(body)
        answer = await served.http.post("/v1/responses", content=content)
        assert answer.status_code == status, answer.text
        error = answer.json()["error"]
        assert error["message"]
        if param is not None:
            assert error["param"] == param
        good = await served.http.post("/v1/responses", json={"input": QUESTION, "tools": [{"type": "file_search"}]})
        assert good.status_code == 200


async def test_an_error_is_a_status_or_the_end_of_the_stream() -> None:
    async with serving([*CHUNKS, SourceError("the site is gone")]) as served, client_of(served) as client:
        with pytest.raises(openai.InternalServerError, match="retrieval failed"):
            await client.responses.create(model="scripted", input=QUESTION)
        stream = await client.responses.create(model="scripted", input=QUESTION, stream=True)
        *_, last = [event async for event in stream]
    assert last.type == "response.failed"
    assert last.response.error.message == RETRIEVAL_FAILED
    assert last.response.output[0].status == "failed"
    assert served.watcher.ended == [("responses", "source_error")] * 2


async def test_an_engine_that_fails_in_mid_answer_leaves_what_it_said() -> None:
    backend = ScriptedBackend(answer="It is Paris.", error=BackendError("out of memory"))
    async with serving(backend=backend) as served, client_of(served) as client:
        stream = await client.responses.create(model="scripted", input=QUESTION, stream=True)
        *_, last = [event async for event in stream]
        assert last.response.error.code == "server_error"
        assert last.response.output_text == "I"
        with pytest.raises(openai.NotFoundError):
            await client.responses.retrieve(last.response.id)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("tool_choice", ["auto", "none"])
async def test_a_client_that_leaves_frees_everything(stream: bool, tool_choice: str) -> None:
    backend = ScriptedBackend(is_endless=True)
    async with serving([Append(PARIS), anyio.Event()], backend=backend) as served:
        body = {"input": QUESTION, "stream": stream, "tool_choice": tool_choice}
        asking = asyncio.create_task(served.http.post("/v1/responses", json=body))
        await served.watcher.has_begun.wait()
        asking.cancel()
        await asyncio.wait([asking])
        await served.watcher.has_ended.wait()
        assert served.watcher.ended == [("responses", "left")]
        assert (served.source.num_streams, backend.num_requests) == (0, 0)


async def test_a_conversation_that_is_too_long_is_told_so() -> None:
    backend = ScriptedBackend(max_model_len=300)
    async with serving(backend=backend) as served:
        for tool_choice in ("none", "auto"):
            answer = await served.http.post("/v1/responses", json={"input": "x" * 1000, "tool_choice": tool_choice})
            assert answer.status_code == 400
            assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert not served.service.queries


async def test_a_query_without_retrieval_has_a_deadline_too() -> None:
    backend = ScriptedBackend(is_endless=True)
    async with serving(backend=backend, limits=Limits(deadline_s=0.05)) as served:
        answer = await served.http.post("/v1/responses", json={"input": QUESTION, "tool_choice": "none"})
        assert answer.status_code == 504
        assert backend.num_requests == 0


async def test_tools_that_are_large_are_refused_since_they_are_held_as_objects() -> None:
    async with serving() as served:
        tool = {"type": "file_search", "x": [[]] * 6000}
        answer = await served.http.post("/v1/responses", json={"input": QUESTION, "tools": [tool]})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools")
