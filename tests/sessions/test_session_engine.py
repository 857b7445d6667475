"""A session on a real vLLM engine: what it answers is what a fresh request answers, and most of it is shared."""

import asyncio
import random
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from streamrag import AnswerChunk, Pipeline, Prompt, SamplingParams, VllmBackend
from streamrag.testing import ScriptedSource, make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280), pytest.mark.asyncio(loop_scope="module")]

BLOCK = 32
PARAMS = SamplingParams(max_tokens=12, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pipeline]:
    model = make_tiny_llama(tmp_path_factory.mktemp("model"))
    backend = VllmBackend(
        model, max_model_len=1024, dtype="float32", kv_cache_bytes=64 << 20, engine_args={"block_size": BLOCK}
    )
    async with Pipeline(ScriptedSource([]), backend) as pipeline:
        yield pipeline


async def fresh(pipeline: Pipeline, token_ids: tuple[int, ...]) -> tuple[int, ...]:
    """The answer to the whole prompt as one request, with nothing computed before."""

    async def one() -> AsyncIterator[Prompt]:
        yield Prompt(token_ids, 0, is_complete=True)

    assert await pipeline.backend.reset_prefix_cache()
    answer: list[int] = []
    async for event in pipeline.backend.generate(one(), PARAMS):
        if isinstance(event, AnswerChunk):
            answer += event.token_ids
    return tuple(answer)


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
    while await pipeline.backend.num_unfinished_requests():  # noqa: ASYNC110 - the engine does not say when
        await asyncio.sleep(0.01)
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


async def test_yes_or_no_is_one_token_ahead_of_being_asked(pipeline: Pipeline) -> None:
    async with pipeline.session() as session:
        watch = session.watch("Any reading over 90?", answers=("yes", "no"), with_gap=True)
        version = await session.append("reading 1 is 95")
        answered = await watch.at_least(version)
        assert answered.text in ("yes", "no")
        assert answered.gap is not None
        assert answered.gap >= 0
        free = session.watch("Which?", with_gap=True)
        assert ((await free.at_least(version)).gap or 0) > 0
        assert len(answered.answer.token_ids) == 1
        stream = session.ask("Any reading over 90?", answers=("yes", "no"), at_least=version, with_gap=True)
        async for _ in stream:
            pass
        assert (stream.result.text, stream.result.gap) == (answered.text, answered.gap)
        assert stream.result.record is None  # the engine had nothing to do
