"""What was prepared piece by piece on a real engine is answered as if it had come at once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from streamrag import SamplingParams, VllmBackend
from streamrag.telemetry import PrefillProgressed
from streamrag.testing import make_tiny_llama
from tests.serve.responses.talking import client_of, talking
from tests.serve.serving import Serving, serving

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

TEXTS = [" ".join(f"Printer {number} has tray {row}." for row in range(60)) for number in range(4)]
QUESTION = "Which printer has tray 7?"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def served(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Serving]:
    model: Path = make_tiny_llama(tmp_path_factory.mktemp("models") / "model", max_model_len=8192)
    backend = VllmBackend(model, dtype="float32", max_num_batched_tokens=256, kv_cache_bytes=1 << 28)
    params = SamplingParams(max_tokens=24, ignore_eos=True)
    async with serving(backend=backend, params=params) as served:
        yield served


async def unfinished(served: Serving, number: int = 0) -> None:
    async with asyncio.timeout(10):  # the engine hears of an abort between two of its steps
        while await served.backend.num_unfinished_requests() != number:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_pieces_and_a_fork_are_answered_as_the_whole_is(served: Serving) -> None:
    first, second, wrong, third = TEXTS
    async with talking(served) as talk:
        one = await talk.prepare(first)
        two = await talk.prepare(second, one)
        await talk.prepare(wrong, two)
        await unfinished(served, 1)
        three = await talk.prepare(third, two)
        pieces = await talk.create(QUESTION, three)
    in_pieces = served.watcher.answers[-1]
    assert in_pieces is not None
    assert in_pieces.num_invalidated > 0
    assert await served.backend.reset_prefix_cache()
    items = [{"role": "user", "content": text} for text in (first, second, third, QUESTION)]
    async with client_of(served) as client:
        whole = await client.responses.create(model="scripted", input=items, tool_choice="none")
    at_once = served.watcher.answers[-1]
    assert at_once is not None
    assert in_pieces.token_ids == at_once.token_ids
    assert len(at_once.token_ids) == 24
    assert pieces.output_text == whole.output_text
    assert pieces.usage.input_tokens == whole.usage.input_tokens
    assert pieces.usage.input_tokens_details.cached_tokens > 0 == whole.usage.input_tokens_details.cached_tokens
    await unfinished(served)


async def test_kv_is_computed_while_the_client_goes_on(served: Serving) -> None:
    assert await served.backend.reset_prefix_cache()
    served.watcher.events.clear()
    async with talking(served) as talk:
        first = await talk.prepare(TEXTS[0])
        async with asyncio.timeout(20):
            while not any(isinstance(event, PrefillProgressed) for event in served.watcher.events):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await talk.create(QUESTION, first)
    answer = served.watcher.answers[-1]
    assert answer is not None
    assert answer.record is not None
    assert answer.record.first_kv_s is not None
    assert answer.record.first_kv_s - answer.submitted_s < answer.timings.retrieval_s


async def test_a_client_that_leaves_frees_the_engine(served: Serving) -> None:
    async with talking(served) as talk:
        first = await talk.prepare(TEXTS[0])
        await unfinished(served, 1)
    await unfinished(served)
    async with talking(served) as talk:
        await talk.connection.response.create(
            input=QUESTION, previous_response_id=first, max_output_tokens=1000, stream_id="a"
        )
        while (await talk.connection.recv()).type != "response.output_text.delta":
            pass
    await unfinished(served)
