"""Watched questions whose engine, reader or owner misbehaves."""

import asyncio
from collections.abc import AsyncIterator, Callable

import anyio
import pytest

from streamrag import (
    AnswerChunk,
    BackendError,
    BackendEvent,
    ConfigurationError,
    Prefilled,
    Prompt,
    PromptTooLongError,
    SamplingParams,
    TooManyQueriesError,
)
from streamrag.sessions import Session
from streamrag.sessions.question_options import Question
from streamrag.testing import ScriptedBackend
from tests.sessions.test_faults import Failing, soon, until
from tests.sessions.test_session import Engine

pytestmark = pytest.mark.usefixtures("soon")
__all__ = ["soon"]


class Vocabulary(ScriptedBackend):
    """Answers with the first token that is allowed, or with a question mark."""

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async for prompt in prompts:
            if prompt.is_complete:
                self.prompts.append([prompt])
            yield Prefilled(len(prompt.token_ids))
        token_id = params.extra.get("allowed_token_ids", [ord("?")])[0]
        yield AnswerChunk(chr(token_id), (token_id,), "stop")


async def test_a_restricted_answer_is_reused_only_for_its_own_choices() -> None:
    async with Session(Vocabulary()) as session:
        one = session.watch("Which?", answers=("yes", "no"))
        two = session.watch("Which?", answers=("high", "low"))
        assert (await anext(one)).text == "no"
        assert (await anext(two)).text == "high"
        assert [chunk.text async for chunk in session.ask("Which?")] == ["?"]
        num_asked = len(session._data._backend.prompts)
        for answers, expected in ((("yes", "no"), "no"), (("no", "yes"), "no"), (("high", "low"), "high")):
            for params in (None, SamplingParams(max_tokens=5, temperature=0.7)):  # which make no difference
                stream = session.ask("Which?", answers=answers, params=params)
                assert [chunk.text async for chunk in stream] == [expected]
        assert len(session._data._backend.prompts) == num_asked, "kept answers take no engine"
        assert [chunk.text async for chunk in session.ask("Which?", answers=("a", "b"))] == ["a"]


@pytest.mark.parametrize("answer", [AnswerChunk("", (), "stop"), AnswerChunk("?", (63,), "stop")])
async def test_an_engine_that_gives_none_of_the_answers_is_asked_again(answer: AnswerChunk) -> None:
    class Other(ScriptedBackend):
        async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
            async for prompt in prompts:
                yield Prefilled(len(prompt.token_ids))
            yield answer

    async with Session(Other()) as session:
        one, two = session.watch("Which?", answers=("yes", "no")), session.watch("Who?")
        async with asyncio.timeout(120):
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
        async with asyncio.timeout(120):
            assert (await anext(watch)).text == "yes"


async def test_a_watched_question_that_is_too_long_is_told_of() -> None:
    async with Session(Engine(answer="yes", max_model_len=400), window_tokens=50) as session:
        watch = session.watch("?" * 500)
        async with asyncio.timeout(120):
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
        async with asyncio.timeout(120):
            await other.at_least(0)
        assert engine.num_requests == 1


async def test_options_of_watches_are_checked() -> None:
    async with Session(Engine(answer="yes")) as session:
        for options in ({"answers": None}, {"answers": 5}, {"params": 5}):
            with pytest.raises(ConfigurationError, match=next(iter(options))):
                session.watch("Any?", **options)
            with pytest.raises(ConfigurationError, match=next(iter(options))):
                session.ask("Any?", **options)
        with pytest.raises(ConfigurationError, match="same token"):
            await anext(session.ask("Any?", answers=("yes", "yesterday")))
        with pytest.raises(ConfigurationError, match="params"):
            session.ask("Any?", params={"max_tokens": 5})


class Room:
    """Room for so many answers at once."""

    def __init__(self, num_free: int) -> None:
        self.num_free = num_free
        self.num_refused = 0

    def admit(self, question: Question) -> Callable[[], None]:
        if not self.num_free:
            self.num_refused += 1
            raise TooManyQueriesError("full")
        self.num_free -= 1
        return self.leave

    def leave(self) -> None:
        self.num_free += 1


async def test_watches_wait_while_there_is_no_room_and_give_back_what_they_had() -> None:
    engine, room = Engine(answer="yes"), Room(0)
    async with Session(engine, admit=room.admit) as session:
        watches = [session.watch(f"Any of {number}?") for number in range(3)]
        await until(lambda: room.num_refused > 3)
        assert not engine.asked
        room.num_free = 1
        async with asyncio.timeout(120):
            for watch in watches:
                await watch.at_least(0)
        await until(lambda: room.num_free == 1)
    assert all(watch.error is None for watch in watches)


async def test_a_watch_that_is_closed_before_or_while_it_is_answered_gives_back_its_room() -> None:
    engine, room = Engine(answer="yes", is_endless=True), Room(1)
    async with Session(engine, admit=room.admit) as session:
        watch = session.watch("Any?")
        await until(lambda: len(engine.asked) == 1)
        assert room.num_free == 0
        await watch.aclose()
        await until(lambda: room.num_free == 1)
        watch = session.watch("Another?")
        session._watches._start_due()
        assert room.num_free == 0
        await watch.aclose()  # in the same turn of the event loop: its work is cancelled before it has begun
        await until(lambda: room.num_free == 1)
        session.watch("A third?")
        await until(lambda: room.num_free == 0)
    assert room.num_free == 1
