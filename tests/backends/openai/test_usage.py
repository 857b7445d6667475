"""The numbers of tokens that answers of a server report."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from openai_server import REFUSE, Server, chunk, collect, prompt, reply, stream

from streamrag import Append, Chunk, Pipeline
from streamrag.backends.openai import OpenAIBackend
from streamrag.core import AnswerChunk, Prompt, SamplingParams, TokenUsage, Turn, plain_chat
from streamrag.errors import ServerError
from streamrag.telemetry import ContextChanged, ContextComplete
from streamrag.testing import ScriptedSource

REPORTED = {"choices": [], "usage": {"prompt_tokens": 1_612, "completion_tokens": 58, "total_tokens": 1_670}}


class Words:
    """A tokenizer with a token for each word."""

    def __init__(self) -> None:
        self._words: list[str] = []

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        self._words += [word for word in text.split() if word not in self._words]
        return [self._words.index(word) for word in text.split()]

    def decode(self, token_ids: Sequence[int]) -> str:
        return " ".join(self._words[token_id] for token_id in token_ids)

    def render_chat(self, turns: Sequence[Turn]) -> str:
        return plain_chat(turns)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    async with Server() as server:
        yield server


@pytest.fixture
async def backend(server: Server) -> AsyncIterator[OpenAIBackend]:
    """One without a tokenizer."""
    backend = OpenAIBackend(server.url, "tiny")
    await backend.start(lambda line: None)
    yield backend
    await backend.aclose()


async def test_the_servers_usage_comes_with_the_last_chunk(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [stream(chunk("4"), chunk("2", "stop"), REPORTED, "[DONE]")]
    first, last = await collect(backend, prompt("Why?"))
    assert first == AnswerChunk("4", ())
    assert last == AnswerChunk("2", (), "stop", usage=TokenUsage(1_612, 58))
    assert server.requests[-1].body["stream_options"] == {"include_usage": True}


async def test_a_server_that_refuses_to_report_usage_is_asked_without_it(
    server: Server, backend: OpenAIBackend
) -> None:
    server.handlers = [REFUSE, *[stream(chunk("42", "stop"), "[DONE]")] * 2]
    for _ in range(2):
        assert await collect(backend, prompt("Why?")) == [AnswerChunk("42", (), "stop")]
    assert ["stream_options" in request.body for request in server.requests] == [True, False, False]


@pytest.mark.parametrize("usage", [None, 5, {}, {"prompt_tokens": "many", "completion_tokens": -1}])
async def test_usage_that_a_server_does_not_report_is_unknown(
    server: Server, backend: OpenAIBackend, usage: Any
) -> None:
    server.handlers = [stream(chunk("42", "stop"), {"choices": [], "usage": usage}, "[DONE]")]
    assert backend.model.unit == "characters"
    async with Pipeline(ScriptedSource([]), backend, owns_backend=False) as pipeline:
        events = [event async for event in pipeline.events("Why?", max_context_tokens=0, overlap=False)]
    answer = events[-1].answer  # type: ignore[union-attr]
    assert (answer.usage, answer.unit) == (TokenUsage(None, None), "characters")
    assert {each.unit for each in events if isinstance(each, ContextChanged | ContextComplete)} == {"characters"}


async def test_an_answer_has_the_servers_numbers_and_not_those_of_characters(
    server: Server, backend: OpenAIBackend
) -> None:
    server.handlers = [stream(chunk("It is Paris."), chunk("", "stop"), REPORTED, "[DONE]")]
    source = ScriptedSource([Append(Chunk("Paris is the capital.", "a.md"))])
    pipeline = Pipeline(source, backend, owns_backend=False, overlap=False)
    async with pipeline, pipeline.stream("Why?") as chunks:
        async for _ in chunks:
            pass
    answer = chunks.result
    assert answer.usage == TokenUsage(1_612, 58)
    assert answer.usage.num_tokens == 1_670
    assert answer.num_prompt_tokens == len(server.requests[-1].body["prompt"])


async def test_with_a_tokenizer_tokens_are_counted_if_the_server_reports_none(server: Server) -> None:
    server.handlers = [reply(chunk("x")), stream(chunk("It is"), chunk(" Paris.", "stop"), "[DONE]")]
    backend = OpenAIBackend(server.url, "tiny", tokenizer=Words())
    await backend.start(lambda line: None)
    assert backend.model.unit == "tokens"
    ids = backend.model.tokenizer.encode("What is the capital?")
    *_, last = await collect(backend, Prompt(tuple(ids), 0, True))
    assert isinstance(last, AnswerChunk)
    assert last.usage == TokenUsage(4, 3)
    await backend.aclose()


def part(index: object, text: str, reason: str | None = None, **more: Any) -> dict[str, Any]:
    return {"choices": [{"index": index, "text": text, "finish_reason": reason, **more}]}


SEVERAL = SamplingParams(max_tokens=5, n=2, temperature=1.0)


async def test_several_answers_are_one_request_and_the_usage_comes_last(server: Server, backend: OpenAIBackend) -> None:
    both = {"choices": [*part(1, "C")["choices"], *part(0, "A")["choices"]]}
    server.handlers = [stream(both, part(1, "D", "stop"), part(0, "B", "length"), REPORTED, "[DONE]")]
    assert await collect(backend, prompt("Why?"), params=SEVERAL) == [
        AnswerChunk("C", (), index=1),
        AnswerChunk("A", (), index=0),
        AnswerChunk("D", (), "stop", index=1),
        AnswerChunk("B", (), "length", index=0, usage=TokenUsage(1_612, 58)),
    ]
    assert server.requests[-1].body["n"] == 2


@pytest.mark.parametrize("index", [2, -1, True, "0", 0.5, [1]])
async def test_an_answer_that_was_not_requested_is_an_error(
    server: Server, backend: OpenAIBackend, index: object
) -> None:
    server.handlers = [stream(part(index, "A"), "[DONE]")]
    with pytest.raises(ServerError, match=r"sent index=.*, but n=2 answers were requested"):
        await collect(backend, prompt("Why?"), params=SEVERAL)


async def test_an_answer_that_does_not_come_is_an_error(server: Server, backend: OpenAIBackend) -> None:
    server.handlers = [stream(part(1, "A", "stop"), part(1, "B", "stop"), REPORTED, "[DONE]")]
    with pytest.raises(ServerError, match="in the middle of an answer"):
        await collect(backend, prompt("Why?"), params=SEVERAL)


async def test_the_tokens_of_several_answers_are_counted_answer_by_answer(server: Server) -> None:
    server.handlers = [
        reply(chunk("x")),
        stream(part(0, "It"), part(1, "is"), part(0, "", "stop"), part(1, "", "stop")),
    ]
    backend = OpenAIBackend(server.url, "tiny", tokenizer=Words())
    await backend.start(lambda line: None)
    *_, last = await collect(backend, Prompt(tuple(backend.model.tokenizer.encode("Why?")), 0, True), params=SEVERAL)
    assert isinstance(last, AnswerChunk)
    assert last.usage == TokenUsage(1, 2)  # "Itis" is one word
    await backend.aclose()
