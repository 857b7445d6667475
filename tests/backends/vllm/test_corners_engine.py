"""A real engine that is paused beside idle streams, given other weights, or sent nonsense: nobody else notices."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from real_engine import GREEDY, MOST_DIFFERENCE, Answer, fresh, make_model, pairs, running_engine, tokens
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from streamrag.backends.vllm.chunk_wire import KEY, ChunkMessage
from streamrag.backends.vllm.client.arguments import kv_transfer_config
from streamrag.backends.vllm.client.sampling import to_vllm
from streamrag.backends.vllm.client.token_streams import StreamedTokens, TokenStream, TokenStreams
from streamrag.core import Prefilled
from streamrag.errors import BackendError

pytestmark = [pytest.mark.engine, pytest.mark.timeout(120), pytest.mark.asyncio(loop_scope="module")]

PATIENCE_S = 60


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncLLM]:
    with pytest.MonkeyPatch.context() as patch:
        async with running_engine(
            make_model(tmp_path_factory.mktemp("model")),
            patch,
            kv_transfer_config=kv_transfer_config(),
            additional_config={"streamrag": {"eviction": "swap", "num_host_blocks": 100}},
        ) as engine:
            yield engine


async def prefilled(stream: TokenStream) -> AsyncIterator[Any]:
    """The events of a stream after its first prompt has been prefilled."""
    events = stream.events()
    assert isinstance(await anext(events), Prefilled)
    return events


async def answer_of(events: AsyncIterator[Any]) -> Answer:
    return [pair async for event in events if isinstance(event, StreamedTokens) for pair in pairs(event)]


def is_same(answer: Answer, expected: Answer) -> bool:
    return all(a[0] == b[0] and abs(a[1] - b[1]) <= MOST_DIFFERENCE for a, b in zip(answer, expected, strict=True))


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("is_asleep", [False, True])
async def test_an_engine_pauses_beside_an_idle_stream_and_goes_on(engine: AsyncLLM, mode: str, is_asleep: bool) -> None:
    prompt = tokens(random.Random(1), 200)
    name = f"{mode}-{is_asleep}"
    async with TokenStreams(engine).open(prompt, GREEDY) as stream:
        events = await prefilled(stream)
        await fresh(engine, f"answered-{name}", prompt[:50], [(0, 0.0)])
        async with asyncio.timeout(PATIENCE_S):
            if is_asleep:
                await engine.sleep(level=0, mode=mode)
                await engine.wake_up(tags=["scheduling"])
            else:
                await engine.pause_generation(mode=mode)
                await engine.resume_generation()
        if mode == "abort":
            with pytest.raises(BackendError, match="gave the stream up"):
                await answer_of(events)
        else:
            await stream.finish([7])
            answer = await answer_of(events)
            assert is_same(answer, await fresh(engine, f"fresh-{name}", [*prompt, 7], answer))
    assert len(await fresh(engine, f"after-{name}", prompt, [(0, 0.0)] * 4)) == 4


async def fails(engine: AsyncLLM, params: Any, name: str, prompt: list[int]) -> bool:
    try:
        async for output in engine.generate(tokens_input(list(prompt)), params, name):
            if output.outputs[0].finish_reason == "error":
                return True
    except Exception:  # what vLLM makes of an error is its business
        return True
    return False


NONSENSE: list[Any] = [5, 0, [1, 2], "x", {}, {"index": -1}, {**ChunkMessage(0, 0, False).extra_args()[KEY], "mode": 1}]


async def test_requests_with_nonsense_in_extra_args_fail_alone(engine: AsyncLLM) -> None:
    prompt = tokens(random.Random(2), 200)
    nonsense = [{KEY: each} for each in NONSENSE] + [{"kv_transfer_params": 5}, ChunkMessage(0, 0, True).extra_args()]
    async with TokenStreams(engine).open(prompt, GREEDY) as stream:
        events = await prefilled(stream)
        for number, extra_args in enumerate(nonsense):
            params = to_vllm(GREEDY, engine.vllm_config)
            params.extra_args = extra_args
            assert await fails(engine, params, f"nonsense-{number}", prompt)
            assert not engine.errored
        await stream.finish([7])
        answer = await answer_of(events)
    assert is_same(answer, await fresh(engine, "fresh-nonsense", [*prompt, 7], answer))


async def test_a_chunk_that_is_lost_on_its_way_fails_its_stream_alone(engine: AsyncLLM) -> None:
    prompt = tokens(random.Random(3), 100)
    async with TokenStreams(engine).open(prompt, GREEDY) as stream:
        events = await prefilled(stream)
        stream._num_chunks += 1
        await stream.append([7])
        with pytest.raises(BackendError, match="came instead of chunk 1"):
            await answer_of(events)
    assert not await engine.engine_core.call_utility_async("has_work")
