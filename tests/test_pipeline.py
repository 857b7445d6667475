"""A query's life on scripted parts: what comes out, in what order, and that nothing is left when it ends."""

import asyncio
import gc
import re
import warnings
from collections.abc import AsyncIterator
from enum import Enum
from typing import Any

import anyio
import numpy
import pytest

from streamrag import (
    AnswerChunk,
    Append,
    Chunk,
    CutShort,
    Pipeline,
    Prompt,
    PromptTemplate,
    SamplingParams,
    Skipped,
    Turn,
    Update,
    UpdateMode,
)
from streamrag.core import BackendEvent, Progress, SourceEvent
from streamrag.errors import (
    BackendError,
    ConfigurationError,
    DeadlineExceededError,
    ModelError,
    PipelineClosedError,
    PromptTooLongError,
    SourceError,
    StreamRagError,
    TooManyQueriesError,
)
from streamrag.telemetry import (
    Answered,
    ChunkArrived,
    ChunksLeftOut,
    ContextChanged,
    ContextComplete,
    DocumentSkipped,
    PrefillProgressed,
    RetrievalCutShort,
    RetrievalStarted,
    SourceFailed,
    TokensGenerated,
    TokenUsage,
)
from streamrag.testing import ScriptedBackend, ScriptedSource

A = Chunk("alpha", "a.md", "A")
B = Chunk("beta", "b.md", "B")
C = Chunk("gamma", "c.md", "C")


def streamrag_tasks() -> list[str]:
    return [task.get_name() for task in asyncio.all_tasks() if task.get_name().startswith("streamrag")]


async def test_a_pipeline_tells_in_which_loop_it_was_started() -> None:
    pipeline = Pipeline(ScriptedSource([]), ScriptedBackend())
    assert pipeline.loop is None
    async with pipeline:
        assert pipeline.loop is asyncio.get_running_loop()


async def test_the_answer_streams_and_its_result_cites_the_context_in_prompt_order() -> None:
    async with Pipeline(ScriptedSource([Append(A), Append(B)]), ScriptedBackend("Yes.")) as pipeline:
        stream = pipeline.stream("Why?")
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.text for chunk in chunks) == "Yes."
    assert [chunk.finish_reason for chunk in chunks] == [None, None, None, "stop"]
    answer = stream.result
    assert answer.text == "Yes."
    assert [(c.number, c.uri, c.text) for c in answer.citations] == [(1, "a.md", "alpha"), (2, "b.md", "beta")]
    assert answer.has_context
    assert answer.is_exact
    assert answer.timings.ttft_s == pytest.approx(answer.timings.retrieval_s + answer.timings.ttft_after_retrieval_s)
    assert 0 <= answer.timings.queued_s <= answer.timings.ttft_s <= answer.timings.total_s


async def test_events_tell_the_whole_story_in_order() -> None:
    source = ScriptedSource([Update((A, B)), Skipped("d.md", "empty"), Update((A, C))])
    async with Pipeline(source, ScriptedBackend("ok")) as pipeline:
        events = [event async for event in pipeline.events("Why?")]
    kinds = [type(event) for event in events if not isinstance(event, PrefillProgressed)]
    assert kinds == [
        RetrievalStarted,
        ContextChanged,
        ChunkArrived,
        ChunkArrived,
        ContextChanged,
        DocumentSkipped,
        ChunkArrived,
        ContextChanged,
        ContextChanged,
        ContextComplete,
        TokensGenerated,
        TokensGenerated,
        Answered,
    ]
    assert [event.at_s for event in events] == sorted(event.at_s for event in events)
    head, first, second, complete = (event for event in events if isinstance(event, ContextChanged))
    assert [event.chunks for event in (head, first, second, complete)] == [(), (A, B), (A, C), (A, C)]
    assert (head.num_shared, head.num_invalidated) == (0, 0)
    assert (first.num_shared, first.num_invalidated) == (head.num_tokens, 0)
    assert second.num_shared + second.num_invalidated == first.num_tokens
    assert second.num_invalidated > len("beta")
    assert (complete.num_shared, complete.num_invalidated) == (second.num_tokens, 0)
    answered = events[-1]
    assert isinstance(answered, Answered)
    assert answered.answer.num_invalidated == second.num_invalidated
    [context] = (event for event in events if isinstance(event, ContextComplete))
    assert [chunk.text for chunk in context.chunks] == [citation.text for citation in answered.answer.citations]
    assert context.num_chunks == len(context.chunks)


async def test_overlap_does_not_change_the_final_prompt_only_when_the_backend_hears_of_it() -> None:
    steps = [Update((A, B)), Append(C), Update((C, A))]
    backend = ScriptedBackend()
    for overlap in (True, False):
        async with Pipeline(ScriptedSource(steps), backend, overlap=overlap) as pipeline:
            _ = [chunk async for chunk in pipeline.stream("Why?")]
            _ = [chunk async for chunk in pipeline.stream("Why?", overlap=not overlap)]
    streaming, waiting, waiting_too, streaming_too = backend.prompts
    assert (streaming_too, waiting_too) == (streaming, waiting)
    assert [len(streaming), len(waiting)] == [5, 1]
    assert streaming[-1].token_ids == waiting[-1].token_ids
    assert [prompt.is_complete for prompt in streaming] == [False, False, False, False, True]
    assert waiting[0].is_complete


async def test_every_option_of_a_query_reaches_the_prompt() -> None:
    backend = ScriptedBackend("abcdef")
    template = PromptTemplate(passage="<{number}|{uri}|{text}>", after_context="Q: {question}", before_context="D:")
    async with Pipeline(ScriptedSource([Append(A)]), backend) as pipeline:
        stream = pipeline.stream(
            "Why?",
            system="Be brief.",
            template=template,
            history=[Turn("user", "Hi"), Turn("assistant", "Hello")],
            params=SamplingParams(max_tokens=3),
        )
        text = "".join([chunk.text async for chunk in stream])
    assert text == "abc"
    prompt = "".join(map(chr, backend.prompts[0][-1].token_ids))
    assert prompt == "Be brief.\n\nUser: Hi\n\nAssistant: Hello\n\nUser: D:<1|a.md|alpha>Q: Why?\n\nAssistant:"


async def test_without_anything_retrieved_the_model_is_told_and_the_result_says_so() -> None:
    backend = ScriptedBackend()
    async with Pipeline(ScriptedSource([Skipped("x", "gone")]), backend) as pipeline:
        stream = pipeline.stream("Why?")
        _ = [chunk async for chunk in stream]
    assert not stream.result.has_context
    assert "(no documents were found)" in "".join(map(chr, backend.prompts[0][-1].token_ids))


async def test_chunks_over_the_token_budget_are_left_out_and_reported() -> None:
    big = Chunk("x" * 500, "big.md", "Big")
    async with Pipeline(ScriptedSource([Update((A, big, B))]), ScriptedBackend("ok")) as pipeline:
        events = [event async for event in pipeline.events("Why?", max_context_tokens=120)]
    left_out = [event for event in events if isinstance(event, ChunksLeftOut)]
    assert [(event.chunks, event.max_context_tokens) for event in left_out] == [((big,), 120)]
    answered = events[-1]
    assert isinstance(answered, Answered)
    assert [citation.uri for citation in answered.answer.citations] == ["a.md", "b.md"]
    assert answered.answer.left_out == (big,)


async def test_a_source_that_fails_half_way_raises_what_happened() -> None:
    source = ScriptedSource([Append(A), RuntimeError("disk on fire")])
    backend = ScriptedBackend()
    async with Pipeline(source, backend) as pipeline:
        with pytest.raises(SourceError, match=r"ScriptedSource failed: RuntimeError: disk on fire"):
            _ = [chunk async for chunk in pipeline.stream("Why?")]
    assert (source.num_streams, backend.num_requests) == (0, 0)


async def test_a_source_that_fails_half_way_can_be_answered_from_what_arrived() -> None:
    source = ScriptedSource([Append(A), RuntimeError("disk on fire")])
    async with Pipeline(source, ScriptedBackend("ok"), on_source_error="answer") as pipeline:
        stream = pipeline.events("Why?")
        events = [event async for event in stream]
    assert any(isinstance(event, SourceFailed) for event in events)
    assert [citation.uri for citation in stream.result.citations] == ["a.md"]
    assert "disk on fire" in str(stream.result.source_error)


CUT_SHORT = "(retrieval was cut short: documents may be missing)"


@pytest.mark.parametrize("end", [CutShort("time is up"), SourceError("the site is down")], ids=["time", "failure"])
@pytest.mark.parametrize("found", [[], [Append(A), Append(B)]], ids=["nothing", "something"])
async def test_an_answer_and_its_prompt_say_that_retrieval_was_cut_short(
    end: CutShort | SourceError, found: list[Append]
) -> None:
    backend = ScriptedBackend("ok")
    async with Pipeline(ScriptedSource([*found, end]), backend, on_source_error="answer") as pipeline:
        async with pipeline.events("Why?") as stream:
            events = [event async for event in stream]
    answered, prompts = events[-1], backend.prompts[0]
    assert isinstance(answered, Answered)
    reported = [event for event in events if isinstance(event, RetrievalCutShort | SourceFailed)]
    assert len(reported) == 1
    if isinstance(end, CutShort):
        assert (answered.answer.cut_short, answered.answer.source_error) == ("time is up", None)
    else:
        assert (answered.answer.cut_short, answered.answer.source_error) == (None, end)
    text = "".join(map(chr, prompts[-1].token_ids))
    assert f"\n\n{CUT_SHORT}\n\nQuestion: Why?" in text
    assert "no documents were found" not in text
    assert answered.answer.num_invalidated == 0  # it stands behind the passages
    assert all(prompts[-1].token_ids[: len(p.token_ids)] == p.token_ids for p in prompts)


async def test_an_answer_and_its_prompt_say_nothing_if_retrieval_was_complete() -> None:
    backend = ScriptedBackend("ok")
    async with Pipeline(ScriptedSource([Append(A)]), backend) as pipeline:
        stream = pipeline.stream("Why?")
        assert [chunk async for chunk in stream]
    assert stream.result.cut_short is None
    assert CUT_SHORT not in "".join(map(chr, backend.prompts[0][-1].token_ids))


async def test_a_backend_that_fails_raises_and_stops_retrieval() -> None:
    source = ScriptedSource([Append(A)])
    backend = ScriptedBackend(error=BackendError("out of memory"))
    async with Pipeline(source, backend) as pipeline:
        with pytest.raises(BackendError, match="out of memory"):
            _ = [chunk async for chunk in pipeline.stream("Why?")]
        assert streamrag_tasks() == ["streamrag start"] or streamrag_tasks() == []
    assert (source.num_streams, backend.num_requests) == (0, 0)


async def test_a_question_longer_than_the_model_is_refused_with_the_numbers() -> None:
    async with Pipeline(ScriptedSource([]), ScriptedBackend(max_model_len=500)) as pipeline:
        with pytest.raises(PromptTooLongError, match=r"max_tokens=256 .* length of 500"):
            _ = [chunk async for chunk in pipeline.stream("x" * 1000)]


@pytest.mark.parametrize(
    ("phase", "steps", "backend"),
    [
        ("before the first chunk", [anyio.Event()], ScriptedBackend()),
        ("while retrieving", [Append(A), anyio.Event()], ScriptedBackend()),
        ("while prefilling", [Append(A)], ScriptedBackend(hold=anyio.Event())),
        ("while decoding", [Append(A)], ScriptedBackend(is_endless=True)),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
@pytest.mark.parametrize("how", ["leaving the block", "an exception", "cancelling the task", "cancelling a bare loop"])
async def test_leaving_in_any_phase_stops_everything_before_it_returns(
    phase: str, steps: list[SourceEvent | anyio.Event], backend: ScriptedBackend, how: str
) -> None:
    source = ScriptedSource(steps)
    async with Pipeline(source, backend) as pipeline:
        reached = anyio.Event()

        async def read(events: AsyncIterator[object]) -> None:
            async for event in events:
                is_reached = {
                    "before the first chunk": isinstance(event, RetrievalStarted),
                    "while retrieving": isinstance(event, ContextChanged),
                    "while prefilling": isinstance(event, ContextChanged),
                    "while decoding": isinstance(event, TokensGenerated),
                }[phase]
                if is_reached:
                    reached.set()
                    if how == "leaving the block":
                        return
                    if how == "an exception":
                        raise ZeroDivisionError

        async def ask() -> None:
            if how == "cancelling a bare loop":
                await read(pipeline.events("Why?"))
            else:
                async with pipeline.events("Why?") as stream:
                    await read(stream)

        if how.startswith("cancelling"):
            task = asyncio.create_task(ask())
            await reached.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        elif how == "an exception":
            with pytest.raises(ZeroDivisionError):
                await ask()
        else:
            await ask()
        assert (source.num_streams, backend.num_requests, pipeline.num_queries) == (0, 0, 0)
        assert not [name for name in streamrag_tasks() if "query" in name]


async def test_a_bare_loop_left_early_is_stopped_when_its_handle_is_collected() -> None:
    source, backend = ScriptedSource([Append(A)]), ScriptedBackend(is_endless=True)
    async with Pipeline(source, backend) as pipeline:
        with pytest.warns(ResourceWarning, match="AnswerStream was dropped while its query was running"):
            async for _ in pipeline.stream("Why?"):
                break
            gc.collect()
        while pipeline.num_queries:
            await anyio.lowlevel.checkpoint()
        assert (source.num_streams, backend.num_requests) == (0, 0)


async def test_a_handle_that_was_never_iterated_costs_nothing() -> None:
    source = ScriptedSource([Append(A)])
    async with Pipeline(source, ScriptedBackend()) as pipeline:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pipeline.stream("Why?")
            gc.collect()
    assert source.queries == []


async def test_the_result_before_the_end_is_an_error_that_says_what_to_do() -> None:
    async with (
        Pipeline(ScriptedSource([Append(A)]), ScriptedBackend(is_endless=True)) as pipeline,
        pipeline.stream("Why?") as stream,
    ):
        await anext(stream)
        with pytest.raises(StreamRagError, match="iterate the stream to its end first"):
            _ = stream.result


async def test_a_deadline_ends_the_query_and_frees_it() -> None:
    source, backend = ScriptedSource([Append(A), anyio.Event()]), ScriptedBackend()
    async with Pipeline(source, backend) as pipeline:
        with pytest.raises(DeadlineExceededError, match=r"deadline of 1 s passed while retrieving"):
            _ = [chunk async for chunk in pipeline.stream("Why?", deadline_s=1)]
        assert (source.num_streams, backend.num_requests, pipeline.num_queries) == (0, 0, 0)


class SlowToStart(ScriptedBackend):
    """Until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.may_start = anyio.Event()

    async def start(self, progress: Progress) -> None:
        await self.may_start.wait()
        await super().start(progress)


async def test_a_deadline_passes_while_the_engine_starts_and_the_start_goes_on() -> None:
    backend = SlowToStart()
    pipeline = Pipeline(ScriptedSource([]), backend)
    with pytest.raises(DeadlineExceededError, match=r"0.05 s passed while .* starting: start the pipeline before"):
        _ = [chunk async for chunk in pipeline.stream("Why?", deadline_s=0.05)]
    assert pipeline.num_queries == 0
    backend.may_start.set()
    assert [chunk async for chunk in pipeline.stream("Why?")]
    await pipeline.aclose()


async def test_a_deadline_that_passes_while_a_place_is_awaited_says_so() -> None:
    source = ScriptedSource(lambda query: [anyio.Event()])
    async with Pipeline(source, ScriptedBackend(), max_concurrent_queries=1) as pipeline:
        async with pipeline.stream("first"):
            with pytest.raises(DeadlineExceededError, match=r"passed while other queries .* max_concurrent_queries"):
                _ = [chunk async for chunk in pipeline.stream("second", deadline_s=0.05)]
            assert source.queries == ["first"]


async def test_a_deadline_that_passes_while_the_answer_is_generated_says_so() -> None:
    async with Pipeline(ScriptedSource([]), ScriptedBackend(is_endless=True)) as pipeline:
        with pytest.raises(DeadlineExceededError, match=r"passed while generating: .* max_tokens"):
            _ = [chunk async for chunk in pipeline.stream("Why?", deadline_s=1)]


async def test_a_full_pipeline_makes_queries_wait() -> None:
    gate = anyio.Event()
    source = ScriptedSource(lambda query: [gate] if query == "first" else [])
    async with Pipeline(source, ScriptedBackend("ok"), max_concurrent_queries=1) as pipeline:
        async with pipeline.stream("first") as first, pipeline.stream("second") as second:
            while source.queries != ["first"]:
                await anyio.lowlevel.checkpoint()
            for _ in range(20):
                await anyio.lowlevel.checkpoint()
            assert source.queries == ["first"]
            gate.set()
            assert "".join([chunk.text async for chunk in first]) == "ok"
            assert "".join([chunk.text async for chunk in second]) == "ok"
            assert second.result.timings.queued_s > 0


async def test_a_full_pipeline_can_refuse() -> None:
    source = ScriptedSource([anyio.Event()])
    async with (
        Pipeline(source, ScriptedBackend(), max_concurrent_queries=1, when_full="refuse") as pipeline,
        pipeline.stream("first"),
    ):
        with pytest.raises(TooManyQueriesError, match="max_concurrent_queries=1"):
            _ = [chunk async for chunk in pipeline.stream("second")]


async def test_a_pipeline_without_a_block_starts_on_the_first_query_and_closes() -> None:
    source, backend, lines = ScriptedSource([Append(A)]), ScriptedBackend("ok"), []
    pipeline = Pipeline(source, backend, on_progress=lines.append)
    assert not source.is_started
    assert "".join([chunk.text async for chunk in pipeline.stream("Why?")]) == "ok"
    assert (source.is_started, backend.is_started) == (True, True)
    assert sorted(lines) == ["scripted backend is ready", "scripted source is ready"]
    await pipeline.aclose()
    assert (source.is_started, backend.is_started) == (False, False)
    with pytest.raises(PipelineClosedError):
        _ = [chunk async for chunk in pipeline.stream("Why?")]


async def test_closing_aborts_running_queries() -> None:
    source, backend = ScriptedSource([Append(A)]), ScriptedBackend(is_endless=True)
    pipeline = Pipeline(source, backend)
    stream = pipeline.stream("Why?")
    await anext(stream)
    await pipeline.aclose()
    assert (source.num_streams, backend.num_requests) == (0, 0)
    with pytest.raises(PipelineClosedError, match="stopped before its end"):
        _ = stream.result


async def test_an_answer_that_closing_cuts_off_does_not_look_like_a_whole_one() -> None:
    pipeline = Pipeline(ScriptedSource([Append(A)]), ScriptedBackend("ok", is_endless=True))
    stream = pipeline.stream("Why?")
    await anext(stream)
    closing = asyncio.create_task(pipeline.aclose())
    with pytest.raises(PipelineClosedError, match="stopped before its end: its pipeline was closed"):
        _ = [chunk async for chunk in stream]
    await closing


async def test_an_answer_whose_task_is_cancelled_does_not_look_like_a_whole_one() -> None:
    async with Pipeline(ScriptedSource([Append(A)]), ScriptedBackend(is_endless=True)) as pipeline:
        stream = pipeline.stream("Why?")
        await anext(stream)
        for task in asyncio.all_tasks():
            if task.get_name().startswith("streamrag query"):
                task.cancel()
        with pytest.raises(StreamRagError, match="stopped before its end"):
            _ = [chunk async for chunk in stream]


async def test_a_stream_that_its_own_reader_closes_just_ends() -> None:
    async with Pipeline(ScriptedSource([Append(A)]), ScriptedBackend(is_endless=True)) as pipeline:
        stream = pipeline.stream("Why?")
        await anext(stream)
        await stream.aclose()
        assert [chunk async for chunk in stream] == []


class CancelledBackend(ScriptedBackend):
    """Whoever it works for has cancelled it."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for event in super().generate(prompts, params):
            yield event
            if isinstance(event, AnswerChunk):
                raise asyncio.CancelledError


async def test_a_backend_that_cancels_itself_has_failed() -> None:
    async with Pipeline(ScriptedSource([Append(A)]), CancelledBackend()) as pipeline:
        with pytest.raises(BackendError, match=r"CancelledBackend failed: a CancelledError, although"):
            _ = [chunk async for chunk in pipeline.stream("Why?")]


class SlowToClose(ScriptedBackend):
    """Until it is let go."""

    def __init__(self) -> None:
        super().__init__(is_endless=True)
        self.closes, self.may_close = anyio.Event(), anyio.Event()

    async def aclose(self) -> None:
        self.closes.set()
        await self.may_close.wait()
        await super().aclose()


@pytest.mark.parametrize("how", ["aclose", "the end of a block", "a scope of anyio's"])
async def test_closing_that_is_cancelled_still_stops_everything_before_it_returns(how: str) -> None:
    source, backend = ScriptedSource([Append(A)]), SlowToClose()
    pipeline = Pipeline(source, backend)
    scope = anyio.CancelScope()

    async def close() -> None:
        if how == "the end of a block":
            async with pipeline:
                pass
        elif how == "aclose":
            await pipeline.aclose()
        else:
            with scope:
                await pipeline.aclose()
            raise asyncio.CancelledError

    await pipeline.start()
    closing = asyncio.create_task(close())
    await backend.closes.wait()
    (scope if how == "a scope of anyio's" else closing).cancel()
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
    assert not closing.done()
    backend.may_close.set()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert (source.is_started, backend.is_started) == (False, False)
    assert streamrag_tasks() == []


async def test_a_drain_that_is_cancelled_goes_on_to_abort_and_stop_everything() -> None:
    source, backend = ScriptedSource([Append(A)]), ScriptedBackend(is_endless=True)
    pipeline = Pipeline(source, backend)
    stream = pipeline.stream("Why?")
    await anext(stream)
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(pipeline.aclose(drain_s=3600), 0.05)
    assert (source.num_streams, backend.num_requests, source.is_started, backend.is_started) == (0, 0, False, False)
    with pytest.raises(PipelineClosedError):
        _ = [chunk async for chunk in stream]


async def test_a_second_close_of_a_pipeline_waits_for_the_first() -> None:
    backend = SlowToClose()
    pipeline = Pipeline(ScriptedSource([]), backend)
    await pipeline.start()
    first = asyncio.create_task(pipeline.aclose())
    await backend.closes.wait()
    second = asyncio.create_task(pipeline.aclose())
    for _ in range(20):
        await anyio.lowlevel.checkpoint()
    assert not second.done()
    backend.may_close.set()
    await second
    assert not backend.is_started
    await first


async def test_a_start_that_closing_cuts_off_says_so() -> None:
    backend = SlowToStart()
    pipeline = Pipeline(ScriptedSource([]), backend)
    starting = asyncio.create_task(pipeline.start())
    stream = pipeline.stream("Why?")
    asking = asyncio.ensure_future(anext(stream))
    while not (streamrag_tasks() and pipeline.num_queries):
        await anyio.lowlevel.checkpoint()
    await pipeline.aclose()
    for waiting in (starting, asking):
        with pytest.raises(PipelineClosedError):
            await waiting


class FailingBackend(ScriptedBackend):
    async def start(self, progress: Progress) -> None:
        raise ModelError("no such model")


async def test_a_part_that_cannot_start_stops_the_other_and_raises_its_reason() -> None:
    source = ScriptedSource([])
    with pytest.raises(ModelError, match="no such model"):
        async with Pipeline(source, FailingBackend()):
            pass
    assert not source.is_started


async def test_a_dropped_pipeline_that_was_started_warns() -> None:
    pipeline = Pipeline(ScriptedSource([]), ScriptedBackend())
    await pipeline.start()
    with pytest.warns(ResourceWarning, match="dropped without being closed"):
        del pipeline
        gc.collect()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_concurrent_queries": 0}, "max_concurrent_queries=0"),
        ({"max_concurrent_queries": "3"}, "max_concurrent_queries='3' must be"),
        ({"max_concurrent_queries": 2.5}, "max_concurrent_queries=2.5 must be"),
        ({"when_full": "explode"}, "when_full='explode'"),
        ({"on_source_error": "cry"}, "on_source_error='cry'"),
    ],
)
def test_values_that_cannot_work_are_named(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        Pipeline(ScriptedSource([]), ScriptedBackend(), **options)  # type: ignore[arg-type]


class Question(str, Enum):  # noqa: UP042 - it is written by its name
    RETURNS = "How do I return it?"


async def test_texts_and_numbers_are_what_they_say_whatever_their_type() -> None:
    backend = ScriptedBackend("ok")
    source = ScriptedSource([Append(Chunk("x" * 300, f"{i}.md")) for i in range(9)])
    async with Pipeline(source, backend) as pipeline:
        for text, budget in ((Question.RETURNS, numpy.uint16(700)), ("How do I return it?", 700)):
            options: Any = {"system": text, "history": [Turn("user", text)], "max_context_tokens": budget}
            _ = [chunk async for chunk in pipeline.stream(text, **options)]
    assert backend.prompts[0][-1] == backend.prompts[1][-1]


def test_parts_in_the_wrong_place_are_named() -> None:
    source, backend = ScriptedSource([]), ScriptedBackend()
    for part, message in (
        ({"mode": UpdateMode}, "the mode is the class UpdateMode, and must be an object of it"),
        ({"mode": 5}, "the mode is an int, and has no method 'fold'"),
        ({"recorder": 5}, "the recorder is an int, and has no method 'record'"),
    ):
        with pytest.raises(ConfigurationError, match=message):
            Pipeline(source, backend, **part)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the source is a ScriptedBackend, and has no method 'stream'"):
        Pipeline(backend, source)  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match="the backend is None, and has no method 'generate'"):
        Pipeline(source, None)  # type: ignore[arg-type]


async def test_a_drain_of_no_time_at_all_is_refused_before_anything_is_closed() -> None:
    async with Pipeline(ScriptedSource([]), ScriptedBackend("ok")) as pipeline:
        for drain_s in (float("nan"), -1.0, "5"):
            with pytest.raises(ConfigurationError, match="drain_s="):
                await pipeline.aclose(drain_s=drain_s)  # type: ignore[arg-type]
        assert [chunk async for chunk in pipeline.stream("Why?")]


@pytest.mark.parametrize(
    ("query", "options", "message"),
    [
        ("  ", {}, "the query is empty"),
        ("why " * 25_001, {}, "the query has 100,004 characters, and 100,000 is the most"),
        ("Why?", {"deadline_s": 0}, "deadline_s=0"),
        ("Why?", {"deadline_s": float("nan")}, "deadline_s=nan must be"),
        ("Why?", {"deadline_s": "3"}, "deadline_s='3' must be"),
        ("Why?", {"deadline_s": True}, "deadline_s=True must be"),
        ("Why?", {"max_context_tokens": -1}, "max_context_tokens=-1"),
        ("Why?", {"max_context_tokens": 2.5}, "max_context_tokens=2.5 must be"),
        ("Why?", {"max_context_tokens": "9"}, "max_context_tokens='9' must be"),
        ("Why?", {"reserve_fraction": float("nan")}, "reserve_fraction=nan must be"),
        ("Why?", {"reserve_fraction": 1}, "reserve_fraction=1 must be"),
        ("Why?", {"reserve_fraction": "all"}, "reserve_fraction='all' must be"),
        ("Why?", {"params": {"max_tokens": 3}}, "params={'max_tokens': 3} must be"),
        ("Why?", {"template": "Q:"}, "template='Q:' must be"),
        ("Why?", {"deadline_s": 10**400}, "deadline_s=1000.* must be"),
        ("Why?", {"system": 5}, "system=5 must be a str"),
        ("Why?", {"template": ""}, "template='' must be"),
        ("Why?", {"params": {}}, "params={} must be"),
        ("Why?", {"overlap": "no"}, "overlap='no' must be"),
        ("Why?", {"history": 0}, "history=0 must be a sequence of Turn"),
        ("Why?", {"history": [Turn("user", None)]}, "history=.* each with a role"),  # type: ignore[arg-type]
        ("Why?", {"history": [Turn("admin", "x")]}, "history=.* each with a role"),  # type: ignore[arg-type]
        ("Why?", {"history": ["Hi"]}, "history=.* must be a sequence of Turn"),
        ("Why?", {"history": 3}, "history=3 must be a sequence of Turn"),
        (None, {}, "text=None must be"),
    ],
)
def test_query_options_that_cannot_work_are_named(query: str, options: dict[str, object], message: str) -> None:
    pipeline = Pipeline(ScriptedSource([]), ScriptedBackend())
    with pytest.raises(ConfigurationError, match=message):
        pipeline.stream(query, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("option", "nearest"),
    [
        ("max_token", "params=SamplingParams(max_tokens=...)"),
        ("temperature", "params=SamplingParams(temperature=...)"),
        ("max_context_token", "max_context_tokens"),
        ("deadline", "deadline_s"),
    ],
)
def test_an_unknown_option_is_named_with_the_nearest_known_one_and_all_others(option: str, nearest: str) -> None:
    pipeline = Pipeline(ScriptedSource([]), ScriptedBackend())
    message = re.escape(f"a query has no option '{option}'; did you mean {nearest}?") + ".* history, .*system"
    for ask in (pipeline.stream, pipeline.events):
        with pytest.raises(ConfigurationError, match=message):
            ask("Why?", **{option: 3})  # type: ignore[arg-type]
    with pytest.raises(ConfigurationError, match=r"a query has no option 'xyz'\. Its options are"):
        pipeline.stream("Why?", xyz=3)  # type: ignore[call-arg]


async def test_sources_and_backends_need_neither_start_nor_generators() -> None:
    """The smallest parts that the protocols allow."""

    class OneShot:
        """An async iterator that is no generator."""

        def __init__(self, items: list[object]) -> None:
            self._items = iter(items)

        def __aiter__(self) -> "OneShot":
            return self

        async def __anext__(self) -> object:
            for item in self._items:
                return item
            raise StopAsyncIteration

    class SmallSource:
        def stream(self, query: str) -> AsyncIterator[SourceEvent]:
            return OneShot([Append(A)])  # type: ignore[return-value]

    class SmallBackend:
        model = ScriptedBackend().model

        async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
            async for _ in prompts:
                pass
            yield AnswerChunk("ok", (1,), "stop")

    async with Pipeline(SmallSource(), SmallBackend()) as pipeline:
        assert [chunk.text async for chunk in pipeline.stream("Why?")] == ["ok"]


async def test_several_pipelines_share_one_engine() -> None:
    backend = ScriptedBackend("ok")
    await backend.start(print)
    for chunk in (A, B):
        async with Pipeline(ScriptedSource([Append(chunk)]), backend, owns_backend=False) as pipeline:
            assert "".join([piece.text async for piece in pipeline.stream("Why?")]) == "ok"
    assert backend.is_started
    assert len(backend.prompts) == 2


async def test_a_pipeline_neither_starts_nor_closes_a_source_that_it_does_not_own() -> None:
    source, backend = ScriptedSource([Append(A)]), ScriptedBackend("ok")
    async with Pipeline(source, backend, owns_source=False):
        assert (source.is_started, backend.is_started) == (False, True)
    await source.start(print)
    async with Pipeline(source, backend, owns_source=False):
        pass
    assert (source.is_started, backend.is_started) == (True, False)


async def test_the_chunks_of_a_stream_are_those_that_the_backend_yields() -> None:
    usage, rows = TokenUsage(7, 2), [{1: 0.5}]
    chunks = [AnswerChunk("It ", (1,), prompt_logprobs=rows), AnswerChunk("is.", (2,), "stop", usage=usage)]

    class Yielding(ScriptedBackend):
        async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
            async for _ in prompts:
                pass
            for chunk in chunks:
                yield chunk

    async with Pipeline(ScriptedSource([]), Yielding()) as pipeline, pipeline.stream("What is it?") as stream:
        assert [chunk async for chunk in stream] == chunks
    assert stream.result.usage == usage


async def test_all_prompts_of_a_query_have_its_conversation_and_one_id() -> None:
    backend = ScriptedBackend()
    source = ScriptedSource([Append(Chunk("Paris is in France.", "geo.md")), 0.01])
    async with Pipeline(source, backend, overlap=True) as pipeline:
        for _ in range(2):
            _ = [chunk async for chunk in pipeline.stream("Where is Paris?", conversation_id="ada 7")]
    assert {prompt.conversation_id for prompts in backend.prompts for prompt in prompts} == {"ada 7"}
    ids = [{prompt.query_id for prompt in prompts} for prompts in backend.prompts]
    assert [len(of_query) for of_query in ids] == [1, 1]
    assert ids[0] != ids[1]
