"""Prefill and decode lanes on real CPU engines, and what their answers are compared with."""

import argparse
import asyncio
import importlib.util
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from streamrag.backends.lanes import DisaggregatedBackend
from streamrag.backends.lanes.kv_transfer import KvTransfer
from streamrag.backends.vllm import VllmBackend
from streamrag.core import AnswerChunk, Prompt, SamplingParams, common_prefix_len
from streamrag.errors import BackendError
from streamrag.testing import make_tiny_llama

needs_nixl = pytest.mark.skipif(
    importlib.util.find_spec("nixl") is None,
    reason="NIXL is not installed: pip install --no-deps nixl nixl-cu12 works without a GPU",
)

BLOCK_SIZE, MAX_MODEL_LEN, VOCABULARY = 32, 1_024, 400
NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, extra={"logprobs": 1})
MAX_LOGPROB_DIFFERENCE = 1e-5
PATIENCE_S = 60
"""For a lease of 30 s to end."""


@asynccontextmanager
async def started_lanes(
    folder: Path, on_transfer: Callable[[KvTransfer], None], *, num_each: int = 2
) -> AsyncIterator[DisaggregatedBackend]:
    """Start lanes of each kind, short of memory."""
    model = make_tiny_llama(folder, hidden_size=128, num_layers=4, num_heads=4)

    def lane(kind: str) -> VllmBackend:
        return VllmBackend(
            model,
            lane=kind,
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=64,  # several steps per prompt
            max_num_seqs=4,
            kv_cache_bytes=1 << 26,
            collect_stats=kind == "decode",
            # Little more than one prompt may need: streams are evicted, and answers wait for memory.
            engine_args={"dtype": "float32", "num_gpu_blocks_override": MAX_MODEL_LEN // BLOCK_SIZE + 10},
        )

    prefill, decode = ([lane(kind) for _ in range(num_each)] for kind in ("prefill", "decode"))
    lanes = DisaggregatedBackend(prefill, decode, max_open=2)
    lanes.on_transfer = on_transfer
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")  # as in `real_engine`
        await lanes.start(lambda line: None)
    try:
        yield lanes
    finally:
        await lanes.aclose()


def tokens(seed: object, num: int) -> list[int]:
    rng = random.Random(repr(seed))
    return [rng.randrange(10, VOCABULARY) for _ in range(num)]


async def growing(*prompts: Sequence[int], pause_s: float = 0.0) -> AsyncIterator[Prompt]:
    """All but the last are partial."""
    before: Sequence[int] = ()
    for number, prompt in enumerate(prompts, start=1):
        num_shared = common_prefix_len(tuple(before), tuple(prompt))
        yield Prompt(tuple(prompt), num_shared, is_complete=number == len(prompts))
        before = prompt
        await asyncio.sleep(pause_s)


def pairs(chunk: AnswerChunk) -> list[tuple[int, float]]:
    return [(t, of[t].logprob) for t, of in zip(chunk.token_ids, chunk.logprobs or (), strict=True)]


async def answer(
    backend: DisaggregatedBackend | VllmBackend, prompts: AsyncIterator[Prompt], params: SamplingParams = GREEDY
) -> tuple[list[tuple[int, float]], AnswerChunk]:
    """Return the tokens with their log-probabilities, and the last chunk."""
    found, last = [], None
    async with aclosing(backend.generate(prompts, params)) as events:
        async for event in events:
            if isinstance(event, AnswerChunk):
                found += pairs(event)
                last = event
    assert last is not None
    return found, last


async def check_exact(backend: DisaggregatedBackend, prompt: Sequence[int], found: list[tuple[int, float]]) -> None:
    """Compare with a request of one living engine that takes nothing from its cache."""
    engine = next(lane for lane in backend._backends.values() if lane.lane == "decode" and is_alive(lane))
    params = SamplingParams(
        max_tokens=len(found), ignore_eos=True, extra={"logprobs": 1, "skip_reading_prefix_cache": True}
    )
    expected, _ = await answer(engine, growing(prompt), params)
    assert [t for t, _ in found] == [t for t, _ in expected]
    assert max(abs(a - b) for (_, a), (_, b) in zip(found, expected, strict=True)) <= MAX_LOGPROB_DIFFERENCE


def is_alive(lane: VllmBackend) -> bool:
    try:
        lane.check_health()
    except BackendError:
        return False
    return True


async def check_nothing_pinned(backend: DisaggregatedBackend) -> None:
    """Wait until no engine has work, and check that no block is held: the cache cannot be reset otherwise."""
    for lane in filter(is_alive, backend._backends.values()):
        for _ in range(10 * PATIENCE_S):
            if not await lane.num_unfinished_requests():
                break
            await asyncio.sleep(0.1)
        assert await lane.reset_prefix_cache()


def num_received_bytes(backend: DisaggregatedBackend) -> int:
    return sum(lane.stats.num_received_bytes for lane in backend._backends.values() if lane.stats)


def run_seeds_of_command(text: str | None, run: Callable[[int, int], Coroutine[Any, Any, None]], *, num: int) -> None:
    """Run the seeds that the command line names, by default `num` from 0 on. `text` is what its help says."""
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", type=int, default=num, help="number of seeds")
    arguments = parser.parse_args()
    asyncio.run(run(arguments.first, arguments.seeds))
