"""Drafts on a real vLLM engine on the CPU: the same tokens, log-probabilities and distribution as without them."""

import asyncio
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from math import sqrt
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from real_engine import (
    GREEDY,
    MAX_MODEL_LEN,
    MOST_DIFFERENCE,
    NUM_ANSWER_TOKENS,
    Answer,
    check_rests,
    fresh,
    make_model,
    pairs,
    running_engine,
    tokens,
)
from vllm.v1.engine.async_llm import AsyncLLM

from streamrag import Append, Chunk, Pipeline
from streamrag.backends.vllm.client.streaming import stream_then_generate
from streamrag.backends.vllm.client.token_streams import TokenStreams
from streamrag.backends.vllm.scheduler_options import draft_config
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Prompt, RequestClass, SamplingParams
from streamrag.records import RequestRecord
from streamrag.telemetry import DraftUse, QueryEvent, TokensGenerated
from streamrag.testing import CodePointTokenizer, ScriptedSource

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

PROMPT = tokens(random.Random(5), 200)
NUM_SAMPLES = 600
MOST_DEVIATIONS = 4.0


@asynccontextmanager
async def drafting_engine(model: Path, **engine_args: str) -> AsyncIterator[AsyncLLM]:
    args = {"max_num_seqs": 16, "max_num_batched_tokens": 256, "speculative_config": draft_config(16)}
    with pytest.MonkeyPatch.context() as patch:
        async with running_engine(model, patch, **args, **engine_args) as engine:
            yield engine


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(model: Path) -> AsyncIterator[AsyncLLM]:
    async with drafting_engine(model) as engine:
        yield engine


async def answer(
    engine: AsyncLLM,
    draft: Sequence[int] = (),
    params: SamplingParams = GREEDY,
    request_class: RequestClass = "pool",
    prompt: list[int] = PROMPT,
) -> tuple[Answer, RequestRecord]:
    """The answer to a prompt that comes in two pieces, the second one with the draft."""
    streams = TokenStreams(engine)
    async with streams.open(Prompt(tuple(prompt[:-20]), request_class=request_class), params) as stream:
        await stream.update(Prompt(tuple(prompt), is_complete=True, draft=tuple(draft)))
        found: Answer = []
        async for event in stream:
            if isinstance(event, AnswerChunk):
                found += pairs(event) if event.logprobs else [(token, 0.0) for token in event.token_ids]
        assert stream.record is not None
        return found, stream.record


def token_ids(found: Answer) -> list[int]:
    return [token for token, _ in found]


def largest_difference(found: Answer, expected: Answer) -> float:
    assert token_ids(found) == token_ids(expected)
    return max(abs(a - b) for (_, a), (_, b) in zip(found, expected, strict=True))


async def test_drafts_good_and_bad_change_no_token_and_no_log_probability(engine: AsyncLLM) -> None:
    plain, record = await answer(engine)
    expected = await fresh(engine, "fresh", PROMPT, plain)
    assert (record.num_verified, record.num_accepted) == (0, 0)
    right = token_ids(plain)
    other = [(token + 1) % 100 for token in right]
    drafts = {
        "right": right,
        "wrong at once": other,
        "wrong in the middle": [*right[:8], other[8], *right[9:]],
        "without a token": [*right[:5], *right[6:]],
        "too long": right * 3,
        "short": right[:4],
    }
    verified = {}
    for name, draft in drafts.items():
        found, record = await answer(engine, draft)
        assert largest_difference(found, expected) <= MOST_DIFFERENCE, name
        verified[name] = (record.num_verified, record.num_accepted)
    assert verified["right"] == (len(right) - 2, len(right) - 2)
    assert verified["wrong at once"] == (0, 0)
    assert verified["wrong in the middle"][1] >= 7


@pytest.mark.parametrize("min_tokens", [0, 12])
async def test_drafts_change_neither_where_a_stop_token_ends_an_answer_nor_its_least_number_of_tokens(
    engine: AsyncLLM, min_tokens: int
) -> None:
    """A draft that has a stop token before the least number of tokens is left there."""
    whole = token_ids((await answer(engine))[0])
    number = next(i for i in range(4, 12) if whole[i] not in whole[:i])
    params = replace(GREEDY, extra={**GREEDY.extra, "stop_token_ids": [whole[number]], "min_tokens": min_tokens})
    plain, _ = await answer(engine, params=params)
    if min_tokens:
        assert len(plain) >= min_tokens
    else:
        assert token_ids(plain) == whole[: number + 1]
    for draft in (token_ids(plain), whole, [*whole[: number + 1], *whole]):
        found, record = await answer(engine, draft, params)
        assert largest_difference(found, plain) <= MOST_DIFFERENCE
        assert record.num_verified > 0


async def test_answers_with_drafts_are_exact_beside_drafts_of_drafts(engine: AsyncLLM) -> None:
    rng = random.Random(6)
    prompts = [tokens(rng, rng.randrange(40, 300)) for _ in range(12)]
    plain = [(await answer(engine, prompt=prompt))[0] for prompt in prompts]
    classes: list[RequestClass] = ["pool", "draft"]

    async def again(number: int) -> float:
        await asyncio.sleep(rng.uniform(0, 0.5))
        draft = token_ids(plain[number])
        draft[rng.randrange(len(draft))] = rng.randrange(100)
        found, _ = await answer(engine, draft, request_class=classes[number % 2], prompt=prompts[number])
        return largest_difference(found, plain[number])

    assert max(await asyncio.gather(*map(again, range(len(prompts))))) <= MOST_DIFFERENCE
    await check_rests(engine)


AT_RANDOM: dict[str, dict[str, Any]] = {
    "top_k": {"top_k": 3},
    "top_k and top_p": {"top_k": 3, "top_p": 0.9},
    "top_k and penalties": {"top_k": 3, "extra": {"presence_penalty": 1.0, "repetition_penalty": 1.2}},
    "top_k and few tokens": {"top_k": 3, "extra": {"allowed_token_ids": [5, 6, 7, 8], "min_tokens": 4}},
    "top_k of more than there are": {"top_k": 1 << 20},
    "top_p": {"top_p": 0.5},
    "penalties": {"extra": {"frequency_penalty": 1.0}},
}


@pytest.mark.parametrize("name", AT_RANDOM)
async def test_a_random_answer_ends_no_engine_and_leaves_greedy_ones_beside_it_as_they_are(
    engine: AsyncLLM, name: str
) -> None:
    """Alone, with a draft, several in a batch, and as a plain request."""
    plain, _ = await answer(engine)
    params = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, temperature=1.0, ignore_eos=True, **AT_RANDOM[name])
    assert len((await answer(engine, params=params))[0]) == NUM_ANSWER_TOKENS
    (beside, _), *_ = await asyncio.gather(
        answer(engine, token_ids(plain)),
        answer(engine, token_ids(plain), params),
        answer(engine, params=params),
        answer(engine, params=replace(GREEDY, extra={"logprobs": 3, "presence_penalty": 1.0})),
    )
    assert largest_difference(beside, plain) <= MOST_DIFFERENCE
    params = replace(params, extra={**params.extra, "logprobs": 1})
    assert len(await fresh(engine, f"plain {name}", PROMPT, plain, params)) == NUM_ANSWER_TOKENS
    await check_rests(engine)


async def test_a_random_answer_has_only_the_top_k_most_probable_tokens(engine: AsyncLLM) -> None:
    plain, _ = await answer(engine)
    params = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, temperature=1.0, ignore_eos=True, extra={"logprobs": 1})
    assert largest_difference((await answer(engine, params=replace(params, top_k=1)))[0], plain) <= MOST_DIFFERENCE
    ranks = []
    async with TokenStreams(engine).open(Prompt(tuple(PROMPT)), replace(params, max_tokens=200, top_k=3)) as stream:
        await stream.finish()
        async for event in stream:
            if isinstance(event, AnswerChunk):
                ranks += [of[token].rank for token, of in zip(event.token_ids, event.logprobs, strict=True)]
    assert set(ranks) == {1, 2, 3}


async def test_no_draft_is_verified_on_a_cpu_while_a_request_samples_at_random(engine: AsyncLLM) -> None:
    plain, _ = await answer(engine)
    at_random = SamplingParams(max_tokens=200, temperature=1.0, ignore_eos=True)
    async with TokenStreams(engine).open(Prompt(tuple(PROMPT)), at_random) as stream:
        await stream.finish()
        await anext(aiter(stream))
        found, record = await answer(engine, token_ids(plain))
        assert token_ids(found) == token_ids(plain)
        assert record.num_verified == 0
        _, record = await answer(engine, token_ids(plain), at_random)
        assert record.num_verified == 0
    found, record = await answer(engine, token_ids(plain))
    assert token_ids(found) == token_ids(plain)
    assert record.num_accepted == record.num_verified > 0


@pytest.mark.long
async def test_sampling_with_a_draft_has_the_distribution_of_sampling_without(model: Path) -> None:
    """The first two tokens of the greedy answer come about as often, with a draft of them as without."""
    mended = {"scheduler_cls": "mended.MendedScheduler", "worker_extension_cls": "mended.MendedWorker"}
    async with drafting_engine(model, **mended) as engine:
        greedy, _ = await answer(engine)
        expected = token_ids(greedy)[:2]

        async def share(num: int, temperature: float, draft: list[int]) -> tuple[float, int, int]:
            params = SamplingParams(max_tokens=3, temperature=temperature, ignore_eos=True)
            answers = await asyncio.gather(*(answer(engine, draft, params) for _ in range(num)))
            num_equal = sum(token_ids(found)[:2] == expected for found, _ in answers)
            records = [record for _, record in answers]
            return num_equal / num, sum(r.num_verified for r in records), sum(r.num_accepted for r in records)

        for temperature in (1.0, 0.5, 0.25, 0.12, 0.06, 0.03):
            if (await share(32, temperature, []))[0] >= 0.25:  # else hardly any draft would be verified
                break
        without, _, _ = await share(NUM_SAMPLES, temperature, [])
        drafted, num_verified, num_accepted = await share(NUM_SAMPLES, temperature, expected)
        error = sqrt(2 * max(without * (1 - without), 0.01) / NUM_SAMPLES)
        print(f"temperature {temperature}: {without:.3f} without, {drafted:.3f} with a draft, +- {error:.3f}")
        assert 0.1 < without < 0.95
        assert abs(drafted - without) <= MOST_DEVIATIONS * error
        assert 0 < num_accepted < num_verified


class EngineBackend:
    """The engine, as a backend of pipelines, whose tokens are characters."""

    def __init__(self, engine: AsyncLLM) -> None:
        self.model = ModelInfo("Llama", CodePointTokenizer(), MAX_MODEL_LEN, verifies_drafts=True)
        self._engine = engine

    def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        return stream_then_generate(prompts, TokenStreams(self._engine), params)


async def test_an_answer_that_is_asked_for_again_with_itself_as_draft_takes_one_pass(engine: AsyncLLM) -> None:
    source = ScriptedSource([Append(Chunk("Paper jams when damp.", "printers.md"))])
    async with Pipeline(source, EngineBackend(engine)) as pipeline:

        async def ask(draft: tuple[int, ...]) -> tuple[Any, int]:
            """Return the result and the number of outputs: that of steps, or fewer if outputs arrive at once."""
            stream = pipeline.events("Why?", draft=draft, params=SamplingParams(max_tokens=16, ignore_eos=True))
            events = [event async for event in stream]
            return stream.result, sum(isinstance(event, TokensGenerated) for event in events)

        first, _ = await ask(())
        assert (len(first.token_ids), first.draft) == (16, None)
        again, num_outputs = await ask(first.token_ids)
        assert again.token_ids == first.token_ids
        assert num_outputs <= 3, "the first token, one pass over all others, and perhaps the end by itself"
        assert (again.draft.num_drafted, again.draft.num_verified, again.draft.num_accepted) == (16, 14, 14)
        changed = (*first.token_ids[:8], (first.token_ids[8] + 1) % 100, *first.token_ids[9:])
        again, num_outputs = await ask(changed)
        assert again.token_ids == first.token_ids
        assert num_outputs < 10


async def test_a_draft_whose_context_stayed_is_the_answer_and_nothing_more_is_computed(engine: AsyncLLM) -> None:
    """Also if it verified the draft of an earlier context. The stream of the query is aborted before it answers."""
    pages = [Chunk(f"Paper jams {where}.", f"{where}.md") for where in ("when damp", "at night")]
    params = SamplingParams(max_tokens=16, ignore_eos=True, extra={"logprobs": 0})

    class DraftedSource:
        async def stream(self, query: str) -> AsyncIterator[Append]:
            """Yield the pages, each when the draft that is based on those before is finished."""
            for page in pages:
                yield Append(page)
                async with asyncio.timeout(60):
                    for num_requests in (2, 1):  # the query and its draft, then the query
                        while engine.output_processor.get_num_unfinished_requests() != num_requests:  # noqa: ASYNC110
                            await asyncio.sleep(0.001)

    async with Pipeline(DraftedSource(), EngineBackend(engine), overlap=True) as pipeline:
        stream = pipeline.events("Why?", answer_ahead=True, params=params)
        events = [event async for event in stream]
    ahead = stream.result
    async with Pipeline(ScriptedSource([Append(page) for page in pages]), EngineBackend(engine)) as pipeline:
        plain = pipeline.events("Why?", overlap=False, params=params)
        plain_events = [event async for event in plain]
    assert ahead.token_ids == plain.result.token_ids
    assert ahead.draft == DraftUse(16, 16, 16)
    for event, other in zip(logprobs_of(events), logprobs_of(plain_events), strict=True):
        assert abs(event - other) <= MOST_DIFFERENCE
    await check_rests(engine)
    assert engine.output_processor.get_num_unfinished_requests() == 0


def logprobs_of(events: Sequence[QueryEvent]) -> list[float]:
    generated = [event for event in events if isinstance(event, TokensGenerated)]
    return [entry[token].logprob for e in generated for token, entry in zip(e.token_ids, e.logprobs, strict=True)]


async def test_a_draft_that_is_withdrawn_leaves_nothing_behind(engine: AsyncLLM) -> None:
    async def prompts() -> AsyncIterator[Prompt]:
        yield Prompt(tuple(PROMPT), 0, is_complete=True, request_class="draft", draft=(1, 2, 3))

    for num_chunks in (0, 1, 3):
        events: Any = stream_then_generate(prompts(), TokenStreams(engine), GREEDY)
        for _ in range(num_chunks):
            while not isinstance(await anext(events), AnswerChunk):
                pass
        await events.aclose()
    await asyncio.sleep(0.2)
    await check_rests(engine)
    assert engine.output_processor.get_num_unfinished_requests() == 0
