"""Sessions whose engine, source, tokenizer or owner misbehaves: they go on, or end with an error that says so."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from streamrag import (
    AnswerChunk,
    BackendError,
    BackendEvent,
    ConfigurationError,
    DeadlineExceededError,
    ModelInfo,
    Pipeline,
    PipelineClosedError,
    Prefilled,
    Prompt,
    PromptTemplate,
    SamplingParams,
    ServerError,
)
from streamrag.sessions import Session
from streamrag.sessions.concurrency import ConcurrencyEstimator
from streamrag.sessions.tasks import SessionTasks
from streamrag.testing import ScriptedSource
from tests.sessions.test_session import Engine, lines_of, settled


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.sessions.ingestion.RETRY_S", 0.01)
    monkeypatch.setattr("streamrag.sessions.watched_questions.RETRY_S", 0.01)


pytestmark = pytest.mark.usefixtures("soon")


class Failing(Engine):
    """Raises `error` while it is set: for partial prompts, or for complete ones."""

    def __init__(self, error: BaseException | None = None, *, is_asked: bool = False) -> None:
        super().__init__(answer="yes")
        self.error = error
        self._fails_questions = is_asked
        self.num_failed = 0

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async def seen() -> AsyncIterator[Prompt]:
            async for prompt in prompts:
                if self.error is not None and prompt.is_complete == self._fails_questions:
                    self.num_failed += 1
                    raise self.error
                yield prompt

        async for event in super().generate(seen(), params):
            yield event


class Stubborn(Engine):
    """Does not let go of what it was told to stop, until `lets_go` is set."""

    def __init__(self, *, is_asked: bool) -> None:
        super().__init__(answer="yes")
        self._holds_questions = is_asked
        self.lets_go = anyio.Event()

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        is_asked = False
        try:
            async for prompt in prompts:
                is_asked = prompt.is_complete
                yield Prefilled(len(prompt.token_ids))
                if is_asked:
                    break
            yield AnswerChunk("y", (ord("y"),), None if self._holds_questions else "stop")
            if self._holds_questions:
                await anyio.sleep_forever()
        finally:
            while is_asked == self._holds_questions and not self.lets_go.is_set():
                try:
                    await self.lets_go.wait()
                except asyncio.CancelledError:
                    continue


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(120):
        while not is_so():  # noqa: ASYNC110 - nobody says when
            await asyncio.sleep(0.001)


@pytest.mark.parametrize("error", [RuntimeError("boom"), asyncio.CancelledError(), BackendError("x")], ids=repr)
async def test_a_stream_that_fails_in_whatever_way_is_opened_again(error: BaseException) -> None:
    engine = Failing(error)
    async with Session(engine) as session:
        await until(lambda: engine.num_failed > 2)  # also while no data come
        engine.error = None
        await session.append("one")
        await settled(session)
        await until(lambda: engine.num_requests == 1)
    assert lines_of(engine.asked[-1]) == ["one"]


async def test_computing_a_version_again_is_no_new_version(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[float] = []
    monkeypatch.setattr(ConcurrencyEstimator, "observe_version", lambda self, at_s: times.append(at_s))
    engine = Failing(BackendError("x"))
    async with Session(engine) as session:
        await session.append("one")
        await settled(session)
        await until(lambda: engine.num_failed > 5)
        await settled(session)
        assert len(engine.asked) == 1  # the second answer is the first one's
        assert len(times) == 2  # without data, and with them


async def test_a_tokenizer_that_is_away_is_waited_for() -> None:
    engine = Engine(answer="yes")
    encode, is_away = engine.model.tokenizer.encode, False

    def encoded(text: str, **options: Any) -> list[int]:
        if is_away:
            raise ServerError("away")
        return encode(text, **options)

    engine.model.tokenizer.encode = encoded  # type: ignore[method-assign]
    async with Session(engine) as session:
        is_away = True
        await session.append("one")
        await until(lambda: session.state.num_failures > 1)
        is_away = False
        await settled(session)
    assert lines_of(engine.asked[-1]) == ["one"]


async def test_a_session_that_has_failed_raises_its_error_in_every_call() -> None:
    engine = Engine(answer="yes")
    encode = engine.model.tokenizer.encode

    def encoded(text: str, **options: Any) -> list[int]:
        if "bad" in text:
            raise RuntimeError("a bug")
        return encode(text, **options)

    engine.model.tokenizer.encode = encoded  # type: ignore[method-assign]
    async with Session(engine) as session:
        watch = session.watch("Any?")
        await anext(watch)
        await session.append("bad")
        async with asyncio.timeout(120):
            for waits in (anext(watch), watch.at_least(1), anext(session.ask("Which?")), session.append("x")):
                with pytest.raises(BackendError, match="a bug"):
                    await waits


async def test_a_model_that_is_gone_for_a_while_ends_nothing() -> None:
    class Restarting(Engine):
        has_model = True

        @property
        def model(self) -> ModelInfo:  # type: ignore[override]
            if not self.has_model:
                raise BackendError("not started")
            return self._model

        @model.setter
        def model(self, model: ModelInfo) -> None:
            self._model = model

    engine = Restarting(answer="yes")
    async with Session(engine) as session:
        await settled(session)
        engine.has_model = False
        await session.append("one")
        await until(lambda: session.state.version == 1)
        engine.has_model = True
        await settled(session)
    assert lines_of(engine.asked[-1]) == ["one"]


@pytest.mark.parametrize("is_asked", [True, False])
async def test_an_engine_that_does_not_let_go_is_left_behind(is_asked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.support.tasks.LET_GO_S", 0.05)
    monkeypatch.setattr("streamrag.support.tasks.CANCEL_AGAIN_S", 0.01)
    engine = Stubborn(is_asked=is_asked)
    session = Session(engine, window_tokens=20)
    await session.start()
    async with asyncio.timeout(120):
        with pytest.warns(ResourceWarning, match="left behind"):
            stream = session.ask("Which?")
            await anext(stream)
            await stream.aclose()
            if not is_asked:
                for i in range(3):  # slides: each lane is left behind, and the next stands
                    async with session.ask("Which?", at_least=await session.append(f"{i}" * 15)) as answer:
                        assert (await anext(answer)).text == "y"
            await session.aclose()
    engine.lets_go.set()
    await anyio.wait_all_tasks_blocked()


async def test_an_engines_own_timeout_is_no_deadline() -> None:
    async with Session(Failing(TimeoutError("mine"), is_asked=True)) as session:
        with pytest.raises(TimeoutError, match="mine") as raised:
            await anext(session.ask("Which?"))
        assert not isinstance(raised.value, DeadlineExceededError)


async def test_an_engine_that_reads_no_prompts_is_given_the_newest_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.sessions.ingestion.SETTLE_S", 0.001)
    monkeypatch.setattr("streamrag.sessions.ingestion.SETTLE_TOKEN_S", 0.0)
    engine = Engine(answer="yes", hold=(hold := anyio.Event()))
    async with Session(engine) as session:
        for i in range(5):
            await session.append(f"line {i}")
            await until(lambda: session.state.num_appended == session.state.version)
        hold.set()
        await settled(session)
        first, newest = engine.prompts[0]
        assert newest.num_shared == len(first.token_ids) < len(newest.token_ids) == session.state.num_tokens


async def test_a_session_is_started_once_and_not_after_its_end() -> None:
    engine = Engine(answer="yes")
    session = Session(engine)
    starts = asyncio.create_task(session.start())
    await asyncio.sleep(0)
    await session.aclose()
    with pytest.raises(PipelineClosedError):
        await starts
    with pytest.raises(PipelineClosedError):
        await session.start()
    async with Session(engine) as other:
        with pytest.raises(ConfigurationError, match="before"):
            await other.start()
    assert engine.num_requests == 0


async def test_a_closed_pipeline_opens_no_session() -> None:
    async with Pipeline(ScriptedSource([]), Engine(answer="yes")) as pipeline:
        pass
    with pytest.raises(PipelineClosedError):
        pipeline.session()


async def test_closing_that_is_cancelled_leaves_nothing() -> None:
    for num_steps in range(1, 30):
        engine = Engine(answer="yes", is_endless=True)
        before = asyncio.all_tasks()
        session = Session(engine)
        await session.start()
        watch = session.watch("Any?")
        waits = [asyncio.ensure_future(watch.at_least(9)), asyncio.ensure_future(session.append("one"))]
        stream = session.ask("Which?")
        waits.append(asyncio.ensure_future(anext(stream)))
        waits.append(asyncio.ensure_future(session.follow(ScriptedSource([anyio.Event()]))))
        await anyio.wait_all_tasks_blocked()
        closes = asyncio.create_task(session.aclose())
        for _ in range(num_steps):
            await asyncio.sleep(0)
        closes.cancel()
        await asyncio.wait([closes, *waits], timeout=120)
        await anyio.wait_all_tasks_blocked()
        assert engine.num_requests == 0
        assert asyncio.all_tasks() == before
        assert isinstance(waits[0].exception(), PipelineClosedError)
        assert isinstance(waits[-1].exception(), PipelineClosedError)


async def test_a_cancellation_while_tasks_are_closed_is_not_lost() -> None:
    tasks = SessionTasks("session")
    work = tasks.start(anyio.sleep_forever, "question")
    closes = asyncio.create_task(tasks.aclose())
    await asyncio.sleep(0)
    closes.cancel()
    await asyncio.wait([closes], timeout=120)
    assert closes.cancelled()
    assert isinstance(work.exception(), PipelineClosedError)


async def test_a_question_that_had_no_turn_before_the_end_is_told_of_the_end() -> None:
    async with Session(Engine(answer="yes")) as session:
        stream = session.ask("Which?")
        waits = asyncio.ensure_future(anext(stream))
        closes = asyncio.create_task(session.aclose())
        with pytest.raises(PipelineClosedError):
            await waits
        await closes


async def test_texts_without_tokens_take_no_room() -> None:
    engine = Engine(answer="yes")
    async with Session(engine, template=PromptTemplate(passage="{text}"), window_tokens=10) as session:
        for _ in range(3):
            await session.append("")
            await settled(session)
        assert len(session._data.ingestion.window) == 0
        assert session.state.version == 3


async def test_answers_to_versions_that_have_gone_are_not_kept() -> None:
    async with Session(Engine(answer="yes")) as session:
        for i in range(3):
            await session.append(f"line {i}")
            await settled(session)
        assert len(session._questions.cache) == 1


async def test_answers_are_shared_only_where_the_parameters_are_the_same() -> None:
    class Large:
        def __repr__(self) -> str:
            return "[0, 1, ...]"

    engine = Engine(answer="yes")
    async with Session(engine) as session:
        for i in range(2):
            params = SamplingParams(extra={"allowed": Large()})
            _ = [chunk async for chunk in session.ask("Which?", params=params)]
            assert len(engine.asked) == i + 1
