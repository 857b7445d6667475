"""Does a streamed prompt get the same answer as one that is sent whole, with many at once and too little memory?

    python -m studies.gpu.exact --device cuda|cpu [--engine-args JSON] [--invariant] [--alone] --json FILE

vLLM's own scheduler answers each prompt alone, then all at once, and in pieces through its prefix cache; these show
what rounding does. What a wrong KV entry would do is shown by a prompt of which one chunk of twelve is another.
`--alone` leaves all of these out but the first. Then all prompts are streamed at once with memory for a third of them,
so that the scheduler may have to preempt (`preempted` says how often), copy to host memory and recompute: appended, and
updated with chunks that are withdrawn again.

Compared are the log-probabilities of the answers, up to and including the first token that differs.
"""

import argparse
import asyncio
import gc
import json
import os
import random
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from itertools import accumulate, chain, takewhile
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, get_args

from streamrag.backends.vllm.client.arguments import scheduler_args
from streamrag.backends.vllm.client.processes import EngineProcesses
from streamrag.backends.vllm.client.sampling import to_vllm
from streamrag.backends.vllm.client.token_streams import TokenStreams
from streamrag.backends.vllm.facts import engine_facts
from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.core import AnswerChunk, Prompt, SamplingParams
from streamrag.engine.recompute_or_swap import EvictionMode
from streamrag.records import RequestRecord
from streamrag.support.files import write_atomic
from streamrag.testing import make_tiny_llama
from streamrag_bench.provenance import versions

from .engines import SIZES, Device, Sizes, set_environment

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

VOCABULARY = 512
NUM_CHUNKS = 12
MOST_GAP_S = 0.2
NUM_ANSWER_TOKENS = 12
GREEDY = SamplingParams(max_tokens=NUM_ANSWER_TOKENS, ignore_eos=True, extra={"logprobs": 1})
ALONE, AGAIN, TOGETHER, PIECES = "alone", "alone, again", "all at once", "in pieces"
APPENDED, UPDATED, OTHER = "streamed: appended", "streamed: updated", "one chunk of twelve another"
WAYS = (AGAIN, TOGETHER, PIECES, APPENDED, UPDATED, OTHER)
STREAMED = (APPENDED, UPDATED)

Chunks = list[list[int]]
Answer = list[tuple[int, float]]
"""Tokens and their log-probabilities."""
Answers = dict[str, list[Answer]]
"""The answers to all prompts, by the way in which they were computed."""


def make_chunks(rng: random.Random, sizes: Sizes) -> Chunks:
    return [make_chunk(rng, sizes) for _ in range(NUM_CHUNKS)]


def make_chunk(rng: random.Random, sizes: Sizes) -> list[int]:
    return [rng.randrange(3, VOCABULARY) for _ in range(rng.randrange(*sizes.chunk_tokens))]


def whole_of(chunks: Chunks) -> list[int]:
    return list(chain.from_iterable(chunks))


@asynccontextmanager
async def running(model: Path, engine_args: Mapping[str, Any]) -> AsyncIterator["AsyncLLM"]:
    async with aclosing(EngineProcesses(model)) as processes:
        yield await processes.start({"skip_tokenizer_init": True, **engine_args})


async def ask(engine: "AsyncLLM", name: str, prompt: Sequence[int]) -> Answer:
    """Return the answer to a prompt that vLLM computes, using what its prefix cache has."""
    from vllm.inputs.engine import tokens_input

    answer: Answer = []
    params = to_vllm(GREEDY, engine.vllm_config)
    async for output in engine.generate(tokens_input(list(prompt)), params, name):
        answer += pairs(output.outputs[0])
    return answer


async def by_vllm(engine: "AsyncLLM", prompts: Sequence[Chunks], sizes: Sizes, *, only_alone: bool) -> Answers:
    wholes = [whole_of(chunks) for chunks in prompts]
    if only_alone:
        return {ALONE: [await ask(engine, f"{ALONE} {number}", whole) for number, whole in enumerate(wholes)]}
    answers: Answers = {way: [] for way in (ALONE, AGAIN, PIECES, OTHER)}
    for number, (chunks, whole) in enumerate(zip(prompts, wholes, strict=True)):
        other = whole_of([*chunks[:3], make_chunk(random.Random(-number - 1), sizes), *chunks[4:]])
        for way, pieces in ((ALONE, [whole]), (AGAIN, [whole]), (PIECES, list(accumulate(chunks))), (OTHER, [other])):
            await engine.reset_prefix_cache()
            found = [await ask(engine, f"{way} {number} {index}", piece) for index, piece in enumerate(pieces)]
            answers[way].append(found[-1])
    await engine.reset_prefix_cache()
    asked = [ask(engine, f"{TOGETHER} {number}", whole) for number, whole in enumerate(wholes)]
    answers[TOGETHER] = list(await asyncio.gather(*asked))
    return answers


async def by_streaming(
    engine: "AsyncLLM", prompts: Sequence[Chunks], sizes: Sizes
) -> tuple[Answers, dict[str, dict[str, int]]]:
    """Stream all prompts at once, appending and then updating; also return each way's numbers of preemptions, and of
    tokens whose KV was saved to host memory and loaded from it."""
    streams = TokenStreams(engine)
    answers: Answers = {}
    counts: dict[str, dict[str, int]] = {name: {} for name in ("preempted", "tokens_saved", "tokens_loaded")}
    for way in STREAMED:
        await engine.reset_prefix_cache()
        streamed = [stream(streams, chunks, way, number, sizes) for number, chunks in enumerate(prompts)]
        found = await asyncio.gather(*streamed)
        answers[way] = [answer for answer, _ in found]
        preemptions = [preemption for _, record in found for preemption in record.preemptions]
        counts["preempted"][way] = len(preemptions)
        counts["tokens_saved"][way] = sum(preemption.num_tokens_saved for preemption in preemptions)
        counts["tokens_loaded"][way] = sum(record.num_loaded for _, record in found)
        print(way, {name: of[way] for name, of in counts.items()}, flush=True)
    return answers, counts


async def stream(
    streams: TokenStreams, chunks: Chunks, way: str, number: int, sizes: Sizes
) -> tuple[Answer, RequestRecord]:
    """Return the answer to a prompt whose chunks come at random times, and the engine's record of it."""
    rng = random.Random(f"{way} {number}")
    first, *rest = accumulate(chunks)
    answer: Answer = []
    async with streams.open(Prompt(tuple(first)), GREEDY) as growing:
        for prompt in rest:
            if way == UPDATED:
                await growing.update(Prompt((*prompt[: rng.randrange(len(prompt))], *make_chunk(rng, sizes))))
                await asyncio.sleep(rng.uniform(0, MOST_GAP_S))
            await growing.update(Prompt(tuple(prompt)))
            await asyncio.sleep(rng.uniform(0, MOST_GAP_S))
        await growing.finish()
        async for event in growing:
            if isinstance(event, AnswerChunk):
                answer += pairs(event)
    assert growing.record
    return answer, growing.record


def pairs(part: Any) -> Answer:
    return [(token, of[token].logprob) for token, of in zip(part.token_ids, part.logprobs, strict=True)]


async def measure(
    model: Path, engine_args: Mapping[str, Any], sizes: Sizes, eviction: EvictionMode, *, only_alone: bool = False
) -> dict[str, Any]:
    prompts = [make_chunks(random.Random(number), sizes) for number in range(sizes.num_prompts)]
    longest = NUM_CHUNKS * sizes.chunk_tokens[1] + sizes.chunk_tokens[1] + NUM_ANSWER_TOKENS
    engine_args = {"max_model_len": longest, **engine_args}
    async with running(model, engine_args) as engine:
        answers = await by_vllm(engine, prompts, sizes, only_alone=only_alone)
        print({way: compared(of, answers[ALONE]) for way, of in answers.items()}, flush=True)
        facts = {
            "dtype": str(engine.vllm_config.model_config.dtype).removeprefix("torch."),
            "is_async": bool(engine.vllm_config.scheduler_config.async_scheduling),
            "model_runner": engine_facts(engine.vllm_config).model_runner,
        }
        block_size = engine.vllm_config.cache_config.block_size
    gc.collect()
    num_tokens = sum(len(chunk) for chunks in prompts for chunk in chunks)
    assert num_tokens // 3 > longest
    short = {"num_gpu_blocks_override": num_tokens // 3 // block_size}
    host = {} if eviction == "recompute" else {"host_kv_bytes": 1 << 30}
    ours = scheduler_args("streaming", SchedulerOptions(policy="fcfs", eviction=eviction), {}, **host)
    async with running(model, {**engine_args, **short, **ours}) as engine:
        if engine.vllm_config.kv_transfer_config is None:
            eviction = "recompute"  # what is left of host memory where the trial of its copies failed
        streamed, counts = await by_streaming(engine, prompts, sizes)
    gc.collect()
    answers |= streamed
    rows = {way: compared(answers[way], answers[ALONE]) for way in WAYS if way in answers}
    sizes_of = {"num_prompts": len(prompts), "num_tokens": num_tokens, "block_size": block_size}
    return {**facts, "eviction": eviction, **sizes_of, **counts, "ways": rows}


def compared(answers: Sequence[Answer], alone: Sequence[Answer]) -> dict[str, Any]:
    found = [difference(answer, expected) for answer, expected in zip(answers, alone, strict=True)]
    num_same = sum([t for t, _ in a] == [t for t, _ in b] for a, b in zip(answers, alone, strict=True))
    return {"median": median(found), "least": min(found), "most": max(found), "num_same_tokens": num_same}


def difference(answer: Answer, expected: Answer) -> float:
    """Return the largest difference of log-probabilities, up to and including the first token that differs."""
    both = list(zip(answer, expected, strict=True))
    num_same = len(list(takewhile(lambda tokens: tokens[0][0] == tokens[1][0], both)))
    return max(abs(a - b) for (_, a), (_, b) in both[: num_same + 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--engine-args", type=json.loads, default={}, metavar="JSON", help="of vLLM")
    parser.add_argument("--eviction", choices=get_args(EvictionMode), default="swap", help="default: %(default)s")
    parser.add_argument("--invariant", action="store_true", help="with VLLM_BATCH_INVARIANT=1")
    parser.add_argument("--alone", action="store_true", help="compare streamed prompts with prompts alone only")
    parser.add_argument("--json", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    set_environment()
    os.environ["VLLM_BATCH_INVARIANT"] = str(int(arguments.invariant))
    device: Device = arguments.device
    sizes = SIZES[device]
    with tempfile.TemporaryDirectory(prefix="streamrag-") as folder:
        model = make_tiny_llama(Path(folder, "model"), vocab_size=VOCABULARY, **sizes.exact_model)
        row = asyncio.run(measure(model, arguments.engine_args, sizes, arguments.eviction, only_alone=arguments.alone))
    row |= {"versions": versions(), "engine_args": arguments.engine_args, "is_batch_invariant": arguments.invariant}
    write_atomic(arguments.json, json.dumps(row, indent=1) + "\n")
    print(json.dumps({"preempted": row["preempted"], **row["ways"]}, indent=1))


if __name__ == "__main__":
    main()
