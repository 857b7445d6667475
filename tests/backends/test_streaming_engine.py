"""Streams into a real vLLM engine on the CPU, compared with fresh requests at every generated position."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm import AsyncEngineArgs
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from streamrag.backends.streaming import stream_then_generate
from streamrag.backends.token_streams import StreamedTokens, TokenStream, TokenStreams
from streamrag.backends.vllm_params import to_vllm
from streamrag.core import Prefilled, Prompt, SamplingParams
from streamrag.errors import BackendError, ConfigurationError, PromptTooLongError, SourceError
from streamrag.records import RequestRecord

pytestmark = [pytest.mark.engine, pytest.mark.timeout(280)]

NUM_STREAMS = 64
NUM_ANSWER_TOKENS = 16
VOCABULARY = 1_000
BLOCK_SIZE = 32  # attention on the CPU takes no smaller one
MAX_MODEL_LEN = 1_024
MOST_DIFFERENCE = 1e-5
GREEDY = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True, extra={"logprobs": 1})

Answer = list[tuple[int, float]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights, large enough that the answers depend on every token of the prompt."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4_096,
        initializer_range=0.2,
        bos_token_id=None,
        eos_token_id=None,
    )
    folder = tmp_path_factory.mktemp("model")
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@asynccontextmanager
async def running_engine(model: Path, scheduler: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[AsyncLLM]:
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=str(model),
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=32,  # several steps per prompt, so that chunks come in between
            max_num_seqs=4,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=MAX_MODEL_LEN // BLOCK_SIZE + 10,  # hardly more than one request may need
            enforce_eager=True,
            scheduler_cls=scheduler,
            disable_log_stats=True,
        )
    )
    try:
        await fresh(engine, "first", [1, 2, 3], [(0, 0.0)])  # the first step takes seconds
        yield engine
    finally:
        resources = engine.engine_core.resources
        tasks = [task for task in (engine.output_handler, resources.output_queue_task) if task]
        await asyncio.to_thread(engine.shutdown)
        await asyncio.wait(tasks)
        await asyncio.to_thread(resources.ctx.destroy, 0)  # vLLM leaves its sockets open


@dataclass
class Load:
    """Streams, half of them appending and half of them replacing, and what became of them."""

    streams: TokenStreams
    prompts: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)

    async def run(self, num_streams: int) -> None:
        await asyncio.gather(*(self._one(i) for i in range(num_streams)))

    async def _one(self, number: int) -> None:
        rng = random.Random(number)
        shared = random.Random(number % 5)
        prompt = tokens(shared, 70) + tokens(rng, rng.randrange(20, 500))
        await asyncio.sleep(rng.uniform(0, 6))
        async with self.streams.open(prompt, GREEDY) as stream:
            for _ in range(rng.randrange(1, 5)):
                await asyncio.sleep(rng.choice([0.0, 0.01, 0.03, 1.0]))
                prompt = await self._push(number, rng, stream, prompt)
            end = tokens(rng, rng.choice([0, 1, 20]))
            await stream.finish(end)
            answer = [pair async for event in stream if isinstance(event, StreamedTokens) for pair in pairs(event)]
            assert stream.record is not None
            self.records.append(stream.record)
        self.prompts[number], self.answers[number] = prompt + end, answer

    async def _push(self, number: int, rng: random.Random, stream: TokenStream, prompt: list[int]) -> list[int]:
        if number % 2:
            new = tokens(rng, rng.randrange(1, 100))
            await stream.append(new)
            return prompt + new
        kept = rng.choice([0, len(prompt), rng.randrange(len(prompt) + 1)])
        new = prompt[:kept] + tokens(rng, rng.randrange(0 if kept else 1, 100))
        await stream.update(new)
        return new

    def count(self, name: str) -> int:
        values: list[Any] = [getattr(record, name) for record in self.records]
        return sum(value if isinstance(value, int) else len(value) for value in values)


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(num)]


def pairs(event: StreamedTokens) -> Answer:
    return [(t, of[t].logprob) for t, of in zip(event.token_ids, event.logprobs, strict=True)]


async def fresh(engine: AsyncLLM, name: str, prompt: list[int], answer: Answer) -> Answer:
    """The log-probabilities of the tokens of `answer`, by a request that is computed alone and from nothing."""
    params = to_vllm(GREEDY, engine.vllm_config)
    params.skip_reading_prefix_cache = True
    params.max_tokens = len(answer)
    found: Answer = []
    async for output in engine.generate(tokens_input(list(prompt)), params, name):
        (part,) = output.outputs
        found += [(t, of[t].logprob) for t, of in zip(part.token_ids, part.logprobs, strict=True)]
    return found


async def differences(engine: AsyncLLM, load: Load) -> list[float]:
    """Per stream, the largest difference of log-probabilities; infinite where the tokens differ."""
    largest = []
    for number, answer in load.answers.items():
        expected = await fresh(engine, f"fresh-{number}", load.prompts[number], answer)
        same = [t for t, _ in answer] == [t for t, _ in expected]
        largest.append(
            max(abs(a - b) for (_, a), (_, b) in zip(answer, expected, strict=True)) if same else float("inf")
        )
    return largest


async def test_streams_answer_as_fresh_requests_do_under_every_policy_and_short_of_memory(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_engine(model, "rotating.RotatingScheduler", monkeypatch) as engine:
        load = Load(TokenStreams(engine))
        await load.run(NUM_STREAMS)
        largest = await differences(engine, load)
        assert max(largest) <= MOST_DIFFERENCE
        assert len(largest) == NUM_STREAMS
        assert all(len(answer) == NUM_ANSWER_TOKENS for answer in load.answers.values())
        counts = {name: load.count(name) for name in ("preemptions", "num_invalidated", "num_recomputed")}
        num_in_work = sum(num_mid_prefill(record) for record in load.records)
        print(f"largest difference {max(largest):.2e}, chunks in mid-prefill {num_in_work}, {counts}")
        assert counts["preemptions"] >= 10
        assert counts["num_invalidated"] >= 1_000
        assert num_in_work >= 10
        assert not await engine.engine_core.call_utility_async("has_work")
        await check_limits(engine, load.streams)
        await check_prompts(engine, load.streams)
        assert engine.output_processor.get_num_unfinished_requests() == 0


def num_mid_prefill(record: RequestRecord) -> int:
    """Chunks that came while the prompt before them was in work."""
    return sum(0 < new.num_computed < old.num_tokens - 1 for old, new in pairwise(record.chunks))


async def check_prompts(engine: AsyncLLM, streams: TokenStreams) -> None:
    """An iterator of prompts is answered; what it raises is raised."""
    rng = random.Random(2)
    first, last = tokens(rng, 100), tokens(rng, 80)
    is_prefilled = asyncio.Event()

    async def prompts(error: Exception | None = None, has_last: bool = True) -> AsyncIterator[Prompt]:
        yield Prompt(tuple(first), 0, is_complete=False)
        await is_prefilled.wait()
        if error:
            raise error
        if has_last:
            yield Prompt(tuple(last), 0, is_complete=True)

    answer: list[int] = []
    async for event in stream_then_generate(prompts(), streams, GREEDY):
        if isinstance(event, Prefilled):
            assert event.num_tokens == len(first) - 1
            is_prefilled.set()
        else:
            answer += event.token_ids
    assert answer == [t for t, _ in await fresh(engine, "prompts", last, [(t, 0.0) for t in answer])]
    with pytest.raises(SourceError, match="no page"):
        [event async for event in stream_then_generate(prompts(SourceError("no page")), streams, GREEDY)]
    with pytest.raises(BackendError, match="without a complete one"):
        [event async for event in stream_then_generate(prompts(has_last=False), streams, GREEDY)]


async def check_limits(engine: AsyncLLM, streams: TokenStreams) -> None:
    """Prompts that are too long, and streams that are left."""
    rng = random.Random(1)
    # Too long: refused here, and the stream goes on.
    async with streams.open(tokens(rng, 50), GREEDY) as stream:
        with pytest.raises(PromptTooLongError, match="1050 tokens"):
            await stream.append(tokens(rng, 1_000))
        await stream.finish()
        answer = [pair async for event in stream if isinstance(event, StreamedTokens) for pair in pairs(event)]
        assert len(answer) == NUM_ANSWER_TOKENS
        with pytest.raises(BackendError, match="complete"):
            await stream.append([1])
    # Too long past the client's check: the engine fails this stream alone.
    async with streams.open(tokens(rng, 50), GREEDY) as stream:
        stream._max_model_len = 10_000
        await stream.append(tokens(rng, 990))
        await stream.finish()
        with pytest.raises(BackendError, match="does not fit the model's length"):
            [event async for event in stream]
    # Without a tokenizer there is no text to stop at.
    async with streams.open(tokens(rng, 50), GREEDY) as stream:
        with pytest.raises(ConfigurationError, match=r"stop=.*skip_tokenizer_init"):
            await stream.finish(params=SamplingParams(stop=("x",)))
    # Left in the middle: nothing stays behind.
    async with streams.open(tokens(rng, 500), GREEDY):
        await asyncio.sleep(0.01)


async def test_one_stale_block_would_be_noticed(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running_engine(model, "rotating.StaleScheduler", monkeypatch) as engine:
        load = Load(TokenStreams(engine))
        await load.run(12)
        largest = await differences(engine, load)
        print(f"with a stale block: {sorted(largest)}")
        assert max(largest) > 1_000 * MOST_DIFFERENCE
