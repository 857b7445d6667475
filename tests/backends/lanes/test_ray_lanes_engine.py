"""One prefill lane and one decode lane on Ray Serve, with real CPU engines. The last tests kill replicas."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from lane_engines import BLOCK_SIZE, MAX_MODEL_LEN, answer, check_exact, growing, needs_nixl, tokens
from lane_replicas import CountedDecodeEngine

pytest.importorskip("ray")

from ray import serve

from streamrag.backends.lanes.kv_transfer import KvTransfer
from streamrag.backends.lanes.ray_backend import RayDisaggregatedBackend
from streamrag.backends.lanes.replica_engines import PrefillEngine
from streamrag.backends.ray.cluster import Cluster
from streamrag.backends.ray.deployment import lane_engines
from streamrag.backends.ray.options import ReplicaOptions
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import AnswerChunk, Prompt, SamplingParams
from streamrag.errors import BackendError
from streamrag.testing import make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), needs_nixl]

APP = "lanes"
OPTIONS = ReplicaOptions(number=1, num_cpus=0.5, health_s=0.5, queued_tokens=None)
transfers: list[KvTransfer] = []


@pytest.fixture(scope="module")
def environment() -> Iterator[None]:
    folders = [str(Path(__file__).parents[1] / name) for name in ("ray", "lanes", "vllm")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("RAY_raylet_start_wait_time_s", "120")
        patch.setenv("RAY_worker_niceness", "0")  # else other tests on a busy machine starve the replicas
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
        patch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")  # as in `real_engine`
        yield


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(
    environment: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[RayDisaggregatedBackend]:
    model = str(
        make_tiny_llama(tmp_path_factory.mktemp("models") / "model", hidden_size=128, num_layers=4, num_heads=4)
    )
    args = {"dtype": "float32", "distributed_executor_backend": "forking_executor.ForkingExecutor"}
    shared: dict[str, Any] = {"max_model_len": MAX_MODEL_LEN, "kv_cache_bytes": 1 << 26, "engine_args": args}
    app = partial(
        lane_engines,
        partial(PrefillEngine, model, lane="prefill", **shared),
        partial(CountedDecodeEngine, model, lane="decode", collect_stats=True, **shared),
        OPTIONS,
        OPTIONS,
    )
    make_tokenizer = partial(HuggingFaceTokenizer.of_engine, model, {})
    backend = RayDisaggregatedBackend(
        Cluster(app, app_name=APP, num_cpus=2), make_tokenizer=make_tokenizer, router="soonest"
    )
    backend.on_transfer = transfers.append
    await backend.start(lambda line: None)
    yield backend
    await backend.aclose()


async def decode_process(backend: RayDisaggregatedBackend) -> tuple[int, int]:
    """Return the process id of the decode lane's replica, and the bytes of KV that its engine has read."""
    facts = await backend._backends["decode-0"].streams.replicas.facts()
    process_id, num_bytes = map(int, facts.model_name.split())
    return process_id, num_bytes


def process_of(lane: str) -> int:
    deployments = serve.context._get_global_client().get_serve_details()["applications"][APP]["deployments"]
    return next(each["pid"] for each in deployments[lane]["replicas"] if each["state"] == "RUNNING")


async def test_the_kv_of_a_prompt_that_grows_is_read_in_another_replica(backend: RayDisaggregatedBackend) -> None:
    prompt = tokens("ray", 300)
    _, num_before = await decode_process(backend)
    found, last = await answer(backend, growing(prompt[:100], prompt[:250], prompt, pause_s=0.1))
    await check_exact(backend, prompt, found)
    assert last.record is not None
    assert last.record.num_prompt_tokens == 300
    (transfer,) = transfers
    assert (transfer.num_tokens, transfer.num_blocks) == (300, 10)
    block_bytes = 2 * 4 * 128 * 4 * BLOCK_SIZE  # key and value, layers, hidden size, float32
    _, num_after = await decode_process(backend)
    assert num_after - num_before == transfer.num_blocks * block_bytes


async def test_several_answers_are_sampled_in_a_decode_replica(backend: RayDisaggregatedBackend) -> None:
    prompt = tokens("several", 150)
    params = SamplingParams(max_tokens=4, n=2, temperature=1.0, ignore_eos=True)
    async with aclosing(backend.generate(growing(prompt), params)) as events:
        chunks = [event async for event in events if isinstance(event, AnswerChunk)]
    assert {chunk.index for chunk in chunks} == {0, 1}
    assert sum(len(chunk.token_ids) for chunk in chunks) == 8


async def test_a_decode_replica_that_is_killed_is_replaced_and_a_query_that_waits_for_it_is_answered(
    backend: RayDisaggregatedBackend,
) -> None:
    killed, _ = await decode_process(backend)
    assert killed == process_of("decode")
    prompt = tokens("killed", 200)
    shown, long = 0, SamplingParams(max_tokens=600, ignore_eos=True)

    async def read() -> None:
        nonlocal shown
        async with aclosing(backend.generate(growing(prompt), long)) as events:
            async for event in events:
                shown += len(event.token_ids) if isinstance(event, AnswerChunk) else 0

    reading = asyncio.create_task(read())
    while not shown:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    os.kill(killed, signal.SIGSTOP)  # so that the next query has its prompt computed, and no token
    asking = asyncio.create_task(answer(backend, growing(prompt[:100], prompt[:150])))
    await asyncio.sleep(1.0)
    os.kill(killed, signal.SIGKILL)
    with pytest.raises(BackendError, match=r"lost after \d+ tokens of the answer were shown: ask again"):
        await reading
    found, _ = await asking
    await check_exact(backend, prompt[:150], found)
    replaced, _ = await decode_process(backend)
    assert replaced == process_of("decode") != killed
    transfers.clear()
    found, _ = await answer(backend, growing(prompt))
    await check_exact(backend, prompt, found)
    assert len(transfers) == 1
    assert (await decode_process(backend))[1] > 0, "the new replica reads KV"


async def test_a_prefill_replica_that_is_killed_with_an_open_prompt_is_replaced(
    backend: RayDisaggregatedBackend,
) -> None:
    prompt, is_open, goes_on = tokens("open", 200), asyncio.Event(), asyncio.Event()

    async def prompts() -> AsyncIterator[Prompt]:
        yield Prompt(tuple(prompt[:100]), 0, is_complete=False)
        is_open.set()
        await goes_on.wait()
        yield Prompt(tuple(prompt), 100, is_complete=True)

    asking = asyncio.create_task(answer(backend, prompts()))
    await is_open.wait()
    killed = process_of("prefill")
    os.kill(killed, signal.SIGKILL)
    goes_on.set()
    found, _ = await asking
    await check_exact(backend, prompt, found)
    assert process_of("prefill") != killed
