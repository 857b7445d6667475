"""Sources that do what a source must not: a query says so, and neither ends without a word nor goes on for ever."""

import asyncio
import gc
import math
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import Any, Literal

import anyio
import numpy
import pytest

from streamrag import (
    AnswerChunk,
    Append,
    Chunk,
    Hint,
    Pipeline,
    Prompt,
    SamplingParams,
    Skipped,
    Update,
)
from streamrag.backends.warming import warm_then_generate
from streamrag.core import BackendEvent, CutShort, ModelInfo, SourceEvent
from streamrag.core.retrieval import Retrieval, closing
from streamrag.errors import BackendError, DeadlineExceededError, PipelineClosedError, SourceError
from streamrag.query.answer_stream import AnswerStream
from streamrag.support import tasks as tasks_module
from streamrag.telemetry import ChunkArrived
from streamrag.testing import CodePointTokenizer, ScriptedBackend, ScriptedSource
from streamrag.trace.read import read_trace
from streamrag.trace.recorder import TraceRecorder

A = Chunk("alpha", "a.md", "A")


class Odd:
    """A source that is one function."""

    def __init__(self, stream: Callable[[str], Any]) -> None:
        self._stream = stream
        self.is_asked = False

    def stream(self, query: str) -> Any:
        self.is_asked = True
        return self._stream(query)


async def ask(source: Odd, **options: Any) -> str:
    async with Pipeline(source, ScriptedBackend("ok")) as pipeline:
        return "".join([chunk.text async for chunk in pipeline.stream("Why?", **options)])


async def cancels_itself(query: str) -> AsyncIterator[SourceEvent]:
    yield Append(A)
    raise asyncio.CancelledError


async def awaits_a_cancelled_task(query: str) -> AsyncIterator[SourceEvent]:
    yield Append(A)
    task = asyncio.create_task(asyncio.sleep(0))
    task.cancel()
    await task


async def exits(query: str) -> AsyncIterator[SourceEvent]:
    yield Append(A)
    raise GeneratorExit


@pytest.mark.parametrize("stream", [cancels_itself, awaits_a_cancelled_task, exits])
async def test_a_source_that_cancels_itself_has_failed(stream: Callable[[str], Any]) -> None:
    with anyio.fail_after(120):
        with pytest.raises(SourceError, match=r"Odd failed: a (CancelledError|GeneratorExit), although"):
            await ask(Odd(stream))


async def gives_itself_little_time(query: str) -> AsyncIterator[SourceEvent]:
    async with asyncio.timeout(0.05):
        yield Append(A)
        yield Append(Chunk("beta", "b.md"))


async def gives_itself_little_time_of_anyio(query: str) -> AsyncIterator[SourceEvent]:
    with anyio.fail_after(0.05):
        yield Append(A)
        yield Append(Chunk("beta", "b.md"))


class SlowBackend(ScriptedBackend):
    """Takes longer for a prompt than those sources give themselves."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async def slowly() -> AsyncIterator[Prompt]:
            async for prompt in prompts:
                yield prompt
                await asyncio.sleep(0.2)

        async with aclosing(slowly()) as slow:
            async for event in super().generate(slow, params):
                yield event


@pytest.mark.parametrize("stream", [gives_itself_little_time, gives_itself_little_time_of_anyio])
async def test_a_source_that_times_its_yields_stops_itself_only(stream: Callable[[str], Any]) -> None:
    async with Pipeline(Odd(stream), SlowBackend("ok"), on_source_error="answer") as pipeline:
        async with pipeline.events("Why?") as events:
            seen = [event async for event in events]
    answer = events.result
    assert answer.text == "ok"
    assert isinstance(answer.source_error, SourceError)
    assert "Odd failed: TimeoutError" in str(answer.source_error)
    assert [event.chunk for event in seen if isinstance(event, ChunkArrived)] == [A]
    assert [source.uri for source in answer.citations] == [A.uri]


async def raises_a_group(query: str) -> AsyncIterator[SourceEvent]:
    yield Append(A)
    raise BaseExceptionGroup("two things", [GeneratorExit(), ValueError("x")])


async def test_a_group_of_errors_that_is_no_exception_is_the_sources_failure() -> None:
    with pytest.raises(SourceError, match=r"Odd failed: BaseExceptionGroup\('two things'.*although the query was not"):
        await ask(Odd(raises_a_group))


async def test_a_source_goes_on_only_when_the_next_event_is_asked_for() -> None:
    steps = []

    async def tells(query: str) -> AsyncIterator[SourceEvent]:
        for number in range(3):
            steps.append(number)
            yield Append(Chunk(str(number), "a.md"))

    async with aclosing(Retrieval(Odd(tells), "Why?").events()) as events:
        assert steps == []
        for number in range(3):
            await anext(events)
            await asyncio.sleep(0.01)
            assert steps == list(range(number + 1))


def test_a_chunk_of_each_kind_of_event_is_checked_and_a_list_of_chunks_is_as_good_as_a_tuple() -> None:
    async def good(query: str) -> AsyncIterator[Any]:
        yield Append(replace(A, passage=numpy.int64(3), score=numpy.float32(0.5)), Hint(3))
        yield Update([A], Hint(2))  # type: ignore[arg-type]
        yield Skipped("b.md", "gone")
        yield CutShort("time is up")

    assert asyncio.run(ask(Odd(good))) == "ok"


@pytest.mark.parametrize(
    ("event", "fault"),
    [
        ("nonsense", "a str: it must yield Append, Update, Skipped or CutShort"),
        (None, "None: it must yield"),
        (Append("text"), "an Append with a str in place of a Chunk"),  # type: ignore[arg-type]
        (Append(Chunk(5, "s")), "an Append with a Chunk whose text is an int"),  # type: ignore[arg-type]
        (Append(Chunk("a", None)), "a Chunk whose uri is None"),  # type: ignore[arg-type]
        (Append(Chunk("a", "s", b"t")), "a Chunk whose title is a bytes"),  # type: ignore[arg-type]
        (Append(Chunk("a", "s", "t", "1")), "a Chunk whose passage is a str, and must be a whole number"),  # type: ignore[arg-type]
        (Append(Chunk("a", "s", "t", 0, "0.5")), "a Chunk whose score is '0.5', and must be a finite number"),  # type: ignore[arg-type]
        (Append(Chunk("a", "s", score=-math.inf)), "a Chunk whose score is -inf, and must be a finite number"),
        (Update((A, Chunk("a", "s", score=math.nan))), "an Update with a Chunk whose score is nan, .* finite"),
        (Append(Chunk("a", "s", "t", 10**30)), "a Chunk whose passage is 10+, and must be a whole number from 0"),
        (Append(A, Hint("x")), "an Append with a Hint whose num_chunks is a str, and must be a number"),  # type: ignore[arg-type]
        (Append(A, 3), "an Append with an int in place of a Hint"),  # type: ignore[arg-type]
        (Update((A, "y")), "an Update with a str in place of a Chunk"),  # type: ignore[arg-type]
        (Update(A), "an Update with a Chunk in place of a tuple of chunks"),  # type: ignore[arg-type]
        (Update((A,), "soon"), "an Update with a str in place of a Hint"),  # type: ignore[arg-type]
        (Skipped("a.md", ValueError("x")), "a Skipped of which a field is no text"),  # type: ignore[arg-type]
        (CutShort(None), "a CutShort of which a field is no text"),  # type: ignore[arg-type]
    ],
    ids=str,
)
@pytest.mark.parametrize("is_recorded", [False, True])
async def test_a_source_that_yields_no_event_fails_with_its_fault_named(
    event: object, fault: str, is_recorded: bool, tmp_path: Any
) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl") if is_recorded else None
    source = ScriptedSource([Append(A), event])  # type: ignore[list-item]
    async with Pipeline(source, ScriptedBackend(), recorder=recorder) as pipeline:
        with pytest.raises(SourceError, match=f"ScriptedSource failed: it yielded .*{fault}"):
            _ = [chunk async for chunk in pipeline.stream("Why?")]
        assert source.num_streams == 0


async def test_a_chunk_without_text_is_skipped_once_and_no_passage() -> None:
    blank, invisible, shown = Chunk(" \n", "b.md"), Chunk("\u200b\xad", "c.md", passage=1), Chunk("text", "a.md")
    given = [Append(blank), Update((blank, shown, invisible)), Update((invisible,)), Append(shown)]
    assert [event async for event in Retrieval(ScriptedSource(given), "Why?").events()] == [
        Skipped("b.md", "it has no text"),
        Skipped("c.md", "it has no text"),
        Update((shown,)),
        Update(()),
        Append(shown),
    ]
    async with Pipeline(ScriptedSource([Append(blank)]), ScriptedBackend()) as pipeline:
        async with pipeline.stream("Why?") as stream:
            _ = [chunk async for chunk in stream]
    assert stream.result.citations == ()


async def test_a_model_reads_no_soft_hyphens() -> None:
    hidden = Chunk("Reise\xadkosten", "a\xad.md", "Erstat\xadtung", passage=3)
    source = ScriptedSource([Append(hidden), Update((hidden,))])
    plain = Chunk("Reisekosten", "a\xad.md", "Erstattung", passage=3)
    assert [event async for event in Retrieval(source, "Why?").events()] == [Append(plain), Update((plain,))]


async def test_a_stream_that_is_no_iterator_is_named_and_no_coroutine_stays_unawaited() -> None:
    async def coroutine(query: str) -> list[SourceEvent]:
        return [Append(A)]

    with pytest.raises(SourceError, match=r"Odd\.stream is a coroutine: make it an async generator"):
        await ask(Odd(coroutine))
    gc.collect()  # a coroutine never awaited warns now, and warnings are errors
    for returned, kind in ((None, "None"), ([Append(A)], "a list")):
        with pytest.raises(SourceError, match=rf"Odd\.stream returned {kind}: it must return an async iterator"):
            await ask(Odd(lambda query, returned=returned: returned))


async def swallows_and_yields(query: str) -> AsyncIterator[SourceEvent]:
    while True:
        with suppress(BaseException):
            await asyncio.sleep(3600)
        yield Append(A)


async def swallows_and_ends(query: str) -> AsyncIterator[SourceEvent]:
    with suppress(asyncio.CancelledError):
        await asyncio.sleep(3600)
        yield Append(A)


async def makes_another_error(query: str) -> AsyncIterator[SourceEvent]:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        raise ValueError("connection lost") from None
    yield Append(A)


async def swallows_and_waits(query: str) -> AsyncIterator[SourceEvent]:
    try:
        await asyncio.sleep(3600)
    except asyncio.CancelledError:
        await asyncio.sleep(3600)
    yield Append(A)


class Warming(ScriptedBackend):
    """Reads its prompts in a task of its own, as the backends of real engines do."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async def prefill(token_ids: tuple[int, ...]) -> None:
            self.prompts.append([])

        async def answer(token_ids: tuple[int, ...]) -> AsyncGenerator[AnswerChunk, None]:
            yield AnswerChunk("ok", (1,), "stop")

        self.num_requests += 1
        try:
            async with aclosing(warm_then_generate(prompts, prefill=prefill, generate=answer)) as events:
                async for event in events:
                    yield event
        finally:
            self.num_requests -= 1


SWALLOWERS = [swallows_and_yields, swallows_and_ends, makes_another_error, swallows_and_waits]


@pytest.mark.parametrize("stream", SWALLOWERS)
@pytest.mark.parametrize("on_source_error", ["raise", "answer"])
@pytest.mark.parametrize("kind", [ScriptedBackend, Warming])
async def test_a_deadline_holds_whatever_a_source_does_with_a_cancellation(
    stream: Callable[[str], Any],
    on_source_error: Literal["raise", "answer"],
    kind: type[ScriptedBackend],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(tasks_module, "CANCEL_AGAIN_S", 0.05)
    backend = kind(is_endless=True)
    async with Pipeline(Odd(stream), backend, on_source_error=on_source_error) as pipeline:
        with anyio.fail_after(120):
            with pytest.raises(DeadlineExceededError, match=r"deadline of 0.5 s passed while retrieving"):
                _ = [chunk async for chunk in pipeline.stream("Why?", deadline_s=0.5)]
        assert (backend.num_requests, pipeline.num_queries) == (0, 0)


@pytest.mark.parametrize("stream", SWALLOWERS)
@pytest.mark.parametrize("how", ["leaving the block", "closing the pipeline"])
@pytest.mark.parametrize("kind", [ScriptedBackend, Warming])
async def test_closing_returns_whatever_a_source_does_with_a_cancellation(
    stream: Callable[[str], Any], how: str, kind: type[ScriptedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks_module, "CANCEL_AGAIN_S", 0.05)
    source, backend = Odd(stream), kind()
    pipeline = Pipeline(source, backend)
    with anyio.fail_after(120):
        await pipeline.start()
        async with pipeline.events("Why?") as events:
            await anext(events)
            await wait_until(lambda: source.is_asked)  # and, in the same step, waits
            if how == "closing the pipeline":
                await pipeline.aclose()
                assert not backend.is_started
                with pytest.raises(PipelineClosedError):
                    _ = [event async for event in events]
        assert (backend.num_requests, pipeline.num_queries) == (0, 0)
        await pipeline.aclose()


async def test_a_source_that_never_lets_go_is_left_behind_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "CANCEL_AGAIN_S", 0.05)
    monkeypatch.setattr(tasks_module, "LET_GO_S", 0.2)
    lets_go, reached, left = anyio.Event(), anyio.Event(), anyio.Event()

    async def never_lets_go(query: str) -> AsyncIterator[SourceEvent]:
        while not lets_go.is_set():
            try:
                reached.set()
                await lets_go.wait()
            except BaseException:
                pass
        left.set()
        yield Append(A)

    backend = ScriptedBackend()
    pipeline = Pipeline(Odd(never_lets_go), backend)
    with anyio.fail_after(120):
        async with pipeline.stream("Why?"):
            await reached.wait()
            with pytest.warns(ResourceWarning, match=r"stopped while retrieving has not ended .* Odd or ScriptedB"):
                await pipeline.aclose()
        assert not backend.is_started
        lets_go.set()
        await left.wait()
        await wait_until(lambda: backend.num_requests == 0)


@pytest.mark.parametrize("library", ["asyncio", "anyio"])
async def test_a_sources_own_timeouts_are_its_own(library: str) -> None:
    """They cancel the query's task for a moment."""

    async def times_out(query: str) -> AsyncIterator[SourceEvent]:
        for _ in range(2):
            try:
                if library == "asyncio":
                    async with asyncio.timeout(0.01):
                        await asyncio.sleep(3600)
                else:
                    with anyio.fail_after(0.01):
                        await anyio.sleep(3600)
            except TimeoutError:
                yield Append(A)

    assert await ask(Odd(times_out)) == "ok"


async def wait_until(is_so: Callable[[], bool]) -> None:
    while not is_so():
        await anyio.lowlevel.checkpoint()


class ClosableOnly:
    """An async iterator that is no generator: it can be closed, and that is all."""

    def __init__(self, items: AsyncIterator[object]) -> None:
        self._items = items
        self.is_closed = False

    def __aiter__(self) -> "ClosableOnly":
        return self

    async def __anext__(self) -> object:
        return await anext(self._items)

    async def aclose(self) -> None:
        self.is_closed = True


async def test_an_iterator_that_is_no_generator_is_closed_too() -> None:
    async def one(query: str) -> AsyncIterator[SourceEvent]:
        yield Append(A)

    events = ClosableOnly(one("Why?"))
    async with closing(events) as pulled:
        assert await anext(pulled) == Append(A)
    assert events.is_closed


class SlowTokenizer(CodePointTokenizer):
    """Holds its thread until it is let go."""

    def __init__(self) -> None:
        self.has_begun, self.lets_go = threading.Event(), threading.Event()
        self.num_inside = self.most_inside = 0

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        self.num_inside += 1
        self.most_inside = max(self.most_inside, self.num_inside)
        if "slow" in text:
            self.has_begun.set()
            assert self.lets_go.wait(20)
        self.num_inside -= 1
        return super().encode(text, allow_special=allow_special)


async def test_a_query_that_is_stopped_does_not_leave_its_thread_in_the_tokenizer() -> None:
    tokenizer = SlowTokenizer()
    backend = ScriptedBackend("ok")
    backend.model = ModelInfo("model", tokenizer, 100_000)
    source = ScriptedSource(lambda query: [Append(Chunk(query, "a.md"))])
    async with Pipeline(source, backend) as pipeline:
        stream = pipeline.stream("slow")
        async with stream:
            await asyncio.to_thread(tokenizer.has_begun.wait, 20)
            waiting = asyncio.create_task(stream.aclose())
            other = asyncio.create_task(_text(pipeline.stream("quick")))
            await asyncio.sleep(0)
            assert tokenizer.num_inside == 1
            tokenizer.lets_go.set()
            await waiting
            assert await other == "ok"
    assert tokenizer.most_inside == 1


async def test_a_retrieval_left_behind_holds_no_place_in_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks_module, "LET_GO_S", 0.05)
    lets_go, left = anyio.Event(), anyio.Event()

    async def holds_on_once(query: str) -> AsyncIterator[SourceEvent]:
        while query == "first" and not lets_go.is_set():
            with suppress(asyncio.CancelledError):
                await lets_go.wait()
        if query == "first":
            left.set()
        yield Append(A)

    with anyio.fail_after(120):
        async with Pipeline(Odd(holds_on_once), ScriptedBackend("ok"), max_concurrent_queries=1) as pipeline:
            with (
                pytest.warns(ResourceWarning, match="is left behind"),
                pytest.raises(DeadlineExceededError),
            ):
                await _text(pipeline.stream("first", deadline_s=0.05))
            assert await _text(pipeline.stream("second")) == "ok"
            lets_go.set()
            await left.wait()


async def _text(stream: AnswerStream) -> str:
    return "".join([chunk.text async for chunk in stream])


async def ends_its_time_with_an_event(query: str) -> AsyncIterator[SourceEvent]:
    with anyio.move_on_after(0.05):
        try:
            yield Append(A)
            await anyio.sleep(3600)
        except asyncio.CancelledError:
            yield CutShort("its time was over")
            raise


async def test_a_source_may_yield_while_it_handles_its_own_time_limit() -> None:
    async with Pipeline(Odd(ends_its_time_with_an_event), ScriptedBackend("ok")) as pipeline:
        async with pipeline.stream("Why?") as stream:
            assert "".join([chunk.text async for chunk in stream]) == "ok"
    assert (stream.result.cut_short, stream.result.source_error) == ("its time was over", None)


class Falsy(Append):
    def __bool__(self) -> bool:
        return False


class WithPlainClose:
    """An iterator whose `aclose` is no coroutine."""

    def __init__(self) -> None:
        self._events: list[SourceEvent] = [Falsy(A), Append(Chunk("beta", "b.md"))]

    def __aiter__(self) -> "WithPlainClose":
        return self

    async def __anext__(self) -> SourceEvent:
        if not self._events:
            raise StopAsyncIteration
        return self._events.pop(0)

    def aclose(self) -> None:
        pass


async def test_an_event_may_be_falsy_and_an_iterator_close_at_once() -> None:
    async with Pipeline(Odd(lambda query: WithPlainClose()), ScriptedBackend("ok")) as pipeline:
        async with pipeline.stream("Why?") as stream:
            _ = [chunk async for chunk in stream]
    assert [citation.text for citation in stream.result.citations] == ["alpha", "beta"]


async def test_numbers_of_numpy_are_recorded(tmp_path: Any) -> None:
    chunk = Chunk("alpha", "a.md", "A", numpy.int64(5), numpy.float32(0.5))  # type: ignore[arg-type]
    hint = Hint(numpy.int64(3), numpy.float64(2.5))  # type: ignore[arg-type]
    source = ScriptedSource([Append(chunk, hint), Update((chunk,))])
    async with Pipeline(source, ScriptedBackend(), recorder=TraceRecorder(tmp_path / "trace.jsonl")) as pipeline:
        for _ in range(2):
            _ = [chunk async for chunk in pipeline.stream("Why?")]
    trace = read_trace(tmp_path / "trace.jsonl")
    assert [len(query.events) for query in trace.queries] == [2, 2]


class LeavesItsPull(ScriptedBackend):
    """Pulls in a task that it leaves running, and fails."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async def pull() -> None:
            with suppress(BaseException):
                async for _ in prompts:
                    pass

        self.task = asyncio.create_task(pull())
        await asyncio.sleep(0.01)
        yield AnswerChunk("x", (1,), "stop")


async def test_a_backend_that_leaves_its_pull_running_does_not_keep_the_source() -> None:
    source = ScriptedSource([Append(A), 3600.0])
    backend = LeavesItsPull()
    async with Pipeline(source, backend) as pipeline:
        with pytest.raises(BackendError, match="LeavesItsPull failed: it left a task that pulls prompts running"):
            _ = [chunk async for chunk in pipeline.stream("Why?")]
        assert source.num_streams == 0
    await asyncio.wait_for(backend.task, 120)


class TakesNoPrompt(ScriptedBackend):
    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        yield AnswerChunk("x", (1,), "stop")


class YieldsText(ScriptedBackend):
    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        yield "x"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("backend", "message"),
    [
        (TakesNoPrompt(), "before it had the complete prompt"),
        (YieldsText(), "it yielded a str, and not an Answer"),
    ],
)
async def test_a_backend_that_does_what_it_must_not_is_named(backend: ScriptedBackend, message: str) -> None:
    async with Pipeline(ScriptedSource([Append(A)]), backend) as pipeline:
        with pytest.raises(BackendError, match=f"{type(backend).__name__} .*{message}"):
            _ = [chunk async for chunk in pipeline.stream("Why?")]


class OneAtATime(CodePointTokenizer):
    num_calls = most_calls = 0

    def encode(self, text: str, *, allow_special: bool = False) -> list[int]:
        self.num_calls += 1
        self.most_calls = max(self.most_calls, self.num_calls)
        threading.Event().wait(0.002)
        self.num_calls -= 1
        return super().encode(text, allow_special=allow_special)


async def test_a_tokenizer_has_one_call_at_a_time_whichever_pipelines_share_it() -> None:
    backend = ScriptedBackend("ok")
    tokenizer = OneAtATime()
    backend.model = replace(backend.model, tokenizer=tokenizer)
    async with Pipeline(ScriptedSource([Append(A)]), backend) as first:
        async with Pipeline(ScriptedSource([Append(A)]), backend, owns_backend=False) as second:
            streams = [pipeline.stream("Why?") for pipeline in (first, second) * 3]
            await asyncio.gather(*(collect(stream) for stream in streams))
    assert tokenizer.most_calls == 1


async def collect(stream: AnswerStream) -> None:
    async for _ in stream:
        pass


async def test_a_query_that_came_before_the_pipeline_was_closed_is_drained() -> None:
    pipeline = Pipeline(ScriptedSource([Append(A)]), ScriptedBackend("ok"))
    asked = asyncio.create_task(collect(stream := pipeline.stream("Why?")))
    await asyncio.sleep(0)
    await pipeline.aclose(drain_s=10)
    await asked
    assert stream.result.text == "ok"


def test_a_loop_that_ends_while_a_source_is_read_has_nothing_to_report() -> None:
    reported: list[dict[str, Any]] = []
    left_open: list[object] = []

    async def leave() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: reported.append(context))
        events = Retrieval(ScriptedSource([Append(A), Append(A)]), "Why?").events()
        left_open.append(events)
        assert await anext(events) == Append(A)

    asyncio.run(leave())
    assert reported == []
