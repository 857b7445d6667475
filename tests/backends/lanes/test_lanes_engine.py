"""Two prefill lanes and two decode lanes on real CPU engines, compared with fresh requests at each generated position.

One set of engines for the whole module. The last tests kill lanes, one after another.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import aclosing

import pytest
import pytest_asyncio
from lane_engines import (
    BLOCK_SIZE,
    GREEDY,
    answer,
    check_exact,
    check_nothing_pinned,
    growing,
    is_alive,
    needs_nixl,
    num_received_bytes,
    pairs,
    started_lanes,
    tokens,
)
from lane_schedules import run_schedule

from streamrag.backends.lanes import DisaggregatedBackend
from streamrag.backends.lanes.kv_transfer import KvTransfer
from streamrag.backends.vllm import VllmBackend
from streamrag.core import AnswerChunk, Prefilled, Prompt, SamplingParams
from streamrag.errors import BackendError, ConfigurationError

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module"), needs_nixl]

transfers: list[KvTransfer] = []


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[DisaggregatedBackend]:
    async with started_lanes(tmp_path_factory.mktemp("models") / "model", transfers.append) as lanes:
        yield lanes


# ------------------------------------------------------------------------------------------------------------ exactness


async def test_a_prompt_that_grows_is_answered_in_another_engine(backend: DisaggregatedBackend) -> None:
    prompt = tokens("append", 300)
    transfers.clear()
    num_before = num_received_bytes(backend)
    found, last = await answer(backend, growing(prompt[:100], prompt[:250], prompt, pause_s=0.1))
    await check_exact(backend, prompt, found)
    (transfer,) = transfers
    assert (transfer.num_tokens, transfer.num_blocks) == (300, 10)
    assert transfer.prefill_lane.startswith("prefill-")
    assert transfer.decode_lane.startswith("decode-")
    # The record of the prefill and the parameters of the hand-over came with the same output.
    assert last.record is not None
    assert last.record.num_prompt_tokens == 300
    block_bytes = 2 * 4 * 128 * 4 * BLOCK_SIZE  # key and value, layers, hidden size, float32
    assert num_received_bytes(backend) - num_before == transfer.num_blocks * block_bytes


async def test_a_prompt_that_is_replaced_is_answered_as_a_fresh_one(backend: DisaggregatedBackend) -> None:
    old, new = tokens("old", 280), tokens("new", 150)
    prompt = old[:130] + new
    found, _ = await answer(backend, growing(old, old[:40] + new, prompt, pause_s=0.1))
    await check_exact(backend, prompt, found)


async def test_a_prompt_that_comes_at_once_and_short_ones_are_answered(backend: DisaggregatedBackend) -> None:
    for num in (1, BLOCK_SIZE - 1, BLOCK_SIZE, BLOCK_SIZE + 1):
        prompt = tokens(num, num)
        found, _ = await answer(backend, growing(prompt))
        await check_exact(backend, prompt, found)


async def test_streams_that_evict_each_other_are_answered_as_fresh_ones(backend: DisaggregatedBackend) -> None:
    """Prompts for which there is no memory are completed first, and so take that of the others, which are idle."""
    prompts = [tokens(number, 500 + 10 * number) for number in range(8)]
    num_computed, num_answered = dict[int, int](), 0
    has_news = asyncio.Condition()

    def is_short(number: int) -> bool:
        return num_computed[number] < 449  # of 450: the last one is computed with what follows

    def may_complete(number: int) -> bool:
        all_are_known = len(num_computed) == len(prompts)
        return all_are_known and (is_short(number) or num_answered >= sum(map(is_short, num_computed)))

    async def growing_prompts(number: int) -> AsyncIterator[Prompt]:
        yield Prompt(tuple(prompts[number][:450]))
        async with has_news:
            await has_news.wait_for(lambda: may_complete(number))
        yield Prompt(tuple(prompts[number]), 450, is_complete=True)

    async def ask(number: int) -> list[AnswerChunk]:
        nonlocal num_answered
        found = list[AnswerChunk]()
        async with aclosing(backend.generate(growing_prompts(number), GREEDY)) as events:
            async for event in events:
                if isinstance(event, Prefilled):
                    async with has_news:
                        num_computed.setdefault(number, event.num_tokens)
                        has_news.notify_all()
                else:
                    found.append(event)
        async with has_news:
            num_answered += 1
            has_news.notify_all()
        return found

    answers = await asyncio.gather(*map(ask, range(len(prompts))))
    for prompt, chunks in zip(prompts, answers, strict=True):
        await check_exact(backend, prompt, [pair for chunk in chunks for pair in pairs(chunk)])
    records = [chunks[-1].record for chunks in answers if chunks[-1].record]
    assert sum(len(record.preemptions) for record in records) > 0
    await check_nothing_pinned(backend)


async def test_blocks_that_the_decode_lane_has_are_not_sent_again(backend: DisaggregatedBackend) -> None:
    prompt = tokens("twice", 10 * BLOCK_SIZE)
    num_bytes = [num_received_bytes(backend)]
    for end in ([5], [6, 7]):
        found, _ = await answer(backend, growing(prompt + end))
        await check_exact(backend, prompt + end, found)
        num_bytes.append(num_received_bytes(backend))
    first, second = num_bytes[1] - num_bytes[0], num_bytes[2] - num_bytes[1]
    assert second * 11 == first  # only the last block


async def test_several_answers_and_log_probabilities_of_the_prompt(backend: DisaggregatedBackend) -> None:
    prompt = tokens("several", 100)
    indexes, params = set(), SamplingParams(max_tokens=4, n=3, temperature=1.0)
    async with aclosing(backend.generate(growing(prompt[:60], prompt), params)) as events:
        async for event in events:
            if isinstance(event, AnswerChunk):
                indexes.add(event.index)
    assert indexes == {0, 1, 2}
    params = SamplingParams(max_tokens=4, extra={"prompt_logprobs": 0})
    async with aclosing(backend.generate(growing(prompt[:60], prompt), params)) as events:
        rows = [e.prompt_logprobs for e in [e async for e in events] if isinstance(e, AnswerChunk)]
    assert len(rows[0]) == len(prompt)


@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(extra={"min_p": 7}),
        SamplingParams(json_schema={"type": "no such type"}),
        SamplingParams(extra={"structured_outputs": {"regex": "("}}),
    ],
    ids=["min_p", "schema", "regex"],
)
async def test_wrong_parameters_are_refused_before_the_first_prompt(
    backend: DisaggregatedBackend, params: SamplingParams
) -> None:
    async def never() -> AsyncIterator[Prompt]:
        pytest.fail("the prompts are read")
        yield

    with pytest.raises(ConfigurationError, match="refuses"):
        await answer(backend, never(), params)


async def test_an_answer_follows_its_schema(backend: DisaggregatedBackend) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
    texts: list[str] = []
    prompt = tokens("schema", 100)
    params = SamplingParams(max_tokens=40, json_schema=schema)
    async with aclosing(backend.generate(growing(prompt[:60], prompt), params)) as events:
        texts += [event.text async for event in events if isinstance(event, AnswerChunk)]
    assert "".join(texts).lstrip().startswith("{")


# ------------------------------------------------------------------------------------------------ waiting, cancellation


async def test_a_full_decode_lane_makes_others_wait_and_loses_none(backend: DisaggregatedBackend) -> None:
    prompts = [tokens(("full", number), 200) for number in range(10)]
    answers = await asyncio.gather(*(answer(backend, growing(p[:100], p)) for p in prompts))
    for prompt, (found, _) in zip(prompts, answers, strict=True):
        await check_exact(backend, prompt, found)
    await check_nothing_pinned(backend)


@pytest.mark.parametrize("moment", ["first prompt", "prefilled", "first token", 0.0, 0.01, 0.03, 0.1, 0.2, 0.4])
async def test_a_query_that_is_cancelled_leaves_no_block_behind(
    backend: DisaggregatedBackend, moment: str | float
) -> None:
    """Cancel it there, or so many seconds after its complete prompt came."""
    prompt = tokens(moment, 400)
    reached = asyncio.Event()

    async def prompts() -> AsyncIterator[Prompt]:
        if moment == "first prompt":
            reached.set()
        async for each in growing(prompt[:200], prompt, pause_s=0.2):
            if each.is_complete and isinstance(moment, float):
                asyncio.get_running_loop().call_later(moment, reached.set)
            yield each

    async def read() -> None:
        async with aclosing(backend.generate(prompts(), GREEDY)) as events:
            async for event in events:
                if moment == ("first token" if isinstance(event, AnswerChunk) else "prefilled"):
                    reached.set()

    reading = asyncio.create_task(read())
    reading.add_done_callback(lambda _: reached.set())  # a prompt that is not computed in time has no Prefilled
    await reached.wait()
    reading.cancel()
    await asyncio.wait([reading])
    await check_nothing_pinned(backend)


async def test_random_schedules_are_answered_as_fresh_requests(backend: DisaggregatedBackend) -> None:
    for seed in range(8):  # `make fuzz OF=lanes` runs 200
        await run_schedule(backend, seed)
    await check_nothing_pinned(backend)


# ---------------------------------------------------------------------------------------------------------- dead lanes


async def kill(lane: VllmBackend) -> None:
    """Return when this process has noticed it."""
    for process_id in lane.process_ids:
        os.kill(process_id, signal.SIGKILL)
    while is_alive(lane):  # noqa: ASYNC110
        await asyncio.sleep(0.05)


async def test_a_query_is_computed_again_when_its_prefill_lane_dies(backend: DisaggregatedBackend) -> None:
    prompt = tokens("prefill dies", 300)
    goes_on = asyncio.Event()

    async def prompts() -> AsyncIterator[Prompt]:
        yield Prompt(tuple(prompt[:200]), 0, is_complete=False)
        await goes_on.wait()
        yield Prompt(tuple(prompt), 200, is_complete=True)

    found: list[tuple[int, float]] = []
    async with aclosing(backend.generate(prompts(), GREEDY)) as events:
        assert isinstance(await anext(events), Prefilled)
        (lane,) = [name for name in ("prefill-0", "prefill-1") if backend._prefill_lanes._chooser.in_use() == {name}]
        await kill(backend._backends[lane])
        goes_on.set()
        async for event in events:
            if isinstance(event, AnswerChunk):
                found += pairs(event)
    await check_exact(backend, prompt, found)
    backend.check_health()


async def test_an_answer_of_which_tokens_were_shown_fails_with_its_decode_lane(backend: DisaggregatedBackend) -> None:
    prompt = tokens("decode dies", 200)
    params = SamplingParams(max_tokens=500, ignore_eos=True, extra={"logprobs": 1})
    async with aclosing(backend.generate(growing(prompt), params)) as events:
        while not isinstance(await anext(events), AnswerChunk):
            pass
        (lane,) = backend._decode_lanes._chooser.in_use()
        await kill(backend._backends[lane])
        with pytest.raises(BackendError, match=r"decode-\d was lost: .* after \d+ tokens were shown: ask again"):
            _ = [event async for event in events]
    found, _ = await answer(backend, growing(prompt[:50], prompt))
    await check_exact(backend, prompt, found)
    await check_nothing_pinned(backend)


async def test_without_a_lane_of_a_kind_queries_fail_at_once(backend: DisaggregatedBackend) -> None:
    prompt = tokens("all die", 100)
    for lane in (backend._backends["decode-0"], backend._backends["decode-1"]):
        if is_alive(lane):
            await kill(lane)
    with pytest.raises(BackendError, match=r"decode-0: .*; decode-1: "):
        await answer(backend, growing(prompt))
    with pytest.raises(BackendError):
        backend.check_health()
    await check_nothing_pinned(backend)
