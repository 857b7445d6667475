"""Lanes that are killed or stopped at any moment of a query, on real engines. `make fuzz OF=lanes` has more seeds."""

import asyncio
import random
import signal
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from lane_engines import answer, check_exact, check_nothing_pinned, growing, needs_nixl, started_lanes, tokens
from lane_kills import NUM_EACH, Kill, kills, lane_to_kill, num_lanes, run_kill, send_signal

from streamrag.backends.lanes import DisaggregatedBackend
from streamrag.backends.lanes import backend as lanes_module
from streamrag.backends.vllm.client import lane_engine

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), needs_nixl]

MAX_FETCH_S = 8.0
"""Longer than vLLM waits for a handshake, 5 s."""

LEASE_S = 12
"""Instead of 30 s, because tests wait for its end."""


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DisaggregatedBackend]:
    folder = tmp_path_factory.mktemp("models") / "model"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes_module, "MAX_FETCH_S", MAX_FETCH_S)
        patch.setattr(lane_engine, "LEASE_S", LEASE_S)
        patch.setattr(lanes_module, "MAX_KV_AGE_S", LEASE_S / 2)
        async with started_lanes(folder, lambda transfer: None, num_each=NUM_EACH) as lanes:
            yield lanes


@pytest.mark.parametrize("is_known", [False, True], ids=["before the first transfer", "after others"])
async def test_kv_that_a_stopped_prefill_lane_does_not_send_is_computed_in_time(
    backend: DisaggregatedBackend, monkeypatch: pytest.MonkeyPatch, is_known: bool
) -> None:
    """Stop it between the end of the prefill and the transfer: no connection breaks. vLLM gives up a
    handshake after 5 s; KV may come all the same after others, because the lane's workers run on."""
    if is_known:
        await asyncio.gather(*(answer(backend, growing(tokens(("warm", n), 100))) for n in range(12)))
    with_kv_transfer, stopped = lanes_module.with_kv_transfer, []

    def stop(*args: Any) -> Any:
        stopped.append(lane_to_kill(backend, "prefill", random.Random(0)))
        send_signal(stopped[0], signal.SIGSTOP)
        return with_kv_transfer(*args)

    prompt = tokens(("stopped", is_known), 300)
    with monkeypatch.context() as patch:
        patch.setattr(lanes_module, "with_kv_transfer", stop)
        try:
            began_s = time.monotonic()
            found, _ = await answer(backend, growing(prompt[:100], prompt, pause_s=0.1))
            print(f"{time.monotonic() - began_s:.1f} s")
        finally:
            for lane in stopped:
                send_signal(lane, signal.SIGCONT)
    await check_exact(backend, prompt, found)
    await check_nothing_pinned(backend)


@pytest.mark.parametrize("kill", kills(0), ids=str)
async def test_a_lane_that_is_killed_leaves_right_answers(backend: DisaggregatedBackend, kill: Kill) -> None:
    print(await run_kill(backend, kill))


async def test_killed_lanes_leave_no_blocks_behind(backend: DisaggregatedBackend) -> None:
    await check_nothing_pinned(backend)
    assert num_lanes(backend) == 2
