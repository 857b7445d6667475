"""KV that goes to host memory and back on a real engine, compared with fresh requests at every generated position."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
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

from streamrag.backends.strategy import kv_transfer_config
from streamrag.backends.token_streams import TokenStreams

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]

NUM_STREAMS = 64


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@asynccontextmanager
async def swapping_engine(
    model: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    num_host_blocks: int = 2_000,
    connector_class: str = "",
    **faults: int,
) -> AsyncIterator[AsyncLLM]:
    """Swaps whatever it evicts, under every policy in turn."""
    connector = kv_transfer_config()
    connector.kv_connector_extra_config = dict(faults)
    if connector_class:
        connector.kv_connector, connector.kv_connector_module_path = connector_class, "swapping"
    options = {"eviction": "swap", "num_host_blocks": num_host_blocks}
    async with running_engine(
        model,
        "rotating.RotatingScheduler",
        monkeypatch,
        kv_transfer_config=connector,
        additional_config={"streamrag": options},
    ) as engine:
        yield engine


async def run_load(engine: AsyncLLM) -> tuple[Load, list[float]]:
    load = Load(TokenStreams(engine))
    await load.run(NUM_STREAMS)
    largest = await differences(engine, load)
    counts = {name: load.count(name) for name in ("preemptions", "num_loaded", "num_recomputed", "num_invalidated")}
    print(f"largest difference {max(largest):.2e}, {counts}")
    return load, largest


async def test_what_was_swapped_answers_as_fresh_requests_do(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swapping_engine(model, monkeypatch) as engine:
        load, largest = await run_load(engine)
        assert len(largest) == NUM_STREAMS
        assert max(largest) <= MOST_DIFFERENCE
        assert all(len(answer) == NUM_ANSWER_TOKENS for answer in load.answers.values())
        assert {p.fate for record in load.records for p in record.preemptions} == {"swap"}
        # Nothing is loaded that was not saved: so many blocks were copied out, and at least so often copied in.
        assert load.count("num_loaded") >= 50 * BLOCK_SIZE
        assert not await engine.engine_core.call_utility_async("has_work")


async def test_copies_that_fail_change_no_answer(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swapping_engine(model, monkeypatch, num_host_blocks=60, fail_saves=7, fail_loads=5) as engine:
        load, largest = await run_load(engine)
        assert len(largest) == NUM_STREAMS
        assert max(largest) <= MOST_DIFFERENCE
        assert {record.outcome for record in load.records} == {"finished"}
        assert load.count("num_loaded") >= 10 * BLOCK_SIZE
        assert not await engine.engine_core.call_utility_async("has_work")


async def test_one_wrong_block_would_be_noticed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with swapping_engine(model, monkeypatch, connector_class="ForgetfulConnector") as engine:
        load, largest = await run_load(engine)
        assert load.count("num_loaded") >= 10 * BLOCK_SIZE
        assert max(largest) > 1_000 * MOST_DIFFERENCE
