"""Questions that are kept answered."""

import asyncio
from dataclasses import replace
from typing import Any

import anyio
import pytest

from streamrag import AnswerChunk, ConfigurationError, Pipeline, PipelineClosedError, SamplingParams
from streamrag.sessions.answer import MAX_URGENT_TOKENS
from streamrag.testing import ScriptedBackend, ScriptedSource
from tests.sessions.test_session import Engine, settled


async def test_the_answer_of_a_watch_is_reused_by_a_later_question() -> None:
    engine = Engine(answer="yes")
    async with Pipeline(ScriptedSource([]), engine) as pipeline, pipeline.session() as session:
        watch = session.watch("Any?")
        await session.append("one")
        assert (await watch.at_least(1)).version == 1
        num_asked = len(engine.asked)
        stream = session.ask("Any?", params=SamplingParams(max_tokens=64))
        assert "".join([chunk.text async for chunk in stream]) == "yes"
        assert stream.result.version == 1
        assert len(engine.asked) == num_asked


async def test_an_answer_that_did_not_change_is_not_told_again() -> None:
    engine = Engine(answer="yes")
    async with Pipeline(ScriptedSource([]), engine) as pipeline, pipeline.session() as session:
        watch = session.watch("Any?")
        first = await anext(watch)
        assert first.text == "yes"
        for i in range(3):
            await session.append(f"line {i}")
            await settled(session)
        await watch.at_least(3)
        assert watch.num_answered >= 2
        engine._answer = "no"
        await session.append("other")
        second = await anext(watch)
        assert (second.text, second.version) == ("no", 4)


async def test_a_watched_question_is_asked_with_its_last_answer_as_a_draft() -> None:
    engine = Engine(answer="yes")
    async with Pipeline(ScriptedSource([]), engine) as pipeline, pipeline.session() as session:
        watch = session.watch("Any?")
        await anext(watch)
        for number in range(1, 4):
            await session.append(f"line {number}")
            await watch.at_least(number)
    asked = [prompts[-1] for prompts in engine.prompts if prompts and prompts[-1].is_complete]
    assert [prompt.draft for prompt in asked] == [(), *[tuple(map(ord, "yes"))] * 3]


async def test_the_higher_priority_is_answered_first_and_none_starves() -> None:
    engine = Engine(answer="yes")
    async with Pipeline(ScriptedSource([]), engine) as pipeline, pipeline.session() as session:
        await settled(session)
        low = [session.watch(f"low {i}?") for i in range(3)]
        high = session.watch("high?", priority=1)
        for i in range(20):
            await session.append(f"line {i}")
            await settled(session)
        for watch in (*low, high):
            await watch.at_least(20)
        assert all(watch.num_answered >= 1 for watch in low)


async def test_a_fast_vocabulary_takes_one_token() -> None:
    params: list[SamplingParams] = []

    class Yes(ScriptedBackend):
        def generate(self, prompts, given):
            params.append(given)
            return super().generate(prompts, given)

    async with Pipeline(ScriptedSource([]), Yes(answer="yes")) as pipeline, pipeline.session() as session:
        watch = session.watch("Any?", answers=("yes", "no"))
        answered = await anext(watch)
        assert answered.text == "yes"
        assert answered.answer.token_ids == (ord("y"),)
        assert params[-1].max_tokens == 1
        assert params[-1].extra["allowed_token_ids"] == sorted((ord("y"), ord("n")))


class Server(ScriptedBackend):
    """A model behind a server, which has no log-probabilities."""

    def __init__(self, *, is_exact: bool) -> None:
        super().__init__(answer="yes")
        self.model = replace(self.model, has_logprobs=False, is_exact=is_exact)


@pytest.mark.parametrize("options", [{"answers": ("yes", "no")}, {"with_margin": True}])
async def test_a_watch_says_at_once_that_a_server_has_no_log_probabilities(options: dict[str, Any]) -> None:
    async with Pipeline(ScriptedSource([]), Server(is_exact=False)) as pipeline, pipeline.session() as session:
        with pytest.raises(ConfigurationError, match=r"Server has no log-probabilities .* use VllmBackend"):
            session.watch("Any?", **options)
        assert (await anext(session.watch("Any?"))).text == "yes"
    async with Pipeline(ScriptedSource([]), Server(is_exact=True)) as pipeline, pipeline.session() as session:
        with pytest.warns(UserWarning, match="follow the tokens that it samples"):
            watch = session.watch("Any?", **options)
        assert (await anext(watch)).text == "yes"


async def test_answers_that_begin_alike_are_refused() -> None:
    async with Pipeline(ScriptedSource([]), Engine(answer="yes")) as pipeline, pipeline.session() as session:
        watch = session.watch("Any?", answers=("yes", "yesterday"))
        with pytest.raises(ConfigurationError, match="same token"):
            await anext(watch)
        with pytest.raises(ConfigurationError, match="same token"):
            await watch.at_least(0)
        for options in ({"answers": "yes"}, {"min_interval_s": -1}, {"priority": 0.5}):
            with pytest.raises(ConfigurationError):
                session.watch("Any?", **options)


async def test_a_watch_that_is_closed_ends_and_the_others_go_on() -> None:
    engine = Engine(answer="yes")
    async with Pipeline(ScriptedSource([]), engine) as pipeline, pipeline.session() as session:
        one, two = session.watch("one?"), session.watch("two?")
        await anext(one)
        waits = asyncio.ensure_future(anext(one))
        await anyio.wait_all_tasks_blocked()
        await one.aclose()
        with pytest.raises(StopAsyncIteration):
            await waits
        assert (await anext(two)).text == "yes"
    with pytest.raises(StopAsyncIteration):
        await anext(two)
    with pytest.raises(PipelineClosedError):
        await two.at_least(100)
    assert engine.num_requests == 0


async def test_the_engine_is_told_who_waits_for_each_request() -> None:
    seen: set[tuple[str, bool]] = set()
    classes_of_long: set[str] = set()

    class Told(Engine):
        async def generate(self, prompts, params):  # type: ignore[no-untyped-def]
            async def noted():  # type: ignore[no-untyped-def]
                async for prompt in prompts:
                    if len(prompt.token_ids) > MAX_URGENT_TOKENS:
                        classes_of_long.add(prompt.request_class)
                    else:
                        seen.add((prompt.request_class, prompt.is_complete))
                    yield prompt

            async for event in super().generate(noted(), params):
                yield event

    async with Pipeline(ScriptedSource([]), Told(answer="yes")) as pipeline, pipeline.session() as session:
        await session.append("one")
        watch = session.watch("Any?")
        await watch.at_least(1)
        await settled(session)
        for stream in (pipeline.stream("A query"), session.ask("Any?" * MAX_URGENT_TOKENS)):
            async with stream as answer:
                async for _ in answer:
                    pass
    assert seen - {("pool", False)} == {("stream", False), ("session", True), ("pool", True)}
    assert classes_of_long == {"pool"}, "a long question overtakes nobody"


class Counting(Engine):
    """Knows how many questions were open at once, and in which order they came. None is answered while it is held."""

    def __init__(self) -> None:
        super().__init__(answer="yes")
        self.num_open = self.most_open = 0
        self.holds_questions = False
        self.lets_go = anyio.Event()

    async def generate(self, prompts, params):  # type: ignore[no-untyped-def]
        num_before = len(self.asked)
        is_counted = False
        try:
            async for event in super().generate(prompts, params):
                if len(self.asked) > num_before and not is_counted and isinstance(event, AnswerChunk):
                    is_counted = True
                    self.num_open += 1
                    self.most_open = max(self.most_open, self.num_open)
                    for _ in range(200):  # as long as others of its time are with the tokenizer
                        await anyio.lowlevel.checkpoint()
                    if self.holds_questions:
                        await self.lets_go.wait()
                yield event
        finally:
            self.num_open -= is_counted


async def test_watches_of_a_version_are_answered_together_the_higher_priorities_first() -> None:
    engine = Counting()
    async with Pipeline(ScriptedSource([]), engine) as pipeline, pipeline.session() as session:
        watches = [session.watch(f"priority {i % 4}, number {i}?", priority=i % 4) for i in range(20)]
        for i in range(6):
            version = await session.append(f"line {i}")
            for watch in watches:
                await watch.at_least(version)
        assert 1 < engine.most_open <= 20
        engine.holds_questions, num_before = True, len(engine.asked)
        version = await session.append("last")
        await session._data.at_least(version)
        async with asyncio.timeout(120):
            while len(engine.asked) < num_before + 2:
                await anyio.lowlevel.checkpoint()
        first = [prompt.rpartition("priority ")[2][0] for prompt in engine.asked[num_before:]]
        assert first == sorted(first, reverse=True)
        engine.holds_questions = False
        engine.lets_go.set()
        for watch in watches:
            await watch.at_least(version)
        order = [prompt.rpartition("priority ")[2][0] for prompt in engine.asked[num_before:]]
        assert order == sorted(order, reverse=True)


async def test_watches_with_a_name_are_found_by_it_and_another_of_the_name_takes_its_place() -> None:
    async with Pipeline(ScriptedSource([]), Engine(answer="yes")) as pipeline, pipeline.session() as session:
        one = session.watch("one?", name="alarm")
        session.watch("without?")
        two = session.watch("two?", name="alarm")
        assert session.watches == {"alarm": two}
        assert [each async for each in one] == []
        await one.aclose()
        assert session.watches == {"alarm": two}, "the one before has gone already"
        await two.aclose()
        assert session.watches == {}
        for name in ("", 5):
            with pytest.raises(ConfigurationError, match="name"):
                session.watch("Any?", name=name)
