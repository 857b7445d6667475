"""A session on a real vLLM engine: what it answers is what a fresh request answers, and most of it is shared."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from streamrag import AnswerChunk, BackendEvent, Pipeline, Prompt, SamplingParams, SchedulerOptions, VllmBackend
from streamrag.records import read_records
from streamrag.sessions.question_options import DECISIVE_MARGIN
from streamrag.testing import ScriptedSource, make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the engine writes what became of each request, those of sessions' data too."""
    path = tmp_path_factory.mktemp("records") / "records.jsonl"
    path.touch()
    return path


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(tmp_path_factory: pytest.TempPathFactory, records: Path) -> AsyncIterator[Pipeline]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    backend = VllmBackend(  # room for three whole prompts, so that several sessions push each other out
        model,
        max_model_len=1024,
        kv_cache_bytes=3 << 20,
        host_kv_bytes=64 << 20,
        scheduler=SchedulerOptions(eviction="swap", records=str(records)),
        engine_args={"dtype": "float32", "block_size": BLOCK},
    )
    async with Pipeline(ScriptedSource([]), backend) as pipeline:
        yield pipeline


async def fresh(pipeline: Pipeline, token_ids: tuple[int, ...], params: SamplingParams = PARAMS) -> tuple[int, ...]:
    """The answer to the whole prompt as one request, with nothing computed before."""
    return tuple([token for chunk in await fresh_chunks(pipeline, token_ids, params) for token in chunk.token_ids])


async def fresh_chunks(
    pipeline: Pipeline, token_ids: tuple[int, ...], params: SamplingParams, *, is_shared: bool = False
) -> list[AnswerChunk]:
    async def one() -> AsyncIterator[Prompt]:
        yield Prompt(token_ids, 0, is_complete=True)

    assert await pipeline.backend.reset_prefix_cache() or is_shared
    return [event async for event in pipeline.backend.generate(one(), params) if isinstance(event, AnswerChunk)]


def logprobs_of(chunks: list[AnswerChunk]) -> list[dict[int, float]]:
    """Of each token of the answer, those of the likeliest."""
    return [
        {token_id: each.logprob for token_id, each in entry.items()}
        for chunk in chunks
        for entry in chunk.logprobs or ()
    ]


class Seen:
    """Whole prompts and what came back for them, as they pass by."""

    def __init__(self, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.requests: list[tuple[tuple[int, ...], list[AnswerChunk]]] = []
        self._generate = pipeline.backend.generate
        monkeypatch.setattr(pipeline.backend, "generate", self.generate)

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        chunks: list[AnswerChunk] = []

        async def noted() -> AsyncIterator[Prompt]:
            async for prompt in prompts:
                if prompt.is_complete:
                    self.requests.append((prompt.token_ids, chunks))
                yield prompt

        async with aclosing(self._generate(noted(), params)) as events:
            async for event in events:
                if isinstance(event, AnswerChunk):
                    chunks.append(event)
                yield event


async def idle(pipeline: Pipeline) -> None:
    while await pipeline.backend.num_unfinished_requests():  # noqa: ASYNC110 - the engine does not say when
        await asyncio.sleep(0.01)


async def test_answers_are_those_of_fresh_requests_while_data_come_and_slide(pipeline: Pipeline) -> None:
    rng = random.Random(7)
    asked: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
    shared: list[float] = []
    generate = pipeline.backend.generate
    prompts_of: dict[str, tuple[int, ...]] = {}

    async with pipeline.session(system="Watch.", window_tokens=400, slide_share=0.5) as session:

        async def ask(number: int) -> None:
            question = f"Question number {number}?"
            stream = session.ask(question, params=PARAMS)
            async for _ in stream:
                pass
            answer = stream.result
            assert answer.record is not None
            shared.append(answer.record.num_from_cache / answer.num_prompt_tokens)
            asked.append((prompts_of[question.rstrip("?")], answer.token_ids))

        def noting(prompts, params):
            async def noted():
                async for prompt in prompts:
                    if prompt.is_complete:
                        text = pipeline.backend.model.tokenizer.decode(prompt.token_ids)
                        prompts_of[text.rpartition("Question: ")[2].partition("?")[0]] = prompt.token_ids
                    yield prompt

            return generate(noted(), params)

        pipeline.backend.generate = noting  # the prompts as they reach the engine
        try:
            questions = []
            for i in range(60):
                await session.append(f"reading {i} is {rng.randrange(1000)}")
                if i % 4 == 3:
                    await asyncio.sleep(0.02)
                    questions.append(asyncio.create_task(ask(i)))
                if i % 16 == 15:  # somebody leaves in the middle
                    async with session.ask("Who leaves?", params=SamplingParams(max_tokens=200)) as left:
                        await anext(left)
            await asyncio.gather(*questions)
            assert session.state.num_slid > 0
        finally:
            pipeline.backend.generate = generate
    await idle(pipeline)
    assert len(asked) == 15
    for token_ids, answer in asked:
        assert await fresh(pipeline, token_ids) == answer
    print(f"shared with the session: {[round(share, 2) for share in shared]}")
    assert max(shared) > 0.5


async def test_a_question_pays_for_its_own_tokens_and_the_last_block(pipeline: Pipeline) -> None:
    async with pipeline.session(window_tokens=800) as session:
        version = 0
        for i in range(60):
            version = await session.append(f"reading {i} is {i * i}")
        stream = session.ask("Is it rising?", at_least=version, params=PARAMS)
        async for _ in stream:
            pass
        record, state = stream.result.record, session.state
    assert record is not None
    assert record.num_from_cache == state.num_tokens // BLOCK * BLOCK


async def test_a_watch_answers_yes_or_no_with_one_token_and_is_reused(pipeline: Pipeline) -> None:
    async with pipeline.session() as session:
        watch = session.watch("Any reading over 90?", answers=("yes", "no"), with_margin=True)
        version = await session.append("reading 1 is 95")
        answered = await watch.at_least(version)
        assert answered.text in ("yes", "no")
        assert answered.gap is not None
        assert answered.gap >= 0
        free = session.watch("Which?", with_margin=True)
        assert ((await free.at_least(version)).gap or 0) > 0
        assert len(answered.answer.token_ids) == 1
        stream = session.ask("Any reading over 90?", answers=("yes", "no"), at_least=version, with_margin=True)
        async for _ in stream:
            pass
        assert (stream.result.text, stream.result.gap) == (answered.text, answered.gap)
        assert stream.result.record is None  # the engine had nothing to do


LOGPROB_TOLERANCE = 1e-3
"""Between a prompt computed piece by piece and in one go: float32 sums in another order, through two layers."""


async def worst_difference(pipeline: Pipeline, seen: Seen, params: SamplingParams) -> float:
    """Between the log-probabilities that came back and those of fresh requests, whose tokens are the same."""
    worst = 0.0
    for token_ids, chunks in seen.requests:
        alone = await fresh_chunks(pipeline, token_ids, params)
        tokens, expected = ([token for chunk in each for token in chunk.token_ids] for each in (chunks, alone))
        assert tokens == expected
        for one, other in zip(logprobs_of(chunks), logprobs_of(alone), strict=True):
            assert len(one.keys() & other.keys()) >= 4  # of five: the last may have a twin
            worst = max(worst, *(abs(one[token] - other[token]) for token in one.keys() & other.keys()))
    return worst


async def test_log_probabilities_are_those_of_fresh_requests_after_appends_and_slides(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, extra={"logprobs": 5})
    seen = Seen(pipeline, monkeypatch)
    rng = random.Random(3)
    num_shared = 0
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(pipeline.session(system=f"Watch {i}.", window_tokens=800)) for i in range(5)
        ]
        for _ in range(4):
            for session in sessions:
                version = 0
                for _ in range(60):
                    version = await session.append(f"reading {rng.randrange(10_000)}")
                stream = session.ask("Is it rising?", at_least=version, params=params)
                _ = [chunk async for chunk in stream]
                record = stream.result.record
                assert record is not None
                num_shared += record.num_from_cache > 0
        assert all(session.state.num_slid for session in sessions)
    monkeypatch.undo()
    await idle(pipeline)
    assert len(seen.requests) == 20
    worst = await worst_difference(pipeline, seen, params)
    print(f"{num_shared} shared; worst {worst:.1e}")
    assert num_shared
    assert worst < LOGPROB_TOLERANCE


async def test_log_probabilities_are_those_of_fresh_requests_after_data_came_back_from_host_memory(
    pipeline: Pipeline, records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = SamplingParams(max_tokens=6, ignore_eos=True, extra={"logprobs": 5})
    await idle(pipeline)
    num_before = len(read_records(records))
    seen = Seen(pipeline, monkeypatch)
    rng = random.Random(5)
    shared: list[int] = []
    async with AsyncExitStack() as stack:
        sessions = [
            await stack.enter_async_context(pipeline.session(system=f"Swap {i}.", window_tokens=950)) for i in range(6)
        ]
        for num in (60, 4, 4):  # each time that its turn comes, the others have taken its memory
            for session in sessions:
                version = 0
                for _ in range(num):
                    version = await session.append(f"reading {rng.randrange(10_000)}")
                stream = session.ask("Is it rising?", at_least=version, params=params)
                _ = [chunk async for chunk in stream]
                record = stream.result.record
                assert record is not None
                shared.append(record.num_from_cache)
        assert not any(session.state.num_slid for session in sessions)
    monkeypatch.undo()
    await idle(pipeline)
    of_data = [record for record in read_records(records)[num_before:] if record.outcome != "finished"]
    loaded = [record.num_loaded for record in of_data]
    worst = await worst_difference(pipeline, seen, params)
    print(f"loaded {loaded}; shared {shared}; worst {worst:.1e}")
    assert sum(loaded) > 0
    assert worst < LOGPROB_TOLERANCE


async def test_answers_of_several_tokens_are_told_apart_by_as_few_as_that_takes(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ("rising quickly", "rising slowly", "falling", "neither of them")
    spellings = [tuple(pipeline.backend.model.tokenizer.encode(text)) for text in answers]
    num_passes = []
    async with pipeline.session(window_tokens=400) as session:
        for i in range(10):
            version = await session.append(f"reading {i} is {i * 7919 % 100}")
            seen = Seen(pipeline, monkeypatch)
            stream = session.ask("Rising?", answers=answers, at_least=version, with_margin=True)
            _ = [chunk async for chunk in stream]
            monkeypatch.undo()
            num_passes.append(len(seen.requests))
            prompt = min((token_ids for token_ids, _ in seen.requests), key=len)
            found = stream.result
            own = spellings[answers.index(found.text)]
            assert own[: len(found.token_ids)] == found.token_ids
            so_far = await logprob_of(pipeline, prompt, found.token_ids)
            rivals = [await logprob_of(pipeline, prompt, each) for each in spellings if each != own]
            assert so_far >= max(rivals) - LOGPROB_TOLERANCE  # each token more makes it less likely
            assert len(found.token_ids) == len(own) or (found.gap or 0) >= DECISIVE_MARGIN
    print(f"passes: {num_passes}, tokens of the answers: {[len(each) for each in spellings]}")


async def logprob_of(pipeline: Pipeline, prompt: tuple[int, ...], answer: tuple[int, ...]) -> float:
    """Of these tokens together, one pass for each."""
    total = 0.0
    for i, token_id in enumerate(answer):
        params = SamplingParams(max_tokens=1, extra={"allowed_token_ids": [token_id], "logprob_token_ids": [token_id]})
        chunks = await fresh_chunks(pipeline, prompt + answer[:i], params, is_shared=True)
        total += logprobs_of(chunks)[0][token_id]
    return total
