"""Streams into a real vLLM engine on the CPU, compared with fresh requests at every generated position."""

import asyncio
import random
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
import pytest_asyncio
from real_engine import (
    GREEDY,
    MOST_DIFFERENCE,
    NUM_ANSWER_TOKENS,
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
from rotating import STALE, TRUE
from vllm.v1.engine.async_llm import AsyncLLM

from streamrag.backends.vllm.client.streaming import stream_then_generate
from streamrag.backends.vllm.client.token_streams import TokenStreams
from streamrag.core import AnswerChunk, Prefilled, Prompt, SamplingParams
from streamrag.errors import BackendError, ConfigurationError, PromptTooLongError, SourceError
from streamrag.records import RequestRecord

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

NUM_STREAMS = 128


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncLLM]:
    # Without low water partial prompts are computed again and again: updates are to invalidate much.
    options = {"streamrag": {"low_water": 0.0}}
    with pytest.MonkeyPatch.context() as patch:
        model = make_model(tmp_path_factory.mktemp("model"))
        async with running_engine(model, patch, additional_config=options) as engine:
            yield engine


async def test_streams_answer_as_fresh_requests_do_under_every_policy_and_short_of_memory(engine: AsyncLLM) -> None:
    load = Load(TokenStreams(engine))
    await load.run(NUM_STREAMS, at_once=24)
    largest = await differences(engine, load)
    assert max(largest) <= MOST_DIFFERENCE
    assert len(largest) == NUM_STREAMS
    assert all(len(answer) == NUM_ANSWER_TOKENS for answer in load.answers.values())
    counts = {name: load.count(name) for name in ("preemptions", "num_invalidated", "num_recomputed")}
    num_in_work = sum(num_mid_prefill(record) for record in load.records)
    print(f"largest difference {max(largest):.2e}, chunks in mid-prefill {num_in_work}, {counts}")
    # The pace of the machine decides how many: half as many streams had 4 to 14 preemptions.
    assert counts["preemptions"] >= 5
    assert counts["num_invalidated"] >= 100
    assert num_in_work >= 5
    await check_rests(engine)
    await check_limits(engine, load.streams)
    await check_prompts(engine, load.streams)
    assert engine.output_processor.get_num_unfinished_requests() == 0


async def test_prompts_beside_streams_that_take_their_memory_have_their_log_probabilities(engine: AsyncLLM) -> None:
    await check_prompt_logprobs(engine)


def num_mid_prefill(record: RequestRecord) -> int:
    """Chunks that came while the prompt before them was in work."""
    return sum(0 < new.num_computed < old.num_tokens - 1 for old, new in pairwise(record.chunks))


async def check_prompts(engine: AsyncLLM, streams: TokenStreams) -> None:
    """An iterator of prompts is answered; what it raises is raised."""
    rng = random.Random(2)
    first, last = tokens(rng, 100), tokens(rng, 80)
    is_prefilled = asyncio.Event()

    async def prompts(error: Exception | None = None, has_last: bool = True) -> AsyncIterator[Prompt]:
        yield Prompt(tuple(first), 0, is_complete=False)
        await is_prefilled.wait()
        if error:
            raise error
        if has_last:
            yield Prompt(tuple(last), 0, is_complete=True)

    answer: list[int] = []
    async for event in stream_then_generate(prompts(), streams, GREEDY):
        if isinstance(event, Prefilled):
            assert event.num_tokens == len(first) - 1
            is_prefilled.set()
        else:
            answer += event.token_ids
    assert answer == [t for t, _ in await fresh(engine, "prompts", last, [(t, 0.0) for t in answer])]
    with pytest.raises(SourceError, match="no page"):
        [event async for event in stream_then_generate(prompts(SourceError("no page")), streams, GREEDY)]
    with pytest.raises(BackendError, match="without a complete one"):
        [event async for event in stream_then_generate(prompts(has_last=False), streams, GREEDY)]


async def check_limits(engine: AsyncLLM, streams: TokenStreams) -> None:
    """Prompts that are too long, and streams that are left."""
    rng = random.Random(1)
    # Too long: refused here, and the stream goes on.
    async with streams.open(Prompt(tuple(tokens(rng, 50))), GREEDY) as stream:
        with pytest.raises(PromptTooLongError, match="1050 tokens"):
            await stream.append(tokens(rng, 1_000))
        await stream.finish()
        answer = [pair async for event in stream if isinstance(event, AnswerChunk) for pair in pairs(event)]
        assert len(answer) == NUM_ANSWER_TOKENS
        with pytest.raises(BackendError, match="complete"):
            await stream.append([1])
    # Too long past the client's check: the engine fails this stream alone.
    async with streams.open(Prompt(tuple(tokens(rng, 50))), GREEDY) as stream:
        stream._max_model_len = 10_000
        await stream.append(tokens(rng, 990))
        await stream.finish()
        with pytest.raises(BackendError, match="does not fit the model's length"):
            [event async for event in stream]
    # Without a tokenizer there is no text to stop at.
    async with streams.open(Prompt(tuple(tokens(rng, 50))), GREEDY) as stream:
        with pytest.raises(ConfigurationError, match=r"stop=.*skip_tokenizer_init"):
            await stream.finish(params=SamplingParams(stop=("x",)))
    # Left in the middle: nothing stays behind.
    async with streams.open(Prompt(tuple(tokens(rng, 500))), GREEDY):
        await asyncio.sleep(0.01)


async def test_a_stale_block_in_the_prefix_cache_would_be_noticed(engine: AsyncLLM) -> None:
    assert await engine.reset_prefix_cache()
    await fresh(engine, STALE, [1], [(0, 0.0)])
    load = Load(TokenStreams(engine))
    await load.run(12, at_once=4)
    await fresh(engine, TRUE, [1], [(0, 0.0)])
    largest = await differences(engine, load)
    print(f"with a stale block: {sorted(largest)}")
    assert max(largest) > 1_000 * MOST_DIFFERENCE
