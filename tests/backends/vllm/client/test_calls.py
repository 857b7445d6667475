"""`VllmBackend` and `EngineClient` before a made-up engine: cancelled wherever they wait, and when the engine dies."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import aclosing
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import vllm
import vllm.v1.engine.async_llm as async_llm
from fake_engine import MAX_MODEL_LEN, TEXT_TOKENS, Client, FakeCore, cancelled_at, make_client, settle

from streamrag.backends.vllm import VllmBackend
from streamrag.backends.vllm.client.arguments import Strategy
from streamrag.backends.vllm.client.token_streams import TokenStreams
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Prompt, SamplingParams
from streamrag.errors import BackendError, EngineDeadError
from streamrag_bench.measured_engine import EngineClient

Cut = Callable[[Coroutine[Any, Any, Any]], Coroutine[Any, Any, "asyncio.Task[Any]"]]
PARAMS = SamplingParams(max_tokens=9)
PROMPTS = (Prompt((20,) * 8, 0, False), Prompt((20,) * 12, 8, False), Prompt((20,) * 13, 12, True))


@pytest.fixture(autouse=True)
def no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(async_llm.logger, "disabled", True)  # it tells of every engine that dies


class Processes:
    """As `EngineProcesses`, but there are none."""

    num_closed = 0

    def __init__(self, engine: Client) -> None:
        self._engine = engine

    def why_dead(self) -> str:
        return "it was killed"

    async def aclose(self) -> None:
        self._engine.engine_core.die()
        await settle()
        self.num_closed += 1


def make_backend(core: FakeCore, strategy: Strategy = "streaming") -> VllmBackend:
    backend = VllmBackend("model", strategy=strategy)
    backend._engine = client = make_client(core)
    backend._processes = Processes(client)  # type: ignore[assignment]
    backend._vllm = vllm
    backend._streams = TokenStreams(client, why_dead=backend._why_dead)
    backend._info = ModelInfo("model", SimpleNamespace(), MAX_MODEL_LEN)  # type: ignore[arg-type]
    backend._block_size = 4
    return backend


async def prompts(num_turns: int = 8) -> AsyncGenerator[Prompt, None]:
    for prompt in PROMPTS:
        for _ in range(num_turns):
            await asyncio.sleep(0)
        yield prompt


async def assert_nothing_is_left(core: FakeCore, client: Any) -> None:
    assert core.held == {}  # at once: an answer that nobody reads would end it too
    assert client.output_processor.request_states == {}
    await settle()
    assert core.held == {}
    assert asyncio.all_tasks() <= {asyncio.current_task(), client.output_handler}
    assert core.problems == []


async def cancelled_after(num_turns: int, coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    """A task that is cancelled when the loop has turned so often, whatever else runs by then."""
    task = asyncio.ensure_future(coroutine)
    for _ in range(num_turns):
        await asyncio.sleep(0)
    task.cancel()
    return task


async def wait_for_turns(task: "asyncio.Task[Any]") -> None:
    """Wait until the task is done, for at most 10,000 turns of the loop: seconds would be over in a pause."""
    for _ in range(10_000):
        if task.done():
            return
        await asyncio.sleep(0)


async def cut_everywhere(run: Callable[[Client, FakeCore], Coroutine[Any, Any, Any]]) -> int:
    """Run it again and again, each time cancelled one turn of the loop later; after how many turns it was done.

    It is also cancelled where it waits for the so-manyth time, and there and soon after.
    """
    for number in count(1):
        ways: list[Cut] = [partial(cancelled_after, number)]
        ways += [
            partial(cancelled_when_it_waits, cuts) for cuts in ((number, number + 1), (number, number + 2), (number,))
        ]
        was_cancelled = False
        for cancelled in ways:
            # Messages are on their way at once, as they are with ZeroMQ, but who sends them waits.
            core = FakeCore(answers_after=10, num_turns_after=2)
            client = make_client(core)
            task = await cancelled(run(client, core))
            await wait_for_turns(task)
            assert task.done(), f"it hangs: {cancelled}"
            await assert_nothing_is_left(core, client)
            if client.output_handler is not None:
                client.output_handler.cancel()
                await asyncio.wait([client.output_handler])
            was_cancelled |= task.cancelled()
            if not task.cancelled():
                task.result()
        if not was_cancelled:
            return number
    raise AssertionError


async def cancelled_when_it_waits(cuts: tuple[int, ...], coroutine: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
    return cancelled_at(cuts, coroutine)


SEVERAL = SamplingParams(max_tokens=9, temperature=1.0, n=3)
PROMPT_LOGPROBS = SamplingParams(max_tokens=9, extra={"prompt_logprobs": 1})


@pytest.mark.parametrize("params", [SEVERAL, PROMPT_LOGPROBS])
@pytest.mark.parametrize("num_events", [None, 1, 3])
@pytest.mark.parametrize("strategy", ["streaming", "warming"])
async def test_a_query_of_plain_requests_may_be_cancelled_anywhere(
    strategy: Strategy, num_events: int | None, params: SamplingParams
) -> None:
    async def run(client: Client, core: FakeCore) -> None:
        backend = make_backend(core, strategy)
        backend._engine = client
        backend._streams = TokenStreams(client)
        async with (
            aclosing(prompts()) as given,
            aclosing(backend.generate(given, params)) as events,  # type: ignore[type-var]
        ):
            found = []
            async for event in events:
                found.append(event)
                if len(found) == num_events:
                    return
        answers = [event for event in found if isinstance(event, AnswerChunk)]
        assert sorted(chunk.index for chunk in answers) == list(range(params.n))
        assert {chunk.token_ids for chunk in answers} == {tuple(TEXT_TOKENS[:3])}
        assert {chunk.finish_reason for chunk in answers} == {"length"}
        assert backend._request_ids == set()

    assert await cut_everywhere(run) > 8


@pytest.mark.parametrize("num_events", [None, 1])
@pytest.mark.parametrize("strategy", ["streaming", "warming"])
async def test_generate_may_be_cancelled_anywhere(strategy: Strategy, num_events: int | None) -> None:
    async def run(client: Client, core: FakeCore) -> None:
        backend = make_backend(core, strategy)
        backend._engine = client
        backend._streams = TokenStreams(client)
        async with (
            aclosing(prompts()) as given,
            aclosing(backend.generate(given, PARAMS)) as events,  # type: ignore[type-var]
        ):
            found = []
            async for event in events:
                found.append(event)
                if len(found) == num_events:
                    return
        assert found[-1] == AnswerChunk("()*", tuple(TEXT_TOKENS[:3]), "length")
        assert backend._request_ids == set()

    assert await cut_everywhere(run) > 20


async def test_a_measuring_client_may_be_cancelled_anywhere() -> None:
    async def run(client: Client, core: FakeCore) -> None:
        measuring = EngineClient(client, [], lambda: "it was killed")
        async with aclosing(measuring.generate("q", (20,) * 8, 3)) as answer:
            assert [token_ids async for token_ids in answer] == [tuple(TEXT_TOKENS[:3])]

    assert await cut_everywhere(run) > 8


async def test_a_stream_may_be_cancelled_anywhere_also_while_it_is_opened_and_left() -> None:
    async def run(client: Client, core: FakeCore) -> None:
        async with TokenStreams(client).open(Prompt((20,)), PARAMS) as stream:
            await stream.append([21])
            await anext(stream)
            await stream.finish([22])
            assert [event async for event in stream]

    assert await cut_everywhere(run) > 8


async def test_closing_the_backend_goes_to_its_end_though_it_is_cancelled() -> None:
    for number in range(1, 5):
        core = FakeCore()
        backend = make_backend(core)
        processes: Any = backend._processes
        client = backend._engine
        async with backend.streams.open(Prompt((20,)), PARAMS), backend.streams.open(Prompt((21,)), PARAMS):
            await settle()
            task = cancelled_at((number,), backend.aclose())
            await wait_for_turns(task)
            assert task.done()
            assert processes.num_closed == 1
            assert core.held == {}
        await asyncio.wait([client.output_handler])


@pytest.mark.parametrize("strategy", ["streaming", "warming"])
async def test_every_call_to_a_dead_engine_raises_at_once(strategy: Strategy) -> None:
    async def none_yet() -> AsyncIterator[Prompt]:
        await asyncio.get_running_loop().create_future()
        yield PROMPTS[0]

    async def first_event() -> BackendEvent:
        return await anext(backend.generate(none_yet(), PARAMS))

    core = FakeCore()
    backend = make_backend(core, strategy)
    assert await backend.num_unfinished_requests() == 0
    assert await backend.reset_prefix_cache()
    core.die()
    calls: list[Coroutine[Any, Any, Any]] = [
        first_event(),
        backend.num_unfinished_requests(),
        backend.reset_prefix_cache(),
    ]
    for call in calls:
        with pytest.raises(EngineDeadError, match="it was killed"):
            await call
    with pytest.raises(EngineDeadError, match="it was killed"):
        _ = backend.streams


async def answers_to(backend: VllmBackend, params: SamplingParams) -> list[Any]:
    async with aclosing(prompts()) as given, aclosing(backend.generate(given, params)) as events:  # type: ignore[type-var]
        return [event async for event in events]


@pytest.mark.parametrize("num_answered", [0, 1, 2])
async def test_the_engine_dies_between_the_ends_of_several_answers(num_answered: int) -> None:
    core = FakeCore()
    backend = make_backend(core)
    generating = asyncio.ensure_future(answers_to(backend, SEVERAL))
    await settle()
    (stream,) = core.held  # the prefill
    core.answer(stream, [10], is_last=True)
    await settle()
    assert [held.prompt for held in core.held.values()] == [list(PROMPTS[-1].token_ids)] * 3
    for request_id in list(core.held)[:num_answered]:
        core.answer(request_id, [11, 12], is_last=True)
    await settle()
    core.die()
    with pytest.raises(EngineDeadError, match="it was killed"):
        await generating
    assert backend._request_ids == set()


async def test_a_client_that_stops_reading_gets_the_rest_of_each_answer_later() -> None:
    async def complete() -> AsyncGenerator[Prompt, None]:
        yield PROMPTS[-1]

    core = FakeCore()
    backend = make_backend(core, "warming")
    async with aclosing(backend.generate(complete(), SEVERAL)) as events:  # type: ignore[type-var]
        reading = asyncio.ensure_future(anext(events))  # type: ignore[arg-type]
        await settle()
        first, second, third = list(core.held)
        core.answer(first, [10], is_last=False)
        chunks = [await reading]
        for request_id, token_ids, is_last in (
            (second, [11, 12], True), (first, [13], False), (third, [14], True), (first, [15], True)
        ):  # fmt: skip
            core.answer(request_id, token_ids, is_last=is_last)
        await settle()
        chunks += [chunk async for chunk in events]
    answers = {index: [t for chunk in chunks if chunk.index == index for t in chunk.token_ids] for index in range(3)}
    assert answers == {0: [10, 13, 15], 1: [11, 12], 2: [14]}
    assert {chunk.index: chunk.finish_reason for chunk in chunks} == dict.fromkeys(range(3), "length")
    await assert_nothing_is_left(core, backend._engine)


async def test_a_dropped_answer_ends_the_others_of_its_query() -> None:
    core = FakeCore()
    backend = make_backend(core, "warming")
    generating = asyncio.ensure_future(answers_to(backend, SEVERAL))
    while len(core.held) < 3:
        await settle()
        for request_id, held in list(core.held.items()):
            if held.params.max_tokens == 1:  # a warming request
                core.answer(request_id, [10], is_last=True)
    core.give_up(list(core.held)[1])
    with pytest.raises(BackendError, match="dropped the request"):
        await generating
    await assert_nothing_is_left(core, backend._engine)


@pytest.mark.parametrize("strategy", ["streaming", "warming"])
async def test_the_engine_dies_while_it_is_asked_or_computes(strategy: Strategy) -> None:
    core = FakeCore()
    backend = make_backend(core, strategy)
    core.is_deaf = strategy == "streaming"
    asking = asyncio.ensure_future(backend.num_unfinished_requests())
    await settle()
    core.is_deaf = False

    async def generate() -> None:
        async with aclosing(prompts()) as given, aclosing(backend.generate(given, PARAMS)) as events:  # type: ignore[type-var]
            async for _ in events:
                pass

    generating = asyncio.ensure_future(generate())
    await settle()
    assert core.held
    core.die()
    with pytest.raises(EngineDeadError, match="it was killed"):
        await generating
    if strategy == "streaming":
        with pytest.raises(EngineDeadError, match="it was killed"):
            await asking
    else:
        assert await asking == 0
