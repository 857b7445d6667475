"""What a client might try to hurt the service, or others, with."""

import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from streamrag.asked import MAX_QUERY_CHARACTERS
from streamrag.serve.logs import HIDDEN, QueryLog, hide, log_to
from tests.serve.responses.talking import talking
from tests.serve.serving import serving

KEYS = {"key-of-alice-0123456789": "alice", "key-of-mallory-0123456": "mallory"}
ALICE, MALLORY = ({"authorization": f"Bearer {key}"} for key in KEYS)


@pytest.fixture
def lines() -> Iterator[io.StringIO]:
    """What is logged, everything set back afterwards."""
    root = logging.getLogger()
    before = root.handlers[:], root.level
    stream = io.StringIO()
    log_to(stream)
    yield stream
    root.handlers[:], root.level = before


def no_constant(name: str) -> Any:
    raise AssertionError(f"{name} is no JSON")


@pytest.mark.parametrize("number", ["NaN", "-Infinity", "1e999", "1" * 5000])
@pytest.mark.parametrize(
    "field", ['"tools": [{"type": "file_search", "x": %s}]', '"tool_choice": {"type": "auto", "x": %s}']
)
async def test_a_number_that_json_does_not_have_is_refused(field: str, number: str) -> None:
    async with serving() as served:
        for stream in ("false", "true"):
            body = f'{{"input": "Where?", "stream": {stream}, {field % number}}}'
            answer = await served.http.post("/v1/responses", content=body)
            assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error")
        async with talking(served) as talk:
            await talk.connection.send_raw(f'{{"type": "response.create", "input": "Where?", {field % number}}}')
            (told,) = await talk.events()
            assert (told.type, told.status) == ("error", 400)
            assert (await talk.create("Where?")).status == "completed"


async def test_nobody_hides_from_the_log_by_asking_for_a_word_of_it(lines: io.StringIO) -> None:
    words = ["answered", "mallory", "chat", "stop"]
    async with serving(observers=[QueryLog()], keys=KEYS) as served:
        for word in words:
            body = {"messages": [{"role": "user", "content": word}]}
            assert (await served.http.post("/v1/chat/completions", json=body, headers=MALLORY)).status_code == 200
    found = [json.loads(line) for line in lines.getvalue().splitlines()]
    ended = [line for line in found if line["logger"] == "streamrag.serve.queries"]
    assert len(ended) == len(words)
    for line in ended:
        said = (line["message"], line["client"], line["interface"], line["finish_reason"])
        assert said == ("answered", "mallory", "chat", "stop")


def test_a_question_of_any_length_is_hidden_without_a_pattern_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("re.compile", no_constant)  # of 100,000 characters it held up everybody for a second
    question = "Où est l'İle? " * (MAX_QUERY_CHARACTERS // 14)
    for form in (question, question.upper().replace("İ", "İ"), repr(question)):
        assert HIDDEN in hide(f"no page answers {form}", question)
    assert hide("no page answers", question) == "no page answers"


async def test_questions_of_a_session_are_bounded() -> None:
    async with serving() as served:
        url = f"/v1/sessions/{(await served.http.post('/v1/sessions', json={})).json()['id']}"
        long = "x" * (MAX_QUERY_CHARACTERS + 1)
        asked = await served.http.post(f"{url}/ask", json={"question": long})
        watched = await served.http.put(f"{url}/watches/a", json={"question": long})
        chosen = await served.http.put(f"{url}/watches/a", json={"question": "?", "answers": ["x" * 2000]})
        assert [each.status_code for each in (asked, watched, chosen)] == [400, 400, 400]
