"""KV that goes to host memory and back on a real engine, compared with fresh requests at every generated position.

One engine for the whole module. It is paused beside idle streams and sent nonsense: nobody else notices. Of its copies,
some fail or go wrong when a test says so.
"""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import pytest_asyncio
from real_engine import (
    BLOCK_SIZE,
    GREEDY,
    MOST_DIFFERENCE,
    NUM_ANSWER_TOKENS,
    Answer,
    Load,
    check_prompt_logprobs,
    check_rests,
    differences,
    fresh,
    make_model,
    pairs,
    running_engine,
    tokens,
)
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from streamrag.backends.vllm.chunk_wire import KEY, PromptMessage
from streamrag.backends.vllm.client.arguments import kv_transfer_config
from streamrag.backends.vllm.client.sampling import to_vllm
from streamrag.backends.vllm.client.token_streams import TokenStream, TokenStreams
from streamrag.core import AnswerChunk, Prefilled, Prompt
from streamrag.errors import BackendError

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PATIENCE_S = 60
NUM_STREAMS = 96
AT_ONCE = 24  # more than memory holds: they take each other's
NUM_HOST_BLOCKS = 60  # fewer than the evicted would fill


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncLLM]:
    """Swaps whatever it evicts, under every policy in turn."""
    with pytest.MonkeyPatch.context() as patch:
        async with running_engine(
            make_model(tmp_path_factory.mktemp("model")),
            patch,
            max_num_seqs=8,  # together they need more memory than there is
            kv_transfer_config=kv_transfer_config(),
            worker_extension_cls="swapping.CopyFaults",
            additional_config={"streamrag": {"eviction": "swap", "num_host_blocks": NUM_HOST_BLOCKS}},
        ) as engine:
            yield engine


@pytest.mark.long
async def test_prompts_beside_streams_that_take_their_memory_have_their_log_probabilities(engine: AsyncLLM) -> None:
    await check_prompt_logprobs(engine)


# ------------------------------------------------------------------------------------------- pauses, nonsense, losses


async def prefilled(stream: TokenStream) -> AsyncIterator[Any]:
    """The events of a stream after its first prompt has been prefilled."""
    assert isinstance(await anext(stream), Prefilled)
    return stream


async def answer_of(events: AsyncIterator[Any]) -> Answer:
    return [pair async for event in events if isinstance(event, AnswerChunk) for pair in pairs(event)]


def is_same(answer: Answer, expected: Answer) -> bool:
    return all(a[0] == b[0] and abs(a[1] - b[1]) <= MOST_DIFFERENCE for a, b in zip(answer, expected, strict=True))


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.parametrize("is_asleep", [False, True])
async def test_an_engine_pauses_beside_an_idle_stream_and_goes_on(engine: AsyncLLM, mode: str, is_asleep: bool) -> None:
    prompt = tokens(random.Random(1), 200)
    name = f"{mode}-{is_asleep}"
    async with TokenStreams(engine).open(Prompt(tuple(prompt)), GREEDY) as stream:
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
            with pytest.raises(BackendError, match="dropped the stream"):
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


NONSENSE: list[Any] = [
    5,
    0,
    [1, 2],
    "x",
    {},
    {"index": -1},
    {**PromptMessage(0, 0, False).extra_args()[KEY], "mode": 1},
]


async def test_requests_with_nonsense_in_extra_args_fail_alone(engine: AsyncLLM) -> None:
    prompt = tokens(random.Random(2), 200)
    nonsense = [{KEY: each} for each in NONSENSE] + [{"kv_transfer_params": 5}, PromptMessage(0, 0, True).extra_args()]
    async with TokenStreams(engine).open(Prompt(tuple(prompt)), GREEDY) as stream:
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
    async with TokenStreams(engine).open(Prompt(tuple(prompt)), GREEDY) as stream:
        events = await prefilled(stream)
        stream._num_messages += 1
        await stream.append([7])
        with pytest.raises(BackendError, match="came instead of message 1"):
            await answer_of(events)
    await check_rests(engine)


# ----------------------------------------------------------------------------------------------------------- copied KV


@asynccontextmanager
async def faults(engine: AsyncLLM, **of_copies: int) -> AsyncIterator[None]:
    await engine.collective_rpc("set_copy_faults", kwargs=of_copies)
    yield
    await engine.collective_rpc("set_copy_faults")


async def run_load(engine: AsyncLLM) -> tuple[Load, list[float]]:
    assert await engine.reset_prefix_cache()  # host memory with it
    load = Load(TokenStreams(engine))
    await load.run(NUM_STREAMS, AT_ONCE)
    largest = await differences(engine, load)
    counts = {name: load.count(name) for name in ("preemptions", "num_loaded", "num_recomputed", "num_invalidated")}
    print(f"largest difference {max(largest):.2e}, {counts}")
    assert len(largest) == NUM_STREAMS
    await check_rests(engine)
    return load, largest


async def test_swapped_streams_answer_as_fresh_requests_do(engine: AsyncLLM) -> None:
    num_loaded = 0
    # Nothing is loaded that was not saved: so many blocks are copied out, and at least so often copied in.
    while num_loaded < 50 * BLOCK_SIZE:  # one load may be enough, as the machine's pace decides
        load, largest = await run_load(engine)
        assert max(largest) <= MOST_DIFFERENCE
        assert all(len(answer) == NUM_ANSWER_TOKENS for answer in load.answers.values())
        assert {p.fate for record in load.records for p in record.preemptions} == {"swap"}
        num_loaded += load.count("num_loaded")


@pytest.mark.long
async def test_copies_that_fail_change_no_answer(engine: AsyncLLM) -> None:
    async with faults(engine, fail_saves=7, fail_loads=5):
        load, largest = await run_load(engine)
    assert max(largest) <= MOST_DIFFERENCE
    assert {record.outcome for record in load.records} == {"finished"}
    assert load.count("num_loaded") >= 10 * BLOCK_SIZE


async def test_a_wrong_block_in_host_memory_would_be_noticed(engine: AsyncLLM) -> None:
    async with faults(engine, confuses_loads=True):
        load, largest = await run_load(engine)
    assert load.count("num_loaded") >= 10 * BLOCK_SIZE
    assert max(largest) > 1_000 * MOST_DIFFERENCE
