"""Sessions that are given what cannot work, or what is seldom given: data, options, questions, sources."""

from typing import Any

import pytest

from streamrag import (
    Append,
    Chunk,
    ConfigurationError,
    PromptTooLongError,
    SourceError,
    Update,
)
from streamrag.sessions import Session
from streamrag.testing import ScriptedSource
from tests.sessions.test_session import Engine, lines_of, settled


@pytest.mark.parametrize("chunk", [Chunk(None, ""), Chunk("x", 5), Chunk("x", "", "", -1), 7, None], ids=repr)
async def test_data_that_are_no_chunk_are_refused_and_the_session_goes_on(chunk: Any) -> None:
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


async def test_an_error_of_a_source_is_a_failed_retrieval_and_earlier_data_stay() -> None:
    async with Session(Engine(answer="yes")) as session:
        for error in (RuntimeError("boom"), SourceError("boom")):
            with pytest.raises(SourceError, match="boom"):
                await session.follow(ScriptedSource([Append(Chunk("one", "")), error]))
        assert session.state.num_appended == 2
