"""KV that goes to host memory and back on a real engine, compared with fresh requests at every generated position.

One engine for the whole module. Of its copies, some fail or go wrong when a test says so.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import pytest_asyncio
from real_engine import (
    BLOCK_SIZE,
    MOST_DIFFERENCE,
    NUM_ANSWER_TOKENS,
    Load,
    differences,
    make_model,
    running_engine,
)
from vllm.v1.engine.async_llm import AsyncLLM

from streamrag.backends.vllm.client.arguments import kv_transfer_config
from streamrag.backends.vllm.client.token_streams import TokenStreams

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280), pytest.mark.asyncio(loop_scope="module")]

NUM_STREAMS = 64
STREAMS_PER_S = 6  # more than the engine serves: they take each other's memory
NUM_HOST_BLOCKS = 60  # fewer than the evicted would fill


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[AsyncLLM]:
    """Swaps whatever it evicts, under every policy in turn."""
    with pytest.MonkeyPatch.context() as patch:
        async with running_engine(
            make_model(tmp_path_factory.mktemp("model")),
            patch,
            kv_transfer_config=kv_transfer_config(),
            worker_extension_cls="swapping.CopyFaults",
            additional_config={"streamrag": {"eviction": "swap", "num_host_blocks": NUM_HOST_BLOCKS}},
        ) as engine:
            yield engine


@asynccontextmanager
async def faults(engine: AsyncLLM, **of_copies: int) -> AsyncIterator[None]:
    await engine.collective_rpc("set_copy_faults", kwargs=of_copies)
    yield
    await engine.collective_rpc("set_copy_faults")


async def run_load(engine: AsyncLLM, num_streams: int = NUM_STREAMS) -> tuple[Load, list[float]]:
    assert await engine.reset_prefix_cache()  # host memory with it
    load = Load(TokenStreams(engine))
    await load.run(num_streams, num_streams / STREAMS_PER_S)
    largest = await differences(engine, load)
    counts = {name: load.count(name) for name in ("preemptions", "num_loaded", "num_recomputed", "num_invalidated")}
    print(f"largest difference {max(largest):.2e}, {counts}")
    assert len(largest) == num_streams
    assert not await engine.engine_core.call_utility_async("has_work")
    return load, largest


async def test_what_was_swapped_answers_as_fresh_requests_do(engine: AsyncLLM) -> None:
    load, largest = await run_load(engine)
    assert max(largest) <= MOST_DIFFERENCE
    assert all(len(answer) == NUM_ANSWER_TOKENS for answer in load.answers.values())
    assert {p.fate for record in load.records for p in record.preemptions} == {"swap"}
    # Nothing is loaded that was not saved: so many blocks were copied out, and at least so often copied in.
    assert load.count("num_loaded") >= 50 * BLOCK_SIZE


async def test_copies_that_fail_change_no_answer(engine: AsyncLLM) -> None:
    async with faults(engine, fail_saves=7, fail_loads=5):
        load, largest = await run_load(engine)
    assert max(largest) <= MOST_DIFFERENCE
    assert {record.outcome for record in load.records} == {"finished"}
    assert load.count("num_loaded") >= 10 * BLOCK_SIZE


async def test_one_wrong_block_would_be_noticed(engine: AsyncLLM) -> None:
    async with faults(engine, confuses_loads=True):
        load, largest = await run_load(engine, 32)
    assert load.count("num_loaded") >= 10 * BLOCK_SIZE
    assert max(largest) > 1_000 * MOST_DIFFERENCE
