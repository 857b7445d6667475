"""A question, answered by every event of its query."""

import json

import pytest

from streamrag import SourceError
from streamrag.query.options import MAX_DRAFT
from streamrag.serve import Limits
from streamrag.serve.failures import RETRIEVAL_FAILED
from tests.serve.raw import raw
from tests.serve.serving import CHUNKS, PARIS, serving
from tests.serve.test_chat import VerifyingBackend

QUESTION = "What is the capital of France?"


async def test_every_event_is_told_and_the_answer_is_last() -> None:
    async with serving() as served, raw(served.url) as client:
        await client.post("/v1/ask", {"question": QUESTION})
        assert await client.status() == 200
        events = [each async for each in client.events()]
    names = [name for name, _ in events]
    assert names[0] == "retrieval_started"
    assert names.count("chunk_arrived") == 2
    assert names[-1] == "answered"
    answer = events[-1][1]["answer"]
    assert answer["text"] == "It is Paris [1]."
    assert answer["citations"][0]["uri"] == PARIS.uri
    assert "token_ids" not in answer
    assert answer["num_output_tokens"] == len(answer["text"])
    assert served.watcher.ended == [("ask", "answered")]


async def test_options_reach_the_query() -> None:
    asked = {
        "question": QUESTION,
        "system": "Speak like a pirate.",
        "history": [{"role": "user", "content": "And Italy?"}, {"role": "assistant", "content": "Rome."}],
        "max_tokens": 5,
        "max_context_tokens": 0,
    }
    async with serving() as served:
        answer = await served.http.post("/v1/ask", json=asked)
        prompt = served.backend.model.tokenizer.decode(served.backend.prompts[-1][-1].token_ids)
    assert "pirate" in prompt
    assert "And Italy?" in prompt
    assert PARIS.text not in prompt
    last = answer.text.rstrip().rpartition("data: ")[2]
    assert json.loads(last)["answer"]["num_output_tokens"] == 5


async def test_a_draft_is_that_of_the_answer() -> None:
    async with serving(backend=VerifyingBackend()) as served:
        answer = await served.http.post("/v1/ask", json={"question": QUESTION, "draft": "It is Lyon."})
        complete = served.backend.prompts[-1][-1]
    assert complete.draft == tuple(map(ord, "It is Lyon."))
    last = json.loads(answer.text.rstrip().rpartition("data: ")[2])["answer"]
    assert last["text"] == "It is Paris [1]."
    assert (last["draft"]["num_verified"], last["draft"]["num_accepted"]) == (5, 3)


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"question": QUESTION, "draft": 5},
        {"question": QUESTION, "draft": "x" * (MAX_DRAFT + 1)},
        {"question": ""},
        {"question": QUESTION, "max_token": 5},
        {"question": QUESTION, "max_tokens": 0},
        {"question": QUESTION, "reserve_fraction": 2},
        {"question": QUESTION, "deadline_s": 0},
        {"question": QUESTION, "history": [{"role": "bard", "content": "x"}]},
    ],
)
async def test_a_question_that_cannot_be_answered_is_refused(body: object) -> None:
    async with serving() as served:
        answer = await served.http.post("/v1/ask", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"]
    assert served.watcher.started == []


async def test_an_error_is_the_last_event() -> None:
    async with serving([*CHUNKS, SourceError("the site is gone")]) as served, raw(served.url) as client:
        await client.post("/v1/ask", {"question": QUESTION})
        assert await client.status() == 200
        *_, (name, values) = [each async for each in client.events()]
    assert name == "error"
    assert values["error"]["message"] == RETRIEVAL_FAILED
    assert served.watcher.ended == [("ask", "source_error")]


async def test_a_deadline_of_the_client_counts_up_to_that_of_the_service() -> None:
    async with serving([60.0], limits=Limits(deadline_s=0.2)) as served:
        for given in ({"deadline_s": 0.1}, {"deadline_s": 1000}, {}):
            answer = await served.http.post("/v1/ask", json={"question": QUESTION, **given})
            assert "deadline_exceeded" in answer.text
    assert served.watcher.ended == [("ask", "deadline")] * 3
