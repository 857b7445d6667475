"""What a query hands to its backend beside tokens, and what it hands on of what the backend tells."""

import time
from collections.abc import AsyncIterator

import pytest

from streamrag import (
    Answer,
    AnswerChunk,
    Append,
    AppendMode,
    Chunk,
    DelayedUpdates,
    Hint,
    Pipeline,
    Prompt,
    SamplingParams,
    Update,
    UpdateMode,
)
from streamrag.core import BackendEvent, Source
from streamrag.errors import BackendError, ConfigurationError, SourceError
from streamrag.records import RequestRecord
from streamrag.telemetry import Alternative, ChunkArrived, TokensGenerated
from streamrag.testing import ScriptedBackend, ScriptedSource

A, B, C = (Chunk(text, f"{text[0]}.md") for text in ("alpha", "beta", "gamma"))

RECORD = RequestRecord("1", "finished", True, 1.0, 1.0, 1.0, 2.0, 3.0, 4.0, 10, 2, 10, 0, 0, 0)


async def ask(pipeline: Pipeline) -> Answer:
    stream = pipeline.stream("What?")
    assert [chunk async for chunk in stream]
    return stream.result


async def test_each_prompt_has_the_hint_of_its_own_chunk_event() -> None:
    source = ScriptedSource([Append(A, Hint(num_chunks=2, end_s=3.0)), Append(B), Update((B,), Hint(num_chunks=0))])
    backend = ScriptedBackend()
    async with Pipeline(source, backend) as pipeline:
        await ask(pipeline)
    (prompts,) = backend.prompts
    assert [prompt.hint for prompt in prompts[1:]] == [Hint(2, 3.0), None, Hint(0), None]
    assert prompts[-1].is_complete


class RecordingBackend(ScriptedBackend):
    """Tells with its last token what it did."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for _ in prompts:
            pass
        yield AnswerChunk("Y", (1,))
        yield AnswerChunk("es", (2,), "stop", RECORD)


async def test_an_answer_has_the_engines_record_and_the_time_that_relates_the_two() -> None:
    before_s = time.monotonic()
    async with Pipeline(ScriptedSource([Append(A)]), RecordingBackend()) as pipeline:
        answer = await ask(pipeline)
    assert answer.record == RECORD
    assert before_s <= answer.submitted_s <= time.monotonic() - answer.timings.total_s


async def test_an_answer_of_an_engine_that_tells_nothing_has_no_record() -> None:
    async with Pipeline(ScriptedSource([Append(A)]), ScriptedBackend()) as pipeline:
        assert (await ask(pipeline)).record is None


class Tickets(ScriptedSource):
    name = "tickets"


@pytest.mark.parametrize(
    ("source", "name"),
    [
        (ScriptedSource([Append(A)]), "ScriptedSource"),
        (Tickets([Append(A)]), "tickets"),
        (DelayedUpdates(Tickets([Append(A)]), 0.0), "DelayedUpdates(tickets)"),
        (
            DelayedUpdates(DelayedUpdates(Tickets([Append(A)]), 0.0), 0.0),
            "DelayedUpdates(DelayedUpdates(tickets))",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_schedulers_hear_the_name_of_the_source_whatever_it_is_wrapped_in(source: Source, name: str) -> None:
    backend = ScriptedBackend()
    async with Pipeline(source, backend) as pipeline:
        await ask(pipeline)
    assert backend.prompts[0][1].source_name == name


async def test_an_error_names_the_part() -> None:
    source = Tickets([RuntimeError("disk on fire")])
    async with Pipeline(source, ScriptedBackend()) as pipeline:
        with pytest.raises(SourceError, match=r"^tickets failed: RuntimeError: disk on fire"):
            await ask(pipeline)
    async with Pipeline(ScriptedSource([]), ScriptedBackend(answer="")) as pipeline:
        with pytest.raises(BackendError, match=r"^ScriptedBackend ended without finishing its answer"):
            await ask(pipeline)


async def test_a_query_may_have_several_answers_of_which_the_first_streams() -> None:
    async with Pipeline(ScriptedSource([Append(A)]), ScriptedBackend("Yes.")) as pipeline:
        stream = pipeline.stream("What?", params=SamplingParams(n=3))
        assert [chunk.text async for chunk in stream] == list("Yes.")
        events = [event async for event in pipeline.events("What?", params=SamplingParams(n=3))]
    answer = stream.result
    assert (answer.text, answer.finish_reason) == ("Yes.", "stop")
    assert answer.alternatives == (Alternative("Yes.", tuple(map(ord, "Yes.")), "stop"),) * 2
    assert answer.usage.num_output_tokens == 12
    assert sum(isinstance(event, TokensGenerated) for event in events) == 4


@pytest.mark.parametrize("n", [0, 129, 1.5, True, "2"])
def test_a_number_of_answers_that_no_engine_has_is_refused(n: object) -> None:
    with pytest.raises(ConfigurationError, match="n="):
        SamplingParams(n=n)  # type: ignore[arg-type]


class TellingBackend(ScriptedBackend):
    """Tells all that a backend can tell of tokens, and answers once, whatever it is asked."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for _ in prompts:
            pass
        yield AnswerChunk("Y", (1,), logprobs=["first"], prompt_logprobs=[None, "row"])
        yield AnswerChunk("es", (2,), "stop", RECORD, logprobs=["second"])


async def test_log_probabilities_come_with_the_tokens_and_those_of_the_prompt_with_the_answer() -> None:
    async with Pipeline(ScriptedSource([Append(A)]), TellingBackend()) as pipeline:
        stream = pipeline.stream("What?")
        assert [chunk.logprobs async for chunk in stream] == [["first"], ["second"]]
    assert stream.result.prompt_logprobs == [None, "row"]


async def test_a_backend_that_gives_fewer_answers_than_it_was_asked_for_is_named() -> None:
    async with Pipeline(ScriptedSource([Append(A)]), TellingBackend()) as pipeline:
        with pytest.raises(BackendError, match=r"TellingBackend ended without .* answer: 1 of n=2 are finished"):
            async for _ in pipeline.stream("What?", params=SamplingParams(n=2)):
                pass


class Compared(Chunk):
    """Counts how often any of them is compared."""

    num_times = 0

    def __eq__(self, other: object) -> bool:
        Compared.num_times += 1
        return super().__eq__(other)

    __hash__ = Chunk.__hash__


@pytest.mark.parametrize("mode", [UpdateMode(), AppendMode()])
async def test_updates_of_many_chunks_do_not_compare_each_with_each(mode: UpdateMode | AppendMode) -> None:
    updates = [Update(tuple(Compared("text", f"{i}.md", score=score) for i in range(1000))) for score in (1.0, 2.0)]
    Compared.num_times = 0
    async with Pipeline(ScriptedSource(updates), ScriptedBackend(), mode=mode) as pipeline:
        await ask(pipeline)
    assert Compared.num_times < 10_000


async def test_a_chunk_arrives_once_for_each_time_that_the_context_did_not_hold_it() -> None:
    source = ScriptedSource([Append(A), Append(A), Append(B), Update((B, C, C)), Append(A), Append(B), Update((C, A))])
    async with Pipeline(source, ScriptedBackend()) as pipeline:
        events = [event async for event in pipeline.events("What?")]
    assert [event.chunk for event in events if isinstance(event, ChunkArrived)] == [A, B, C, A]
