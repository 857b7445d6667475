"""A draft: time to the first token on the real CPU engine, for four ways to use context that arrives in chunks.

    python bench/engine_ttft.py

16 streams at once append six chunks each; every arm gets the same chunks at the same times. `ttft_after_retrieval_s`
runs from the last chunk to the first token. Random weights: the answers mean nothing, the work is real.
"""

import asyncio
import os
import random
import statistics
import tempfile
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from vllm import AsyncEngineArgs, SamplingParams
from vllm.engine.protocol import StreamingInput
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.async_llm import AsyncLLM

from streamrag.backends.token_streams import StreamedTokens, TokenStreams
from streamrag.backends.warming import warm_then_generate
from streamrag.core import AnswerChunk, Prompt
from streamrag.core import SamplingParams as OurSamplingParams

NUM_STREAMS, NUM_CHUNKS, NUM_ROUNDS = 16, 6, 2
CHUNK_TOKENS = (100, 500)
MEAN_GAP_S = 1.5
BLOCK_SIZE, MAX_MODEL_LEN, VOCABULARY = 32, 4_096, 1_000
STREAMING = "streamrag.backends.scheduler.streaming_scheduler"

Arrivals = list[tuple[float, list[int]]]
Arm = Callable[[AsyncLLM, Arrivals], Awaitable[float]]


def load(seed: int) -> list[Arrivals]:
    rng = random.Random(seed)
    streams = []
    for _ in range(NUM_STREAMS):
        at_s = rng.uniform(0, 3)
        arrivals = []
        for _ in range(NUM_CHUNKS):
            arrivals.append((at_s, [rng.randrange(VOCABULARY) for _ in range(rng.randrange(*CHUNK_TOKENS))]))
            at_s += rng.expovariate(1 / MEAN_GAP_S)
        streams.append(arrivals)
    return streams


async def chunks(arrivals: Arrivals, start_s: float) -> AsyncIterator[tuple[list[int], bool]]:
    """Each chunk when it arrives, and whether it is the last."""
    for index, (at_s, token_ids) in enumerate(arrivals):
        await asyncio.sleep(max(start_s + at_s - time.monotonic(), 0))
        yield token_ids, index == len(arrivals) - 1


def params(max_tokens: int = 4) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, detokenize=False)


async def first_token_s(engine: AsyncLLM, prompt: list[int], sampling: SamplingParams) -> float:
    found_s = 0.0
    async for output in engine.generate(tokens_input(prompt), sampling, uuid.uuid4().hex):
        if not found_s and output.outputs[0].token_ids:
            found_s = time.monotonic()
    return found_s


async def not_streaming(engine: AsyncLLM, arrivals: Arrivals) -> float:
    prompt: list[int] = []
    async for token_ids, _ in chunks(arrivals, time.monotonic()):
        prompt += token_ids
    end_s = time.monotonic()
    return await first_token_s(engine, prompt, params()) - end_s


async def warming(engine: AsyncLLM, arrivals: Arrivals) -> float:
    end_s = 0.0

    async def prompts() -> AsyncIterator[Prompt]:
        nonlocal end_s
        prompt: list[int] = []
        async for token_ids, is_last in chunks(arrivals, time.monotonic()):
            num_shared, prompt = len(prompt), prompt + token_ids
            end_s = time.monotonic()
            yield Prompt(tuple(prompt), num_shared, is_last)

    async def prefill(token_ids: tuple[int, ...]) -> None:
        await first_token_s(engine, list(token_ids), params(1))

    async def generate(token_ids: tuple[int, ...]) -> AsyncGenerator[AnswerChunk, None]:
        async for output in engine.generate(tokens_input(list(token_ids)), params(), uuid.uuid4().hex):
            yield AnswerChunk("", tuple(output.outputs[0].token_ids))

    found_s = 0.0
    events = warm_then_generate(prompts(), prefill=prefill, generate=generate, block_size=BLOCK_SIZE)
    async with aclosing(events):
        async for event in events:
            if isinstance(event, AnswerChunk) and event.token_ids and not found_s:
                found_s = time.monotonic()
    return found_s - end_s


async def stock_sessions(engine: AsyncLLM, arrivals: Arrivals) -> float:
    """vLLM's own: each chunk is answered with one token, which is dropped when the next comes."""
    end_s, found_s = 0.0, 0.0
    is_last_sent = False

    async def inputs() -> AsyncGenerator[StreamingInput, None]:
        nonlocal end_s, is_last_sent
        async for token_ids, is_last in chunks(arrivals, time.monotonic()):
            end_s = time.monotonic()
            is_last_sent = is_last
            yield StreamingInput(tokens_input(token_ids), params(4 if is_last else 1))

    num_finished = 0
    async for output in engine.generate(inputs(), params(), uuid.uuid4().hex):
        (part,) = output.outputs
        is_of_last = num_finished >= NUM_CHUNKS - 1
        if is_last_sent and is_of_last and not found_s and part.token_ids:
            found_s = time.monotonic()
        num_finished += part.finish_reason is not None
    return found_s - end_s


async def ours(engine: AsyncLLM, arrivals: Arrivals) -> float:
    arriving = chunks(arrivals, time.monotonic())
    token_ids, is_last = await anext(arriving)
    end_s, found_s = 0.0, 0.0
    async with TokenStreams(engine).open(token_ids, OurSamplingParams(max_tokens=4, ignore_eos=True)) as stream:
        async for token_ids, is_last in arriving:
            end_s = time.monotonic()
            await (stream.finish(token_ids) if is_last else stream.append(token_ids))
        async for event in stream:
            if isinstance(event, StreamedTokens) and event.token_ids and not found_s:
                found_s = time.monotonic()
    return found_s - end_s


@asynccontextmanager
async def running(model: str, num_blocks: int, scheduler: str | None) -> AsyncIterator[AsyncLLM]:
    engine = AsyncLLM.from_engine_args(
        AsyncEngineArgs(
            model=model,
            skip_tokenizer_init=True,
            dtype="float32",
            max_model_len=MAX_MODEL_LEN,
            max_num_batched_tokens=1_024,
            max_num_seqs=NUM_STREAMS,
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=num_blocks,
            enforce_eager=True,
            scheduler_cls=scheduler,
            disable_log_stats=True,
        )
    )
    try:
        await first_token_s(engine, list(range(600)), params())  # the first steps take seconds
        yield engine
    finally:
        await asyncio.to_thread(engine.shutdown)


async def measure(engine: AsyncLLM, arm: Arm) -> list[float]:
    times_s: list[float] = []
    for seed in range(NUM_ROUNDS):
        times_s += await asyncio.gather(*(arm(engine, arrivals) for arrivals in load(seed)))
        await engine.reset_prefix_cache()
    return sorted(times_s)


def make_model(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=MAX_MODEL_LEN,
    )
    LlamaForCausalLM(config).save_pretrained(folder)


async def main() -> None:
    num_all = NUM_STREAMS * NUM_CHUNKS * sum(CHUNK_TOKENS) // 2 // BLOCK_SIZE
    arms: dict[str, tuple[str | None, Arm]] = {
        "not streaming": (None, not_streaming),
        "prefix cache warming": (None, warming),
        "stock vLLM sessions": (None, stock_sessions),
        "streamrag, fcfs": (STREAMING, ours),
    }
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        for name, num_blocks in (("ample memory", 2 * num_all), ("memory for a third", num_all // 3)):
            print(f"{name}: {num_blocks} blocks of {BLOCK_SIZE}; ttft_after_retrieval_s     P50     P95")
            for scheduler in (None, STREAMING):
                async with running(folder, num_blocks, scheduler) as engine:
                    for label, (needed, arm) in arms.items():
                        if needed != scheduler:
                            continue
                        try:
                            times_s = await asyncio.wait_for(measure(engine, arm), 60)
                        except TimeoutError:
                            print(f"    {label:<24} did not come to an end in 60 s", flush=True)
                            break
                        p95_s = times_s[int(0.95 * len(times_s))]
                        print(f"    {label:<24}{statistics.median(times_s):>32.3f}{p95_s:>8.3f}", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    asyncio.run(main())
