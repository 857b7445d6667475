"""KV that is too old, or whose lease ends while the decode lane is stopped, on real CPU engines with a short lease."""

import asyncio
import importlib
import os
import signal
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from lane_engines import (
    answer,
    check_exact,
    check_nothing_pinned,
    growing,
    needs_nixl,
    num_received_bytes,
    started_lanes,
    tokens,
)

from streamrag.backends.lanes import DisaggregatedBackend
from streamrag.backends.lanes import backend as lanes_module
from streamrag.backends.vllm import VllmBackend
from streamrag.backends.vllm.client import lane_engine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), needs_nixl]

LEASE_S, MAX_READ_S = 4, 3


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DisaggregatedBackend]:
    folder = tmp_path_factory.mktemp("models") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lane_engine, "LEASE_S", LEASE_S)
        patch.setattr(lanes_module, "MAX_READ_S", MAX_READ_S)
        async with started_lanes(folder, lambda passed: None, num_each=1) as lanes:
            yield lanes


def signal_all(lane: VllmBackend, number: signal.Signals) -> None:
    """Send a signal to all processes of an engine: `process_ids` are those of the engine core alone."""
    psutil = importlib.import_module("psutil")
    for process_id in lane.process_ids:
        family = [process_id, *(child.pid for child in psutil.Process(process_id).children(recursive=True))]
        for each in family:
            os.kill(each, number)


def num_late_reads(lane: VllmBackend) -> int:
    assert lane._processes is not None
    return lane._processes._log.path.read_text().count("came too late to be trusted")


async def test_kv_that_comes_in_time_is_used(backend: DisaggregatedBackend) -> None:
    prompt, decode = tokens("in time", 600), backend._backends["decode-0"]
    num_before = num_received_bytes(backend)
    found, _ = await answer(backend, growing(prompt))
    await check_exact(backend, prompt, found)
    assert num_received_bytes(backend) > num_before
    assert num_late_reads(decode) == 0


async def test_kv_that_was_computed_too_long_ago_is_not_fetched(
    backend: DisaggregatedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens("lease", 100)
    monkeypatch.setattr(lanes_module, "MAX_KV_AGE_S", -1.0)
    num_before = num_received_bytes(backend)
    found, _ = await answer(backend, growing(prompt))
    await check_exact(backend, prompt, found)
    assert num_received_bytes(backend) == num_before
    await check_nothing_pinned(backend)


async def reuse_blocks(lane: VllmBackend) -> None:
    """Wait until all leases have ended, and fill the whole cache of a prefill lane with other KV."""
    await asyncio.sleep(LEASE_S + 1)
    for number in range(3):
        await answer(lane, growing(tokens(("other", number), 900)))


@pytest.mark.parametrize("after_s", [None, 0.0, 0.003, 0.006, 0.01])
async def test_kv_of_reused_blocks_is_not_used(
    backend: DisaggregatedBackend, monkeypatch: pytest.MonkeyPatch, after_s: float | None
) -> None:
    """Stop the decode lane before it is asked, or seconds after. Continue it when the blocks are reused."""
    prefill, decode = backend._backends["prefill-0"], backend._backends["decode-0"]
    with_kv_transfer, stopped = lanes_module.with_kv_transfer, asyncio.Event()

    def stop() -> None:
        signal_all(decode, signal.SIGSTOP)
        stopped.set()

    def hand_over(*args: Any) -> Any:
        if after_s is None:
            stop()
        else:
            asyncio.get_running_loop().call_later(after_s, stop)
        return with_kv_transfer(*args)

    prompt, num_before = tokens(("lease", after_s), 600), num_late_reads(decode)
    monkeypatch.setattr(lanes_module, "with_kv_transfer", hand_over)
    answering = asyncio.create_task(answer(backend, growing(prompt[:300], prompt, pause_s=0.1)))
    try:
        await stopped.wait()
        await reuse_blocks(prefill)
    finally:
        signal_all(decode, signal.SIGCONT)
    found, _ = await answering
    monkeypatch.undo()
    await check_exact(backend, prompt, found)
    assert after_s is not None or num_late_reads(decode) > num_before
    # Nor did the wrong KV stay in the decode lane's prefix cache.
    found, _ = await answer(decode, growing(prompt))
    await check_exact(backend, prompt, found)
    await check_nothing_pinned(backend)
