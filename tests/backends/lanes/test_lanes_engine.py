"""Two prefill lanes and two decode lanes on real CPU engines, compared with fresh requests at each generated position.

One set of engines for the whole module. The last tests kill lanes, one after another.
"""

import asyncio
import importlib.util
import os
import random
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing

import pytest
import pytest_asyncio

from streamrag.backends.lanes import LanesBackend
from streamrag.backends.lanes import backend as lanes_module
from streamrag.backends.lanes.backend import HandOver
from streamrag.backends.vllm import VllmBackend
from streamrag.core import AnswerChunk, BackendEvent, Prefilled, Prompt, SamplingParams, common_prefix_len
from streamrag.errors import BackendError, ConfigurationError
from streamrag.testing import make_tiny_llama

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("nixl") is None,
        reason="NIXL is not installed: pip install --no-deps nixl nixl-cu12 works without a GPU",
    ),
]

BLOCK_SIZE, MAX_MODEL_LEN, VOCABULARY = 32, 1_024, 400
NUM_TOKENS = 16
GREEDY = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, extra={"logprobs": 1})
MOST_DIFFERENCE = 1e-5
PATIENCE_S = 60  # for a lease of 30 s to end

hand_overs: list[HandOver] = []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LanesBackend]:
    folder = tmp_path_factory.mktemp("models") / "model"
    model = make_tiny_llama(folder, hidden_size=128, num_layers=4, num_heads=4)

    def lane(kind: str) -> VllmBackend:
        return VllmBackend(
            model,
            lane=kind,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=64,  # several steps per prompt
            max_num_seqs=4,
            kv_cache_bytes=1 << 26,
            collect_stats=kind == "decode",
            # Little more than one prompt may need: streams are evicted, and answers wait for memory.
            engine_args={"num_gpu_blocks_override": MAX_MODEL_LEN // BLOCK_SIZE + 10},
        )

    prefill, decode = [lane("prefill"), lane("prefill")], [lane("decode"), lane("decode")]
    lanes = LanesBackend(prefill, decode, max_open=2, on_hand_over=hand_overs.append)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")
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
    backend: LanesBackend | VllmBackend, prompts: AsyncIterator[Prompt], params: SamplingParams = GREEDY
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


async def check_exact(backend: LanesBackend, prompt: Sequence[int], found: list[tuple[int, float]]) -> None:
    """Compare with a request of one living engine that takes nothing from its cache."""
    engine = next(lane for lane in backend._backends.values() if lane.lane == "decode" and is_alive(lane))
    params = SamplingParams(
        max_tokens=NUM_TOKENS, ignore_eos=True, extra={"logprobs": 1, "skip_reading_prefix_cache": True}
    )
    expected, _ = await answer(engine, growing(prompt), params)
    assert [t for t, _ in found] == [t for t, _ in expected]
    assert max(abs(a - b) for (_, a), (_, b) in zip(found, expected, strict=True)) <= MOST_DIFFERENCE


def is_alive(lane: VllmBackend) -> bool:
    try:
        lane.check_health()
    except BackendError:
        return False
    return True


async def check_nothing_pinned(backend: LanesBackend) -> None:
    """Wait until no engine has work, and check that no block is held: the cache cannot be reset otherwise."""
    for lane in backend._backends.values():
        if is_alive(lane):
            async with asyncio.timeout(PATIENCE_S):
                while await lane.num_unfinished_requests():
                    await asyncio.sleep(0.1)
            assert await lane.reset_prefix_cache()


def num_received_bytes(backend: LanesBackend) -> int:
    return sum(lane.stats.num_received_bytes for lane in backend._backends.values() if lane.stats)


# ------------------------------------------------------------------------------------------------------------ exactness


async def test_a_prompt_that_grows_is_answered_in_another_engine(backend: LanesBackend) -> None:
    prompt = tokens("append", 300)
    hand_overs.clear()
    num_before = num_received_bytes(backend)
    found, last = await answer(backend, growing(prompt[:100], prompt[:250], prompt, pause_s=0.1))
    await check_exact(backend, prompt, found)
    (passed,) = hand_overs
    assert (passed.num_tokens, passed.num_blocks) == (300, 10)
    assert passed.prefill_lane.startswith("prefill-")
    assert passed.decode_lane.startswith("decode-")
    # The record of the prefill and the parameters of the hand-over came with the same output.
    assert last.record is not None
    assert last.record.num_prompt_tokens == 300
    block_bytes = 2 * 4 * 128 * 4 * BLOCK_SIZE  # key and value, layers, hidden size, float32
    assert num_received_bytes(backend) - num_before == passed.num_blocks * block_bytes


async def test_a_prompt_that_is_replaced_is_answered_as_a_fresh_one(backend: LanesBackend) -> None:
    old, new = tokens("old", 280), tokens("new", 150)
    prompt = old[:130] + new
    found, _ = await answer(backend, growing(old, old[:40] + new, prompt, pause_s=0.1))
    await check_exact(backend, prompt, found)


async def test_a_prompt_that_comes_at_once_and_short_ones_are_answered(backend: LanesBackend) -> None:
    for num in (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1):
        prompt = tokens(num, num)
        found, _ = await answer(backend, growing(prompt))
        await check_exact(backend, prompt, found)


async def test_streams_that_evict_each_other_are_answered_as_fresh_ones(backend: LanesBackend) -> None:
    prompts = [tokens(number, 500 + 10 * number) for number in range(8)]
    answers = await asyncio.gather(*(answer(backend, growing(p[:200], p[:450], p, pause_s=0.5)) for p in prompts))
    for prompt, (found, _) in zip(prompts, answers, strict=True):
        await check_exact(backend, prompt, found)
    records = [last.record for _, last in answers if last.record]
    assert sum(len(record.preemptions) for record in records) > 0
    await check_nothing_pinned(backend)


async def test_blocks_that_the_decode_lane_has_are_not_sent_again(backend: LanesBackend) -> None:
    prompt = tokens("twice", 10 * BLOCK_SIZE)
    num_bytes = [num_received_bytes(backend)]
    for end in ([5], [6, 7]):
        found, _ = await answer(backend, growing(prompt + end))
        await check_exact(backend, prompt + end, found)
        num_bytes.append(num_received_bytes(backend))
    first, second = (b - a for a, b in zip(num_bytes, num_bytes[1:], strict=False))
    assert second * 11 == first  # only the last block


async def test_several_answers_and_log_probabilities_of_the_prompt(backend: LanesBackend) -> None:
    prompt = tokens("several", 100)
    indexes = set()
    async with aclosing(backend.generate(growing(prompt[:60], prompt), SamplingParams(max_tokens=4, n=3))) as events:
        async for event in events:
            if isinstance(event, AnswerChunk):
                indexes.add(event.index)
    assert indexes == {0, 1, 2}
    params = SamplingParams(max_tokens=4, extra={"prompt_logprobs": 0})
    async with aclosing(backend.generate(growing(prompt[:60], prompt), params)) as events:
        rows = [e.prompt_logprobs for e in [e async for e in events] if isinstance(e, AnswerChunk)]
    assert len(rows[0]) == len(prompt)


async def test_wrong_parameters_are_refused_before_the_first_prompt(backend: LanesBackend) -> None:
    async def never() -> AsyncIterator[Prompt]:
        pytest.fail("the prompts are read")
        yield

    with pytest.raises(ConfigurationError, match="refuses"):
        await answer(backend, never(), SamplingParams(extra={"min_p": 7}))


# ------------------------------------------------------------------------------------------------- waiting, cancellation


async def test_a_full_decode_lane_makes_others_wait_and_loses_none(backend: LanesBackend) -> None:
    prompts = [tokens(("full", number), 200) for number in range(10)]
    answers = await asyncio.gather(*(answer(backend, growing(p[:100], p)) for p in prompts))
    for prompt, (found, _) in zip(prompts, answers, strict=True):
        await check_exact(backend, prompt, found)
    await check_nothing_pinned(backend)


@pytest.mark.parametrize("moment", ["first prompt", "prefilled", "complete", "first token"])
async def test_a_query_that_is_cancelled_leaves_no_block_behind(backend: LanesBackend, moment: str) -> None:
    prompt = tokens(moment, 400)
    events = backend.generate(growing(prompt[:200], prompt, pause_s=0.2), GREEDY)
    reached = asyncio.Event()

    async def read() -> None:
        async with aclosing(events):
            if moment == "first prompt":
                reached.set()
            async for event in events:
                is_answer = isinstance(event, AnswerChunk)
                if isinstance(event, Prefilled) and moment == "prefilled" or is_answer and moment == "first token":
                    reached.set()

    async def complete() -> None:
        while moment == "complete" and not backend._backends["decode-0"].stats:
            await asyncio.sleep(0)
        await asyncio.sleep(0.3)
        reached.set()

    reading = asyncio.create_task(read())
    waiting = asyncio.create_task(complete()) if moment == "complete" else None
    await reached.wait()
    reading.cancel()
    await asyncio.wait([reading, *([waiting] if waiting else [])])
    await check_nothing_pinned(backend)


async def test_kv_that_was_computed_too_long_ago_is_not_fetched(
    backend: LanesBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = tokens("lease", 100)
    monkeypatch.setattr(lanes_module, "LATEST_S", -1.0)
    with pytest.raises(BackendError, match="4 lanes were lost.*may have given up the KV"):
        await answer(backend, growing(prompt))
    monkeypatch.undo()
    found, _ = await answer(backend, growing(prompt))
    await check_exact(backend, prompt, found)


# ---------------------------------------------------------------------------------------------------------- dead lanes


def kill(lane: VllmBackend) -> None:
    for process_id in lane.process_ids:
        os.kill(process_id, signal.SIGKILL)


async def test_a_query_is_computed_again_when_its_prefill_lane_dies(backend: LanesBackend) -> None:
    prompt = tokens("prefill dies", 300)
    goes_on = asyncio.Event()

    async def prompts() -> AsyncIterator[Prompt]:
        yield Prompt(tuple(prompt[:200]), 0, is_complete=False)
        await goes_on.wait()
        yield Prompt(tuple(prompt), 200, is_complete=True)

    found: list[tuple[int, float]] = []
    async with aclosing(backend.generate(prompts(), GREEDY)) as events:
        assert isinstance(await anext(events), Prefilled)
        (lane,) = [name for name in ("prefill-0", "prefill-1") if backend._prefill._chooser.in_use() == {name}]
        kill(backend._backends[lane])
        goes_on.set()
        async for event in events:
            if isinstance(event, AnswerChunk):
                found += pairs(event)
    await check_exact(backend, prompt, found)
    backend.check_health()


async def test_an_answer_of_which_tokens_were_shown_fails_with_its_decode_lane(backend: LanesBackend) -> None:
    prompt = tokens("decode dies", 200)
    params = SamplingParams(max_tokens=500, ignore_eos=True, extra={"logprobs": 1})
    with pytest.raises(BackendError, match=r"decode-\d was lost: .* after \d+ tokens were shown: ask again"):
        async with aclosing(backend.generate(growing(prompt), params)) as events:
            async for event in events:
                if isinstance(event, AnswerChunk):
                    (lane,) = backend._decode._chooser.in_use()
                    kill(backend._backends[lane])
    found, _ = await answer(backend, growing(prompt[:50], prompt))
    await check_exact(backend, prompt, found)
    await check_nothing_pinned(backend)


async def test_without_a_lane_of_a_kind_queries_fail_at_once(backend: LanesBackend) -> None:
    prompt = tokens("all die", 100)
    for name in ("decode-0", "decode-1"):
        if is_alive(backend._backends[name]):
            kill(backend._backends[name])
    async with asyncio.timeout(PATIENCE_S):
        while any(is_alive(backend._backends[name]) for name in ("decode-0", "decode-1")):
            await asyncio.sleep(0.1)
    with pytest.raises(BackendError, match="decode-0: .*; decode-1: "):
        await answer(backend, growing(prompt))
    with pytest.raises(BackendError):
        backend.check_health()
    await check_nothing_pinned(backend)
