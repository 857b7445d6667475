"""The real engine behind the service: a client that leaves frees its KV, and a killed engine is replaced."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest

from streamrag import VllmBackend
from streamrag.serve import Limits
from tests.serve.raw import FINISH, OPEN, append, raw
from tests.serve.serving import serving
from tests.serve.test_session_socket import talking
from tests.serve.test_sessions import opened

pytestmark = pytest.mark.engine


async def test_leaving_in_decode_frees_kv_and_a_killed_engine_is_started_again(tiny_model: Path) -> None:
    backend = VllmBackend(str(tiny_model), dtype="float32", max_num_batched_tokens=256, kv_cache_bytes=1 << 29)
    asked = {**OPEN, "max_tokens": 1500}
    async with serving(backend=backend, limits=Limits(max_tokens=1500), on_engine_death="restart") as served:
        async with raw(served.url) as client:
            await client.post("/v1/streams")
            await client.line(asked, append("Paris is the capital of France."), FINISH)
            assert await client.status() == 200
            await client.until("tokens_generated")
            assert await backend.num_unfinished_requests() == 1
        left_s = time.monotonic()
        await unfinished(backend, 0)
        print(f"the engine was free after {(time.monotonic() - left_s) * 1000:.0f} ms")

        url = await opened(served, window_tokens=500)
        async with talking(served, url) as talk:
            await talk.send("append", data=["Oslo is the capital of Norway."])
            await talk.next("data_updated")
            num_idle = await backend.num_unfinished_requests()
            for id in "ab":
                await talk.send("ask", id=id, question="Where is it?", at_least=1, max_tokens=1500)
                await talk.next("tokens_generated", id=id)
            assert await backend.num_unfinished_requests() == num_idle + 2
            await talk.send("cancel", id="a")
            await talk.next("cancelled")
            await unfinished(backend, num_idle + 1)
        await unfinished(backend, num_idle)
        assert (await served.http.delete(url)).status_code == 204
        await unfinished(backend, 0)

        async with raw(served.url) as decoding, raw(served.url) as waiting:
            for client, lines in ((decoding, [FINISH]), (waiting, [])):
                await client.post("/v1/streams")
                await client.line(asked, append("Rome is the capital of Italy."), *lines)
                assert await client.status() == 200
            await decoding.until("tokens_generated")
            await waiting.until("prefill_progressed")
            killed = backend.process_ids
            killed_s = time.monotonic()
            for process_id in killed:
                os.kill(process_id, signal.SIGKILL)
            for client in (decoding, waiting):
                assert (await client.until("error"))["error"]["code"] == "engine_dead"
            print(f"both were told after {(time.monotonic() - killed_s) * 1000:.0f} ms")
        async with asyncio.timeout(120):
            while not served.service.is_ready or backend.process_ids == killed:  # noqa: ASYNC110 -- has no event
                await asyncio.sleep(0.1)
        async with raw(served.url) as client:
            await client.post("/v1/streams")
            await client.line({**OPEN, "max_tokens": 5}, append("Rome is the capital of Italy."), FINISH)
            assert await client.status() == 200
            await client.until("answered")
    outcomes = ["left", "left", "left", "engine_dead", "engine_dead", "answered"]
    assert [outcome for _, outcome in served.watcher.ended] == outcomes


async def unfinished(backend: VllmBackend, num: int) -> None:
    """Until the engine has so many requests."""
    async with asyncio.timeout(20):
        while await backend.num_unfinished_requests() != num:
            pass
