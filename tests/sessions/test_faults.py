"""Sessions whose engine, source, tokenizer or owner misbehaves: they go on, or end with an error that says so."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import pytest

from streamrag import (
    AnswerChunk,
    Append,
    BackendError,
    BackendEvent,
    Chunk,
    ConfigurationError,
    DeadlineExceededError,
    ModelInfo,
    Pipeline,
    PipelineClosedError,
    Prefilled,
    Prompt,
    PromptTemplate,
    PromptTooLongError,
    SamplingParams,
    ServerError,
    SourceError,
    Update,
)
from streamrag.sessions import Session
from streamrag.testing import ScriptedBackend, ScriptedSource
from tests.sessions.test_session import Engine, lines_of, settled


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("streamrag.sessions.ingestion.RETRY_S", 0.01)
    monkeypatch.setattr("streamrag.sessions.watching.RETRY_S", 0.01, raising=False)


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
    async with asyncio.timeout(20):
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


async def test_a_session_that_has_failed_says_so_to_everybody() -> None:
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
        async with asyncio.timeout(20):
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
    monkeypatch.setattr("streamrag.tasks.LET_GO_S", 0.05)
    monkeypatch.setattr("streamrag.tasks.CANCEL_AGAIN_S", 0.01)
    engine = Stubborn(is_asked=is_asked)
    session = Session(engine, window_tokens=20)
    await session.start()
    async with asyncio.timeout(20):
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
    monkeypatch.setattr("streamrag.sessions.lane.SETTLE_S", 0.001)
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
        await asyncio.wait([closes, *waits], timeout=20)
        await anyio.wait_all_tasks_blocked()
        assert engine.num_requests == 0
        assert asyncio.all_tasks() == before
        assert isinstance(waits[0].exception(), PipelineClosedError)
        assert isinstance(waits[-1].exception(), PipelineClosedError)


async def test_a_question_that_had_no_turn_before_the_end_is_told_of_the_end() -> None:
    async with Session(Engine(answer="yes")) as session:
        stream = session.ask("Which?")
        waits = asyncio.ensure_future(anext(stream))
        closes = asyncio.create_task(session.aclose())
        with pytest.raises(PipelineClosedError):
            await waits
        await closes


@pytest.mark.parametrize("chunk", [Chunk(None, ""), Chunk("x", 5), Chunk("x", "", "", -1), 7, None], ids=repr)
async def test_what_is_no_chunk_is_refused_and_the_session_goes_on(chunk: Any) -> None:
    engine = Engine(answer="yes")
    async with Session(engine) as session:
        with pytest.raises(ConfigurationError):
            await session.append(chunk)
        assert await session.append("one") == 1
        await settled(session)
    assert lines_of(engine.asked[-1]) == ["one"]


@pytest.mark.parametrize(
    "options", [{"max_waiting_characters": 0}, {"max_waiting": None}, {"system": 5}, {"template": "x"}], ids=repr
)
def test_options_of_another_kind_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Session(Engine(answer="x"), **options)


async def test_a_question_that_does_not_fit_beside_the_data_is_refused() -> None:
    engine = Engine(answer="yes", max_model_len=600)
    async with Session(engine, window_tokens=400) as session:
        await session.append("x" * 190)
        await session.append("x" * 190)
        with pytest.raises(PromptTooLongError, match="window_tokens"):
            await anext(session.ask("?" * 150, at_least=2))
        await settled(session)
    assert max(map(len, engine.asked)) < 600


async def test_a_log_may_say_the_same_thing_twice() -> None:
    engine = Engine(answer="yes")
    tick = Append(Chunk("tick", ""))
    async with Session(engine) as session:
        assert await session.follow(ScriptedSource([tick, tick])) == 2
        await settled(session)
    assert lines_of(engine.asked[-1]) == ["tick", "tick"]


async def test_an_update_of_any_length_is_not_appended_again() -> None:
    chunks = tuple(Chunk(str(i), "") for i in range(5000))
    async with Session(Engine(answer="yes")) as session:
        assert await session.follow(ScriptedSource([Update(chunks), Update(chunks)])) == 5000


async def test_whatever_a_source_raises_is_a_failed_retrieval_and_what_came_before_stays() -> None:
    async with Session(Engine(answer="yes")) as session:
        for error in (RuntimeError("boom"), SourceError("boom")):
            with pytest.raises(SourceError, match="boom"):
                await session.follow(ScriptedSource([Append(Chunk("one", "")), error]))
        assert session.state.num_appended == 2


async def test_texts_without_tokens_take_no_room() -> None:
    engine = Engine(answer="yes")
    async with Session(engine, template=PromptTemplate(passage="{text}"), window_tokens=10) as session:
        for _ in range(3):
            await session.append("")
            await settled(session)
        assert len(session._ingestion.window) == 0
        assert session.state.version == 3


async def test_answers_to_versions_that_have_gone_are_not_kept() -> None:
    async with Session(Engine(answer="yes")) as session:
        for i in range(3):
            await session.append(f"line {i}")
            await settled(session)
        assert len(session._answers) == 1


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


class Vocabulary(ScriptedBackend):
    """Answers with the first token that is allowed, or with a question mark."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for prompt in prompts:
            yield Prefilled(len(prompt.token_ids))
        token_id = params.extra.get("allowed_token_ids", [ord("?")])[0]
        yield AnswerChunk(chr(token_id), (token_id,), "stop")


async def test_a_restricted_answer_is_nobody_elses() -> None:
    async with Session(Vocabulary()) as session:
        one = session.watch("Which?", answers=("yes", "no"))
        two = session.watch("Which?", answers=("high", "low"))
        assert (await anext(one)).text == "no"
        assert (await anext(two)).text == "high"
        assert [chunk.text async for chunk in session.ask("Which?", params=SamplingParams())] == ["?"]
        assert [chunk.text async for chunk in session.ask("Which?")] == ["no"]


@pytest.mark.parametrize("answer", [AnswerChunk("", (), "stop"), AnswerChunk("?", (63,), "stop")])
async def test_an_engine_that_gives_none_of_the_answers_is_asked_again(answer: AnswerChunk) -> None:
    class Other(ScriptedBackend):
        async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
            async for prompt in prompts:
                yield Prefilled(len(prompt.token_ids))
            yield answer

    async with Session(Other()) as session:
        one, two = session.watch("Which?", answers=("yes", "no")), session.watch("Who?")
        async with asyncio.timeout(20):
            await two.at_least(0)
        await until(lambda: isinstance(one.error, BackendError))
        assert one.newest is None


async def test_a_watch_outlives_whatever_the_engine_raises() -> None:
    engine = Failing(RuntimeError("boom"), is_asked=True)
    async with Session(engine) as session:
        watch = session.watch("Any?")
        await until(lambda: engine.num_failed > 1)
        assert isinstance(watch.error, BackendError)
        engine.error = None
        async with asyncio.timeout(20):
            assert (await anext(watch)).text == "yes"


async def test_a_watched_question_that_is_too_long_is_told_of() -> None:
    async with Session(Engine(answer="yes", max_model_len=400), window_tokens=50) as session:
        watch = session.watch("?" * 500)
        async with asyncio.timeout(20):
            with pytest.raises(PromptTooLongError):
                await anext(watch)
            with pytest.raises(PromptTooLongError):
                await watch.at_least(0)


async def test_a_reader_is_not_told_again_what_it_read_last() -> None:
    engine = Engine(answer="yes")
    async with Session(engine) as session:
        watch = session.watch("Any?")
        assert (await anext(watch)).text == "yes"
        for answer in ("no", "yes"):
            engine._answer = answer
            await watch.at_least(await session.append(answer))
        engine._answer = "other"
        await session.append("other")
        assert (await anext(watch)).text == "other"


async def test_a_reader_gets_the_newest_answer_also_where_it_did_not_change() -> None:
    async with Session(Engine(answer="yes")) as session:
        watch = session.watch("Any?")
        await watch.at_least(await session.append("one"))
        await watch.at_least(await session.append("two"))
        assert (await anext(watch)).version == 2


async def test_a_watch_that_is_closed_frees_its_question_for_the_others() -> None:
    class Slow(Engine):
        async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
            async for event in super().generate(prompts, params):
                if isinstance(event, AnswerChunk) and "slow?" in self.asked[-1]:
                    await anyio.sleep_forever()
                yield event

    engine = Slow(answer="yes")
    async with Session(engine) as session:
        slow, other = session.watch("slow?"), session.watch("other?")
        await until(lambda: any("slow?" in prompt for prompt in engine.asked))
        await slow.aclose()
        async with asyncio.timeout(20):
            await other.at_least(0)
        assert engine.num_requests == 1


async def test_options_of_watches_are_checked() -> None:
    async with Session(Engine(answer="yes")) as session:
        for options in ({"answers": None}, {"answers": 5}, {"params": 5}):
            with pytest.raises(ConfigurationError, match=next(iter(options))):
                session.watch("Any?", **options)
        with pytest.raises(ConfigurationError, match="params"):
            session.ask("Any?", params={"max_tokens": 5})
