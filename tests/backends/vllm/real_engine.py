"""A real vLLM engine on the CPU, short of memory, and loads of streams whose answers can be checked."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from architectures import VOCABULARY
from architectures import make_model as make_architecture
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from streamrag.backends.vllm.client.processes import EngineProcesses
from streamrag.backends.vllm.client.sampling import to_vllm
from streamrag.backends.vllm.client.token_streams import TokenStream, TokenStreams, record_of
from streamrag.core import AnswerChunk, Prefilled, Prompt, SamplingParams
from streamrag.records import RequestRecord

NUM_ANSWER_TOKENS = 16
BLOCK_SIZE = 32  # attention on the CPU takes no smaller one
MAX_MODEL_LEN = 1_024
MOST_DIFFERENCE = 1e-5
GREEDY = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True, extra={"logprobs": 1})

Answer = list[tuple[int, float]]


def make_model(folder: Path) -> Path:
    """Random weights, large enough that the answers depend on every token of the prompt."""
    return make_architecture("Llama", folder)


@asynccontextmanager
async def running_engine(model: Path, monkeypatch: pytest.MonkeyPatch, **engine_args: Any) -> AsyncIterator[AsyncLLM]:
    # Else vLLM splits the context of few tokens over its threads, and adds up in another order where a request starts
    # from other tokens: differences of up to 1e-5 that have nothing to do with us.
    monkeypatch.setenv("VLLM_CPU_ATTN_SPLIT_KV", "0")
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    args = {
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "max_num_batched_tokens": 32,  # several steps per prompt, so that chunks come in between
        "max_num_seqs": 4,
        "block_size": BLOCK_SIZE,
        "kv_cache_memory_bytes": 1 << 30,
        "num_gpu_blocks_override": MAX_MODEL_LEN // BLOCK_SIZE + 10,  # hardly more than one request may need
        "scheduler_cls": "rotating.RotatingScheduler",
        **engine_args,
    }
    async with aclosing(EngineProcesses(model)) as processes:
        yield await processes.start(args)


@dataclass
class Load:
    """Streams, half of them appending and half of them replacing, and what became of them."""

    streams: TokenStreams
    prompts: dict[int, list[int]] = field(default_factory=dict)
    answers: dict[int, Answer] = field(default_factory=dict)
    records: list[RequestRecord] = field(default_factory=list)

    async def run(self, num_streams: int, at_once: int) -> None:
        """Open all streams, at most so many at once: a slow machine, too, computes what is changed then."""
        places = asyncio.Semaphore(at_once)
        await asyncio.gather(*(self._one(i, places) for i in range(num_streams)))

    async def _one(self, number: int, places: asyncio.Semaphore) -> None:
        rng = random.Random(number)
        shared = random.Random(number % 5)
        prompt = tokens(shared, 70) + tokens(rng, rng.randrange(20, 500))
        async with places, self.streams.open(Prompt(tuple(prompt)), GREEDY) as stream:
            for _ in range(rng.randrange(1, 5)):
                if (pause_s := rng.choice([0.0, 0.02, None, None])) is None:
                    assert isinstance(await anext(stream), Prefilled)
                else:
                    await asyncio.sleep(pause_s)
                prompt = await self._push(number, rng, stream, prompt)
            end = tokens(rng, rng.choice([0, 1, 20]))
            await stream.finish(end)
            answer = [pair async for event in stream if isinstance(event, AnswerChunk) for pair in pairs(event)]
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
        await stream.update(Prompt(tuple(new)))
        return new

    def count(self, name: str) -> int:
        values: list[Any] = [getattr(record, name) for record in self.records]
        return sum(value if isinstance(value, int) else len(value) for value in values)


def tokens(rng: random.Random, num: int) -> list[int]:
    return [rng.randrange(VOCABULARY) for _ in range(num)]


def pairs(event: AnswerChunk) -> Answer:
    return [(t, of[t].logprob) for t, of in zip(event.token_ids, event.logprobs, strict=True)]


async def check_rests(engine: AsyncLLM) -> None:
    """That the engine soon has no work left. Its last outputs reach us before it has noticed that."""
    for _ in range(100):
        if not await engine.engine_core.call_utility_async("has_work"):
            return
        await asyncio.sleep(0.1)
    pytest.fail("the engine has work left")


async def fresh(
    engine: AsyncLLM, name: str, prompt: list[int], answer: Answer, sampling: SamplingParams = GREEDY
) -> Answer:
    """The log-probabilities of the tokens of `answer`, by a request that is computed alone and from nothing."""
    params = to_vllm(sampling, engine.vllm_config)
    params.skip_reading_prefix_cache = True
    params.max_tokens = len(answer)
    found: Answer = []
    async for output in engine.generate(tokens_input(list(prompt)), params, name):
        (part,) = output.outputs
        found += [(t, of[t].logprob) for t, of in zip(part.token_ids, part.logprobs, strict=True)]
    return found


async def prompt_logprobs(engine: AsyncLLM, name: str, prompt: list[int]) -> tuple[list[float], RequestRecord | None]:
    """Return the log-probabilities of all tokens of `prompt` but the first, and the request's record.

    `VllmBackend` makes such a request of a complete prompt. vLLM computes it from its first token on.
    """
    params = to_vllm(replace(GREEDY, extra={"prompt_logprobs": 0}), engine.vllm_config)
    found: list[Any] = []
    async for output in engine.generate(tokens_input(list(prompt)), params, name):
        found = found or output.prompt_logprobs
    return [row[t].logprob for row, t in zip(found[1:], prompt[1:], strict=True)], record_of(output)


async def prompt_logprob_differences(engine: AsyncLLM, load: Load, num: int) -> tuple[float, list[RequestRecord]]:
    """Return the largest difference that `load` makes to the log-probabilities of `num` prompts, and their records."""
    rng = random.Random(7)
    prompts = [tokens(random.Random(i % 5), 70) + tokens(rng, rng.randrange(100, 800)) for i in range(num)]

    async def later(number: int) -> tuple[list[float], RequestRecord | None]:
        await asyncio.sleep(number / 50)  # soon: together they need more memory than there is
        return await prompt_logprobs(engine, f"beside-{number}", prompts[number])

    *beside, _ = await asyncio.gather(*map(later, range(num)), load.run(num, at_once=num))
    alone = [await prompt_logprobs(engine, f"alone-{i}", prompt) for i, prompt in enumerate(prompts)]
    largest = max(
        abs(a - b)
        for (ours, _), (theirs, _) in zip(beside, alone, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    )
    return largest, [record for _, record in beside if record is not None]


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


async def check_prompt_logprobs(engine: AsyncLLM) -> None:
    """Check that prompts beside streams that take their memory have their log-probabilities."""
    load = Load(TokenStreams(engine))
    largest, records = await prompt_logprob_differences(engine, load, 24)
    num_preemptions = sum(len(record.preemptions) for record in records)
    print(f"largest difference {largest:.2e} with {num_preemptions} preemptions")
    assert largest <= MOST_DIFFERENCE
    assert max(await differences(engine, load)) <= MOST_DIFFERENCE
    assert num_preemptions > 0
    assert all(record.num_from_cache == record.num_loaded == 0 for record in records)
