"""Streams against an engine that is a part of the test, see `fake_engine`; a real one is in `test_streaming_engine`."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
import vllm.v1.engine.async_llm as async_llm
from client_machine import ClientMachine
from client_mutants import MUTANTS, mutant
from fake_engine import FakeCore, make_client, settle
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

from streamrag.backends.vllm.client.token_streams import TokenStream, TokenStreams
from streamrag.core import AnswerChunk, Prompt, SamplingParams
from streamrag.errors import BackendError, EngineDeadError

QUICK = settings(derandomize=True, max_examples=100, stateful_step_count=40, database=None, print_blob=False)


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm.logger, "disabled", True)  # it tells of every engine that dies


def test_the_engine_has_the_pushed_prompt_after_any_sequence_of_calls() -> None:
    run_state_machine_as_test(ClientMachine, settings=QUICK)


SELDOM = {
    "an aborted stream is not noticed by a push",
    "two who read wait for the same event",
    "the engine goes on behind a stop text",
    "those that are aborted together are aborted one after the other",
}
"""Faults that take hundreds of examples to find."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.long] * (name in SELDOM)) for name in MUTANTS])
def test_the_state_machine_finds_each_mutant(name: str) -> None:
    class Mutated(ClientMachine):
        module = mutant(name)

    # What hypothesis draws depends on the modules that other tests have imported, and some faults are rare.
    many = settings(QUICK, max_examples=3000, phases=[Phase.generate], report_multiple_bugs=False)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        run_state_machine_as_test(Mutated, settings=many)


# ------------------------------------------------------------------------------------------------- the worst, by name


@pytest.fixture
def core() -> FakeCore:
    return FakeCore()


@pytest.fixture
def streams(core: FakeCore) -> TokenStreams:
    return TokenStreams(make_client(core), why_dead=lambda: "it was killed")


PUSHES: dict[str, Callable[[TokenStream], Coroutine[Any, Any, None]]] = {
    "append": lambda stream: stream.append([23, 24]),
    "update": lambda stream: stream.update(Prompt((20, 25))),
    "update, the LCP known": lambda stream: stream.update(Prompt((20, 25), num_shared=1)),
    "finish": lambda stream: stream.finish([26], params=SamplingParams(max_tokens=5)),
}


@pytest.mark.parametrize("push", PUSHES)
async def test_a_cancelled_push_has_changed_nothing_and_may_be_made_again(
    core: FakeCore, streams: TokenStreams, push: str
) -> None:
    async with streams.open(Prompt((20, 21, 22)), SamplingParams(max_tokens=9)) as stream:
        pushing = asyncio.ensure_future(PUSHES[push](stream))
        await settle_until_it_waits(pushing)
        pushing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pushing
        assert (stream.num_tokens, stream.is_complete) == (3, False)
        await PUSHES[push](stream)
        if push != "finish":
            await stream.finish([27])
        await settle()
        (held,) = core.held.values()
        expected = {"append": [20, 21, 22, 23, 24, 27], "finish": [20, 21, 22, 26]}
        assert held.prompt == expected.get(push, [20, 25, 27])
        assert held.params.max_tokens == (5 if push == "finish" else 9)
        core.answer(*core.held, [30], is_last=True)
        events = [event async for event in stream]
        assert events == [AnswerChunk("<", (30,), "length")]
    assert core.problems == []


async def settle_until_it_waits(task: "asyncio.Task[None]") -> None:
    await asyncio.sleep(0)
    assert not task.done()


async def test_after_the_engines_death_any_number_of_pushes_raise_at_once(
    core: FakeCore, streams: TokenStreams
) -> None:
    async with (
        streams.open(Prompt((20,)), SamplingParams()) as idle,
        streams.open(Prompt((21,)), SamplingParams()) as other,
    ):
        await settle()
        pushing = [asyncio.ensure_future(idle.append([22])) for _ in range(200)]
        await asyncio.sleep(0)  # all of them have begun
        core.die()
        found = await asyncio.gather(*pushing, return_exceptions=True)
        assert {type(each) for each in found} == {EngineDeadError}
        for stream in (idle, other):
            for push in PUSHES.values():
                for _ in range(100):
                    with pytest.raises(EngineDeadError, match="it was killed"):
                        await push(stream)
            for _ in range(3):
                with pytest.raises(EngineDeadError, match="it was killed"):
                    await anext(stream)
        assert (idle.num_tokens, other.num_tokens) == (1, 1)
    with pytest.raises(EngineDeadError, match="it was killed"):
        async with streams.open(Prompt((20,)), SamplingParams()):
            pass


async def test_the_engine_dies_while_vllm_waits_for_its_first_answer_of_all(
    core: FakeCore, streams: TokenStreams
) -> None:
    core.is_deaf = True
    opening = asyncio.ensure_future(streams.open(Prompt((20,)), SamplingParams()).__aenter__())
    await settle()
    core.die()
    with pytest.raises(EngineDeadError, match="it was killed"):
        await opening


async def test_a_stream_that_is_aborted_while_it_is_opened_is_not_opened(core: FakeCore, streams: TokenStreams) -> None:
    context = streams.open(Prompt((20,)), SamplingParams())
    opening = asyncio.ensure_future(context.__aenter__())
    await asyncio.sleep(0)
    await streams.aclose()
    with pytest.raises(BackendError, match="has ended"):
        await opening
    await settle()
    assert core.num_requests == 0


async def test_a_reader_hears_of_an_abort_before_vllm_has_handed_over_any_output(
    core: FakeCore, streams: TokenStreams
) -> None:
    async with streams.open(Prompt((20,)), SamplingParams()) as stream:
        await stream.abort()
        for _ in range(2):
            with pytest.raises(BackendError, match="dropped the stream"):
                await anext(stream)
    await settle()
    assert core.num_requests == 0


async def test_an_iteration_that_is_left_goes_on_where_it_was(core: FakeCore, streams: TokenStreams) -> None:
    async with streams.open(Prompt((20, 21), is_complete=True), SamplingParams()) as stream:
        await settle()
        core.answer(*core.held, [30], is_last=False)
        assert await anext(stream) == AnswerChunk("<", (30,))
        core.answer(*core.held, [31], is_last=True)
        assert [event async for event in stream] == [AnswerChunk("=", (31,), "length")]
        assert [event async for event in stream] == []
