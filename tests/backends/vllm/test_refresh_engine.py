"""Retrieval in mid-answer on a real vLLM engine: each segment is what a fresh request continues its prompt with."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path

import pytest
import pytest_asyncio

from streamrag import AnswerChunk, Append, Chunk, Pipeline, Prompt, SamplingParams, VllmBackend
from streamrag.backends.vllm.client.answer_text import AnswerText
from streamrag.backends.vllm.client.sampling import to_vllm
from streamrag.core import BackendEvent, SourceEvent
from streamrag.refresh import Refresh
from streamrag.telemetry import ContextRefreshed
from streamrag.testing import make_tiny_llama

pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

QUESTION = "How does the printer handle thick paper?"
BLOCK = 32
PARAMS = SamplingParams(max_tokens=160, ignore_eos=True, extra={"logprobs": 1})


class GrowingSource:
    """Finds one more page at each retrieval of a query, and the earlier ones."""

    num_retrievals = 0

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        self.num_retrievals = 1 if query == QUESTION else self.num_retrievals + 1
        await asyncio.sleep(0.01)
        for number in range(self.num_retrievals):
            yield Append(Chunk(f"Printer {number} handles thick paper in tray {number * 7}. " * 6, f"{number}.md"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def pipeline(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pipeline]:
    folder: Path = tmp_path_factory.mktemp("models") / "model"
    model = make_tiny_llama(folder, hidden_size=128, num_layers=4, num_heads=4, max_model_len=4096)
    backend = VllmBackend(
        model, max_num_batched_tokens=256, kv_cache_bytes=1 << 27, engine_args={"dtype": "float32", "block_size": BLOCK}
    )
    async with Pipeline(GrowingSource(), backend) as pipeline:
        yield pipeline


class Seen:
    """The complete prompts that pass by, with their classes."""

    def __init__(self, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts: list[Prompt] = []
        self._generate = pipeline.backend.generate
        monkeypatch.setattr(pipeline.backend, "generate", self.generate)

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        async def noted() -> AsyncIterator[Prompt]:
            async for prompt in prompts:
                if prompt.is_complete:
                    self.prompts.append(prompt)
                yield prompt

        async with aclosing(noted()) as passing, aclosing(self._generate(passing, params)) as events:
            async for event in events:
                yield event


async def idle(pipeline: Pipeline) -> None:
    while await pipeline.backend.num_unfinished_requests():  # noqa: ASYNC110 - the engine does not say when
        await asyncio.sleep(0.01)


async def fresh(pipeline: Pipeline, prompt: tuple[int, ...], num_tokens: int) -> tuple[int, ...]:
    """The answer to the whole prompt as one request, with nothing computed before."""

    async def one() -> AsyncIterator[Prompt]:
        yield Prompt(prompt, 0, is_complete=True)

    assert await pipeline.backend.reset_prefix_cache()
    params = SamplingParams(max_tokens=num_tokens, ignore_eos=True)
    events = [event async for event in pipeline.backend.generate(one(), params)]
    return tuple(token for event in events if isinstance(event, AnswerChunk) for token in event.token_ids)


async def test_each_segment_is_the_one_shot_continuation_of_its_prompt(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        seen = Seen(pipeline, patch)
        refresh = Refresh(every_tokens=20, max_cost=100.0)
        stream = pipeline.events(QUESTION, refresh=refresh, params=PARAMS)
        events = [event async for event in stream]
    answer, segments = stream.result, stream.result.segments
    assert len(segments) > 2
    assert (len(answer.token_ids), answer.finish_reason) == (160, "length")
    answering = [prompt.token_ids for prompt in seen.prompts if prompt.request_class == "pool"]
    ends = [*(each.first_token for each in segments[1:]), 160]
    await idle(pipeline)
    for segment, end, prompt in zip(segments, ends, answering, strict=True):
        so_far = answer.token_ids[: segment.first_token]
        assert prompt[len(prompt) - len(so_far) :] == so_far
        new = answer.token_ids[segment.first_token : end]
        assert new == await fresh(pipeline, prompt, len(new))
    params = to_vllm(PARAMS, pipeline.backend._engine.vllm_config)  # type: ignore[attr-defined]
    text = AnswerText(pipeline.backend._engine.tokenizer, answering[0], params)  # type: ignore[attr-defined]
    assert answer.text == text.add(answer.token_ids, "length").text
    rows = [event.logprobs for event in events if getattr(event, "logprobs", None)]
    assert [token for row in rows for entry in row for token in list(entry)[:1]] == [*answer.token_ids]


async def test_only_the_question_and_the_answer_are_computed_when_a_new_context_is_used(pipeline: Pipeline) -> None:
    await idle(pipeline)
    await pipeline.backend.reset_prefix_cache()
    refresh = Refresh(every_tokens=60, max_retrievals=1, max_cost=100.0)
    stream = pipeline.events(QUESTION, refresh=refresh, params=PARAMS)
    (event,) = [event async for event in stream if isinstance(event, ContextRefreshed)]
    record = stream.result.record
    assert record is not None
    num_prompt = stream.result.num_prompt_tokens + event.num_answer_tokens
    assert record.num_prompt_tokens == num_prompt
    num_passages = num_prompt - event.num_recomputed + sum(len(chunk.text) for chunk in event.chunks) // 8
    assert record.num_from_cache >= num_passages // BLOCK * BLOCK, "the new passage was prefilled beside decoding"


async def test_a_query_that_is_stopped_leaves_no_request_in_the_engine(pipeline: Pipeline) -> None:
    for num_events in range(20, 60, 8):
        refresh = Refresh(every_tokens=8, max_cost=100.0)
        async with pipeline.events(QUESTION, refresh=refresh, params=PARAMS) as stream:
            for _ in range(num_events):
                await anext(stream)
        async with asyncio.timeout(120):
            await idle(pipeline)
    assert pipeline.num_queries == 0
