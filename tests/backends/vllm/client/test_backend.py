"""One engine for the whole module, so these tests also check that each leaves it as it was.

It runs our scheduler, to which a warming request is a plain one, so most tests run with both strategies. That warming
works with vLLM's own scheduler is tested in `test_start`.
"""

import asyncio
import os
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from streamrag.backends.vllm import VllmBackend
from streamrag.backends.vllm.chunk_wire import KEY
from streamrag.backends.vllm.client.arguments import Strategy
from streamrag.backends.vllm.client.sampling import to_vllm
from streamrag.backends.vllm.client.token_streams import TokenStream
from streamrag.core import (
    AnswerChunk,
    Append,
    BackendEvent,
    Chunk,
    Hint,
    Prefilled,
    Prompt,
    SamplingParams,
    common_prefix_len,
)
from streamrag.errors import BackendError, ConfigurationError, EngineDeadError, PromptTooLongError, StreamRagError
from streamrag.pipeline import Pipeline
from streamrag.support.tasks import cancel_and_wait
from streamrag.testing import ScriptedSource, make_tiny_llama

tokens_input = pytest.importorskip("vllm.inputs.engine").tokens_input
pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

MAX_MODEL_LEN = 8192
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True, extra={"logprobs": 1})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmBackend]:
    model = make_tiny_llama(
        tmp_path_factory.mktemp("models") / "model",
        hidden_size=128,
        num_layers=4,
        num_heads=4,
        max_model_len=MAX_MODEL_LEN,
    )
    lines: list[str] = []
    backend = VllmBackend(model, engine_args={"dtype": "float32"}, max_num_batched_tokens=1024, kv_cache_bytes=1 << 28)
    environment = dict(os.environ)
    await backend.start(lines.append)
    assert dict(os.environ) == environment
    try:
        assert lines[:2] == ["importing vLLM", f"loading {model}"]
        assert lines[2].startswith("ready in ")
        assert lines[2].endswith(" s, KV cache of 65,536 tokens, float32")
        yield backend
    finally:
        await backend.aclose()


@pytest.fixture(params=["streaming", "warming"])
def strategy(request: pytest.FixtureRequest, backend: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> Strategy:
    found: Strategy = request.param
    monkeypatch.setattr(backend, "_strategy", found)
    return found


@pytest.fixture
def is_warming(backend: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend, "_strategy", "warming")


class Requests:
    """What the engine was asked, and what it gave, below the backend's events."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_streams = 0
        self.prompts: list[int] = []
        """Length of each plain one."""
        self.outputs: list[list[Any]] = []
        self.logprobs: list[float] = []
        """Log-probabilities of the last request's tokens."""
        self._generate = engine.generate
        monkeypatch.setattr(engine, "generate", self.generate)
        self._next_event = TokenStream.__anext__
        monkeypatch.setattr(TokenStream, "__aiter__", lambda stream: self.count_stream(stream))
        monkeypatch.setattr(TokenStream, "__anext__", lambda stream: self.next_event(stream))

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        outputs: list[Any] = []
        self.prompts.append(len(prompt["prompt_token_ids"]))
        self.outputs.append(outputs)
        self.logprobs = []
        async with aclosing(self._generate(prompt, params, request_id)) as stream:
            async for output in stream:
                outputs.append(output)
                self._note(output.outputs[0].token_ids, output.outputs[0].logprobs)
                yield output

    def count_stream(self, stream: TokenStream) -> TokenStream:
        self.num_streams += 1
        self.logprobs = []
        return stream

    async def next_event(self, stream: TokenStream) -> Prefilled | AnswerChunk:
        event = await self._next_event(stream)
        if isinstance(event, AnswerChunk):
            self._note(event.token_ids, event.logprobs)
        return event

    def _note(self, token_ids: Sequence[int], logprobs: Any) -> None:
        pairs = zip(token_ids, logprobs or [], strict=bool(logprobs))
        self.logprobs += [entry[token_id].logprob for token_id, entry in pairs]

    @property
    def num(self) -> int:
        return len(self.prompts) + self.num_streams

    @property
    def num_cached_tokens(self) -> int:
        """Cached tokens of the last plain request."""
        return int(self.outputs[-1][-1].num_cached_tokens)


@pytest.fixture
def requests(backend: VllmBackend, monkeypatch: pytest.MonkeyPatch) -> Requests:
    return Requests(backend._engine, monkeypatch)


def text(num_tokens: int, seed: int = 0) -> list[int]:
    """Token ids without any pattern; every one an ordinary token."""
    ids, state = [], seed + 1
    for _ in range(num_tokens):
        state = state * 1103515245 + 12345 & 0x7FFFFFFF
        ids.append(3 + (state >> 8) % 250)
    return ids


def prompts_of(*contexts: Sequence[int]) -> list[Prompt]:
    """The last one is complete."""
    last: Sequence[int] = ()
    prompts = []
    for number, context in enumerate(contexts):
        num_shared = common_prefix_len(list(last), list(context))
        prompts.append(Prompt(tuple(context), num_shared, is_complete=number == len(contexts) - 1))
        last = context
    return prompts


async def at_once(prompts: Sequence[Prompt]) -> AsyncIterator[Prompt]:
    for prompt in prompts:
        yield prompt


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what an engine in another process does; `condition` may be a coroutine function."""
    while True:
        found = condition()
        if await found if asyncio.iscoroutine(found) else found:
            return
        await asyncio.sleep(0.005)


async def answer(backend: VllmBackend, prompts: AsyncIterator[Prompt], params: SamplingParams = GREEDY) -> list[int]:
    async with aclosing(backend.generate(prompts, params)) as events:
        return [token_id async for event in events if isinstance(event, AnswerChunk) for token_id in event.token_ids]


async def assert_nothing_is_left(backend: VllmBackend) -> None:
    async def is_idle() -> bool:
        return await backend.num_unfinished_requests() == 0

    await until(is_idle)
    assert await backend.reset_prefix_cache(), "a request still holds KV blocks"


async def is_asleep(backend: VllmBackend) -> bool:
    """Whether the engine has computed all that it was given."""
    return not await backend._engine.engine_core.call_utility_async("has_work")


async def one_shot(backend: VllmBackend, prompt: Sequence[int], params: SamplingParams = GREEDY) -> list[int]:
    """vLLM's own answer to the whole prompt, from nothing."""
    return [token_id for chunk in await one_shot_chunks(backend, prompt, params) for token_id in chunk.token_ids]


async def one_shot_chunks(backend: VllmBackend, prompt: Sequence[int], params: SamplingParams) -> list[AnswerChunk]:
    engine = backend._engine
    vllm_params = to_vllm(params, engine.vllm_config)
    vllm_params.skip_reading_prefix_cache = True
    chunks = []
    async with aclosing(engine.generate(tokens_input(list(prompt)), vllm_params, "one shot")) as outputs:
        async for output in outputs:
            (part,) = output.outputs
            chunks.append(AnswerChunk(part.text, tuple(part.token_ids), part.finish_reason))
    return chunks


# ------------------------------------------------------------------------------------------------------ the same answer

EXPECTED: dict[Prompt, tuple[list[int], list[float]]] = {}
"""The tokens of complete prompts' answers, and their log-probabilities."""

A, B, C, D = (text(700, seed) for seed in range(4))
QUESTION = text(40, 9)

PATTERNS: dict[str, list[list[int]]] = {
    "one prompt": [A + B + QUESTION],
    "appends": [A, A + B, A + B + C, A + B + C + QUESTION],
    "appends inside a block": [A[:690], A[:695], A[:699], A + QUESTION],
    "updates that keep a part": [A + B, A + C, A + C + D, A + D + B + QUESTION],
    "updates that keep nothing": [A + B, B + A, C + D + A, D + QUESTION],
    "updates that shrink": [A + B + C, A + B, A[:100], A[:33] + QUESTION],
    "an update that shrinks to nothing": [A + B, [], B + QUESTION],
    "updates that change nothing": [A + B, A + B, A + B, A + B],
    "an update that only the question follows": [A + B, C + D, C + D + QUESTION],
    "an update of the first token": [A + B, [*reversed(A[:1]), *A[1:], *B], [5, *A[1:], *B, *QUESTION]],
}


@pytest.mark.parametrize("pace", ["at once", "each prefilled first", "each while the last one is prefilled"])
@pytest.mark.parametrize("pattern", PATTERNS)
async def test_a_streamed_prompt_gives_the_same_answer_as_the_whole_one(
    backend: VllmBackend, strategy: Strategy, requests: Requests, pattern: str, pace: str
) -> None:
    prompts = prompts_of(*PATTERNS[pattern])
    if prompts[-1] not in EXPECTED:
        EXPECTED[prompts[-1]] = await one_shot(backend, PATTERNS[pattern][-1]), requests.logprobs
    expected, expected_logprobs = EXPECTED[prompts[-1]]
    await assert_nothing_is_left(backend)

    async def paced() -> AsyncIterator[Prompt]:
        for prompt in prompts:
            yield prompt
            if not prompt.is_complete and pace != "at once":
                for _ in range(10):  # enough for the request to leave, or to be found unnecessary
                    await asyncio.sleep(0)
            if not prompt.is_complete and pace == "each prefilled first":
                await until(lambda: is_asleep(backend))

    actual = await answer(backend, paced())
    assert actual == expected
    assert len(set(actual)) > len(actual) // 2, "a model that repeats itself proves nothing"
    assert requests.logprobs == pytest.approx(expected_logprobs, abs=MOST_DIFFERENCE)
    await assert_nothing_is_left(backend)


async def test_the_answer_depends_on_the_first_token_of_a_long_context(
    backend: VllmBackend, requests: Requests
) -> None:
    first = await answer(backend, at_once(prompts_of(A + B + C + QUESTION)))
    first_logprobs = requests.logprobs
    second = await answer(backend, at_once(prompts_of([7, *A[1:], *B, *C, *QUESTION])))
    assert first != second or max(map(abs, map(float.__sub__, first_logprobs, requests.logprobs))) > 0.01
    await assert_nothing_is_left(backend)


@pytest.mark.usefixtures("is_warming")
async def test_a_warmed_prompt_is_not_computed_again(backend: VllmBackend, requests: Requests) -> None:
    context, complete = prompts_of(A + B + C, A + B + C + QUESTION)
    may_complete = asyncio.Event()

    async def prompts() -> AsyncIterator[Prompt]:
        yield context
        await may_complete.wait()
        yield complete

    async with aclosing(backend.generate(prompts(), GREEDY)) as events:
        assert await anext(events) == Prefilled(2080)  # 2,100 tokens in whole blocks of 32
        may_complete.set()
        async for event in events:
            assert isinstance(event, AnswerChunk)
    assert requests.prompts == [2080, 2140]
    assert requests.num_cached_tokens == 2080
    await assert_nothing_is_left(backend)


@pytest.mark.usefixtures("is_warming")
async def test_an_append_warms_only_what_is_new(backend: VllmBackend, requests: Requests) -> None:
    contexts = prompts_of(A, A + B, A + B + QUESTION)
    prefilled = asyncio.Event()

    async def prompts() -> AsyncIterator[Prompt]:
        for context in contexts:
            yield context
            await prefilled.wait()
            prefilled.clear()

    async for event in backend.generate(prompts(), GREEDY):
        if isinstance(event, Prefilled):
            prefilled.set()
    assert requests.prompts == [672, 1376, 1440]
    assert [outputs[-1].num_cached_tokens for outputs in requests.outputs] == [0, 672, 1376]
    await assert_nothing_is_left(backend)


async def test_streaming_computes_each_token_once_and_tells_what_it_did(backend: VllmBackend) -> None:
    contexts = prompts_of(A, A + B, A + C, A + C + QUESTION)
    num_prefilled: list[int] = []
    prefilled = asyncio.Event()
    began_s = time.monotonic()

    async def prompts() -> AsyncIterator[Prompt]:
        for context in contexts:
            yield context
            await prefilled.wait()
            prefilled.clear()

    last: AnswerChunk | None = None
    async for event in backend.generate(prompts(), GREEDY):
        if isinstance(event, Prefilled):
            num_prefilled.append(event.num_tokens)
            prefilled.set()
        else:
            last = event
    # The last token of a partial prompt is not computed before it is known whether it stays.
    assert num_prefilled == [699, 1399, 1399]
    assert last
    assert last.record
    record = last.record
    assert [(chunk.num_tokens, chunk.num_shared, chunk.num_computed) for chunk in record.chunks] == [
        (700, 0, 0),
        (1400, 700, 699),
        (1400, 700 + common_prefix_len(B, C), 1399),
        (1440, 1400, 1399),
    ]
    num_invalidated = 699 - common_prefix_len(B, C)
    assert record.num_invalidated == num_invalidated
    # The prefix cache shares the block in which the LCP ends: its tokens before the LCP's end are computed again.
    num_again = (700 + common_prefix_len(B, C)) % 32
    assert record.num_computed == 1440 + num_invalidated + num_again
    assert (record.num_recomputed, record.num_from_cache) == (num_again, 0)
    assert (record.is_stream, record.outcome) == (True, "finished")
    assert (record.num_prompt_tokens, record.num_output_tokens) == (1440, 12)
    assert record.first_kv_s
    assert record.last_kv_s
    assert began_s < record.arrival_s < record.first_kv_s < record.last_kv_s < record.finished_s < time.monotonic()
    await assert_nothing_is_left(backend)


@pytest.mark.usefixtures("is_warming")
async def test_a_plain_request_has_a_record_too(backend: VllmBackend) -> None:
    *_, last = await collect(backend, GREEDY)
    assert last.record
    assert not last.record.is_stream
    assert last.record.num_output_tokens == 12


async def test_hints_reach_the_scheduler_with_their_prompts(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[dict[str, Any]] = []
    add_request = backend._engine.engine_core.add_request_async

    async def add_and_note(request: Any) -> None:
        sent.append(request.sampling_params.extra_args[KEY])
        await add_request(request)

    monkeypatch.setattr(backend._engine.engine_core, "add_request_async", add_and_note)
    first, second, last = prompts_of(A, A + B, A + B + QUESTION)
    hinted = [replace(first, hint=Hint(num_chunks=1, end_s=2.5)), replace(second, hint=Hint(num_chunks=0)), last]
    await answer(backend, at_once(hinted))
    *chunks, end = sent
    assert [chunk["expected_complete_s"] and chunk["expected_complete_s"] - chunk["arrival_s"] for chunk in chunks] == [
        2.5,
        None,
        None,
    ]
    assert end == {"is_end": True}


async def test_four_queries_at_once_do_not_mix(backend: VllmBackend, strategy: Strategy, requests: Requests) -> None:
    contexts = [text(1500, seed) for seed in range(20, 24)]
    expected = [await one_shot(backend, context) for context in contexts]
    await assert_nothing_is_left(backend)
    streams = [at_once(prompts_of(context[:500], context[:1000], context)) for context in contexts]
    assert await asyncio.gather(*(answer(backend, stream) for stream in streams)) == expected
    await assert_nothing_is_left(backend)


# -------------------------------------------------------------------------------------------- aborting and leaving


@pytest.mark.usefixtures("is_warming")
async def test_a_superseded_warming_request_is_aborted_in_the_engine(backend: VllmBackend, requests: Requests) -> None:
    first, second, complete = prompts_of(text(8000), B, QUESTION)

    async def prompts() -> AsyncIterator[Prompt]:
        yield first
        await until(lambda: len(requests.prompts) == 1)
        await until(is_at_work)
        yield second
        await until(lambda: len(requests.outputs) == 2 and requests.outputs[1])
        yield complete

    async def is_at_work() -> bool:
        return not await is_asleep(backend)

    await answer(backend, prompts())
    assert requests.prompts == [8000, 672, 40]
    assert requests.outputs[0] == [], "it was computed to the end"
    await assert_nothing_is_left(backend)


async def phase_reached(phase: str, events: AsyncGenerator[BackendEvent, None], requests: Requests) -> None:
    async for event in events:
        if phase == "decoding" and isinstance(event, AnswerChunk):
            return
        if phase == "prefilled" and isinstance(event, Prefilled):
            return


PHASES = {
    "prefilling": prompts_of(text(8000), QUESTION)[:1],
    "prefilled": prompts_of(A, QUESTION)[:1],
    "prefilling the complete prompt": prompts_of(text(8000)),
    "decoding": prompts_of(A, A + QUESTION),
}


@pytest.mark.parametrize("how", ["closing", "cancelling"])
@pytest.mark.parametrize("phase", PHASES)
async def test_leaving_in_any_phase_leaves_nothing_in_the_engine(
    backend: VllmBackend, strategy: Strategy, requests: Requests, phase: str, how: str
) -> None:
    async def prompts() -> AsyncIterator[Prompt]:
        for prompt in PHASES[phase]:
            yield prompt
        await asyncio.Event().wait()

    reached = asyncio.Event()

    async def consume() -> None:
        endless = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True)
        async with aclosing(backend.generate(prompts(), endless)) as events:
            if how == "closing" and phase in ("prefilled", "decoding"):
                await phase_reached(phase, events, requests)
                reached.set()
                return
            async for event in events:
                if isinstance(event, AnswerChunk if phase == "decoding" else Prefilled):
                    reached.set()

    task = asyncio.create_task(consume())
    if phase.startswith("prefilling"):
        await until(lambda: requests.num == 1)
        await asyncio.sleep(0)  # a stream is handed over by a task of its own
        assert await backend.num_unfinished_requests() == 1
    else:
        await reached.wait()
    if how == "cancelling" or phase.startswith("prefilling"):
        task.cancel()
    await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None
    await assert_nothing_is_left(backend)


async def test_a_bare_loop_that_is_left_early_is_aborted(backend: VllmBackend, strategy: Strategy) -> None:
    events = backend.generate(at_once(prompts_of(A)), SamplingParams(max_tokens=4000, ignore_eos=True))
    async for _ in events:
        break
    del events
    await assert_nothing_is_left(backend)


async def test_an_error_of_the_prompts_is_raised_as_it_is_and_aborts_the_request(
    backend: VllmBackend, strategy: Strategy, requests: Requests
) -> None:
    async def prompts() -> AsyncIterator[Prompt]:
        yield prompts_of(text(8000), QUESTION)[0]
        await until(lambda: requests.num == 1)
        raise ValueError("no pages")

    with pytest.raises(ValueError, match=r"^no pages$"):
        await answer(backend, prompts())
    await assert_nothing_is_left(backend)


# ---------------------------------------------------------------------------------------------------------- parameters


async def collect(backend: VllmBackend, params: SamplingParams) -> list[AnswerChunk]:
    events = [event async for event in backend.generate(at_once(prompts_of(A + QUESTION)), params)]
    assert all(isinstance(event, AnswerChunk) for event in events)
    return events  # type: ignore[return-value]


def joined(chunks: Sequence[AnswerChunk]) -> tuple[str, list[int], str | None]:
    """Text, token ids and finish reason; only the last chunk has one."""
    assert all(chunk.finish_reason is None and chunk.record is None for chunk in chunks[:-1])
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    return "".join(chunk.text for chunk in chunks), token_ids, chunks[-1].finish_reason


async def test_chunks_make_up_the_text_and_the_last_says_why_it_ended(backend: VllmBackend, strategy: Strategy) -> None:
    found, token_ids, reason = joined(await collect(backend, SamplingParams(max_tokens=30, ignore_eos=True)))
    assert len(token_ids) == 30
    assert reason == "length"
    text_of_ids = backend.model.tokenizer.decode([token_id for token_id in token_ids if token_id > 2])
    # vLLM leaves out a character that is still incomplete at the end.
    assert found.rstrip("\ufffd") == text_of_ids.rstrip("\ufffd")


LONG = SamplingParams(max_tokens=60, ignore_eos=True)


async def pieces_of_the_long_answer(backend: VllmBackend) -> list[str]:
    """The text that each token of the answer brings."""
    return [chunk.text for chunk in await one_shot_chunks(backend, A + QUESTION, LONG)]


async def stopping(backend: VllmBackend) -> dict[str, SamplingParams]:
    """Parameters that end the answer in all the ways there are, found in the answer itself."""
    pieces = await pieces_of_the_long_answer(backend)
    whole = "".join(pieces)
    _, token_ids, _ = joined(await one_shot_chunks(backend, A + QUESTION, LONG))
    # From the middle of one token's text to the middle of the text of the next but one.
    starts = [sum(map(len, pieces[:number])) for number in range(len(pieces) + 1)]
    at = next(n for n in range(8, len(pieces)) if all(len(piece) > 1 for piece in pieces[n : n + 2]))
    spanning = whole[starts[at] + 1 : starts[at + 1] + 1]
    assert spanning
    late = whole[starts[20] : starts[23]]
    return {
        "a stop text that spans tokens": replace(LONG, stop=("never written", spanning)),
        "a stop text that stays in the answer": replace(
            LONG, stop=(spanning,), extra={"include_stop_str_in_output": True}
        ),
        "a stop text before the least number of tokens": replace(LONG, stop=(late,), extra={"min_tokens": 40}),
        "a stop text that is not in the answer": replace(LONG, stop=("never written" * 3,)),
        "a stop text with the last token": replace(LONG, stop=(whole[-2:],)),
        "a stop token": replace(LONG, extra={"stop_token_ids": [token_ids[11]]}),
        "a stop token that stays in the answer": replace(
            LONG, extra={"stop_token_ids": [token_ids[11]], "include_stop_str_in_output": True}
        ),
        "the end of the text": SamplingParams(max_tokens=500, extra={"logit_bias": {2: 2.0}}),
        "special tokens are shown": replace(LONG, extra={"skip_special_tokens": False, "logit_bias": {0: 3.0, 1: 3.0}}),
        "one token": replace(LONG, max_tokens=1),
        "incomplete characters": replace(LONG, extra={"allowed_token_ids": list(range(130, 230))}),
    }


REASONS = {
    "a stop text that is not in the answer": "length",
    "special tokens are shown": "length",
    "one token": "length",
    "incomplete characters": "length",
}


async def test_text_tokens_and_end_are_those_of_vllms_own_answer(backend: VllmBackend, strategy: Strategy) -> None:
    for name, params in (await stopping(backend)).items():
        expected = joined(await one_shot_chunks(backend, A + QUESTION, params))
        prompts = at_once(prompts_of(A[:100], B, A, A + QUESTION))
        events = [event async for event in backend.generate(prompts, params)]
        actual = joined([event for event in events if isinstance(event, AnswerChunk)])
        assert actual == expected, name
        if "least number" not in name:
            assert actual[2] == REASONS.get(name, "stop"), name
        if name == "special tokens are shown":
            assert "<|" in actual[0]
        if name == "incomplete characters":
            assert "\ufffd" in actual[0]
        await assert_nothing_is_left(backend)


async def test_a_stop_text_ends_the_answer_before_it(backend: VllmBackend, strategy: Strategy) -> None:
    whole, _, _ = joined(await collect(backend, SamplingParams(max_tokens=30, ignore_eos=True)))
    stop = whole[5:8]
    text_before, _, reason = joined(
        await collect(backend, SamplingParams(max_tokens=4000, ignore_eos=True, stop=(stop,)))
    )
    assert text_before == whole[: whole.index(stop)]
    assert reason == "stop"
    await assert_nothing_is_left(backend)


async def test_a_slow_reader_gets_the_same_text_and_no_token_after_the_stop_text(backend: VllmBackend) -> None:
    params = (await stopping(backend))["a stop text that spans tokens"]
    expected = joined(await one_shot_chunks(backend, A + QUESTION, params))
    chunks: list[AnswerChunk] = []
    async with aclosing(backend.generate(at_once(prompts_of(A + QUESTION)), params)) as events:
        async for event in events:
            assert isinstance(event, AnswerChunk)
            chunks.append(event)
            await until(lambda: is_asleep(backend))  # meanwhile the engine writes all of it
    assert joined(chunks) == expected
    assert len(chunks) < len(expected[1])
    await assert_nothing_is_left(backend)


async def test_seeds_which_would_end_the_engine_on_a_cpu_are_refused(backend: VllmBackend, strategy: Strategy) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, seed=7)
    with pytest.raises(ConfigurationError, match=r"seed=7 with temperature=1 would crash.*Leave out the seed"):
        await collect(backend, params)
    assert await collect(backend, replace(params, temperature=0.0))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"min_p": 2.0}, "min_p"),
        ({"logit_bias": {1 << 20: 1.0}}, "logit_bias"),
        ({"stop_token_ids": [1 << 20]}, "stop_token_ids"),
        ({"logprobs": 10_000}, "logprobs"),
        ({"no_such_parameter": 1}, "no_such_parameter"),
        ({"temperature": 1.0}, "temperature cannot be given there"),
        ({"n": 2}, "n cannot be given there"),
        ({"structured_outputs": {"regexp": "a"}}, "none are specified"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "only use one kind"),
        ({"structured_outputs": "a+"}, "structured_outputs must be a mapping"),
        ({"extra_args": {"streamrag": {}}}, "is reserved for streamrag"),
        ({"extra_args": ["streamrag"]}, r"extra_args=\['streamrag'\] must be a mapping"),
    ],
)
async def test_a_parameter_that_vllm_refuses_is_named(
    backend: VllmBackend, strategy: Strategy, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        await collect(backend, SamplingParams(extra=extra))


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("prompt_logprob_token_ids", np.array([[1]])),
        ("prompt_logprob_token_ids", np.array([[1, 2], [3, 4]])),
    ],
)
async def test_a_parameter_that_a_stream_cannot_have_is_named_with_the_remedy(
    backend: VllmBackend, name: str, value: Any
) -> None:
    with pytest.raises(ConfigurationError, match=rf'{name}.* cannot be used.*strategy="warming"'):
        await collect(backend, SamplingParams(extra={name: value}))


BOOLEAN = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}


@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        ({"choice": ["yes", "no"]}, "yes|no"),
        ({"regex": "[ab]{3}-[0-9]{2}"}, "[ab]{3}-[0-9]{2}"),
        ({"json": BOOLEAN}, r'\{\s*"a"\s*:\s*(true|false)\s*\}'),
    ],
)
async def test_a_streamed_prompt_has_the_structured_output_of_one_that_came_at_once(
    backend: VllmBackend, grammar: dict[str, Any], pattern: str
) -> None:
    params = SamplingParams(max_tokens=40, extra={"structured_outputs": grammar})
    whole = [token_id for chunk in await one_shot_chunks(backend, B + QUESTION, params) for token_id in chunk.token_ids]
    async with backend.streams.open(Prompt(tuple(A)), params) as stream:
        await stream.update(Prompt(tuple(B)))
        await stream.finish(QUESTION)
        assert await tokens_of(stream) == whole
    assert re.match(pattern, backend.model.tokenizer.decode(whole))
    if "json" in grammar:
        same = SamplingParams(max_tokens=40, json_schema=grammar["json"])
        assert joined(await one_shot_chunks(backend, B + QUESTION, same))[1] == whole
    await assert_nothing_is_left(backend)


async def test_a_schema_and_another_constraint_do_not_go_together(backend: VllmBackend) -> None:
    params = SamplingParams(json_schema=BOOLEAN, extra={"structured_outputs": {"regex": "a"}})
    with pytest.raises(ConfigurationError, match="extra: structured_outputs cannot be given there"):
        await collect(backend, params)


@pytest.mark.long
async def test_a_plain_request_with_a_grammar_has_its_turn_beside_streams_that_leave_no_room(
    backend: VllmBackend,
) -> None:
    grammar = pytest.importorskip("vllm.sampling_params").StructuredOutputsParams(choice=["yes", "no"])
    answered: asyncio.Queue[int] = asyncio.Queue()

    async def streams(number: int) -> None:
        for turn in count():
            prompt = text(6000, 100 * number + turn)
            async with backend.streams.open(Prompt(tuple(prompt[:700])), GREEDY) as stream:
                await stream.append(prompt[700:])
                await stream.finish(QUESTION)
                await tokens_of(stream)
            answered.put_nowait(number)

    clients = [asyncio.create_task(streams(number)) for number in range(12)]  # more than KV memory holds
    try:
        for _ in clients:
            await answered.get()
        num_before = answered.qsize()
        async with asyncio.timeout(100):
            params = SamplingParams(max_tokens=12, extra={"structured_outputs": grammar})
            chunks = await one_shot_chunks(backend, text(900, 0), params)
        token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
        assert backend.model.tokenizer.decode(token_ids).startswith(("yes", "no"))  # and its end
        assert answered.qsize() - num_before <= 3 * len(clients)
    finally:
        await cancel_and_wait(clients)
    await assert_nothing_is_left(backend)


@pytest.mark.parametrize("grammar", [{"regex": "("}, {"json": {"type": "no such type"}}, {"grammar": "no grammar"}])
async def test_a_grammar_that_cannot_be_compiled_fails_its_request_alone(
    backend: VllmBackend, grammar: dict[str, Any]
) -> None:
    with pytest.raises(StreamRagError, match="vLLM refuses"):
        await collect(backend, SamplingParams(extra={"structured_outputs": grammar}))
    await assert_nothing_is_left(backend)


async def test_a_chunk_that_the_engine_refuses_fails_its_stream_alone(backend: VllmBackend) -> None:
    async with backend.streams.open(Prompt(tuple(A)), GREEDY) as other:
        with pytest.raises(BackendError, match=r"vLLM refuses the request.*out of vocabulary"):
            await answer(backend, at_once(prompts_of(B, [*B, 1_000_000])))
        await other.finish(QUESTION)
        assert await tokens_of(other) == await one_shot(backend, A + QUESTION)
    await assert_nothing_is_left(backend)


@pytest.mark.parametrize("is_complete", [True, False])
async def test_a_prompt_that_is_too_long_never_reaches_the_engine(
    backend: VllmBackend, strategy: Strategy, requests: Requests, is_complete: bool
) -> None:
    prompt = Prompt(tuple(text(MAX_MODEL_LEN)), 0, is_complete)
    with pytest.raises(PromptTooLongError, match="8192 tokens leaves no room for an answer: max_model_len is 8192"):
        await answer(backend, at_once([prompt]))
    assert requests.num == 0


async def test_a_prompt_that_grows_too_long_fails_alone(backend: VllmBackend) -> None:
    with pytest.raises(PromptTooLongError, match="8192 tokens"):
        await answer(backend, at_once(prompts_of(A, text(MAX_MODEL_LEN), QUESTION)))
    await assert_nothing_is_left(backend)


async def test_a_prompt_just_short_enough_gets_one_token(backend: VllmBackend, strategy: Strategy) -> None:
    assert len(await answer(backend, at_once(prompts_of(text(MAX_MODEL_LEN - 1))))) == 1
    await assert_nothing_is_left(backend)


@pytest.mark.parametrize("partial", [[], [[]], [A]])
async def test_an_empty_prompt_is_an_error_not_a_hang(
    backend: VllmBackend, strategy: Strategy, partial: list[list[int]]
) -> None:
    with pytest.raises(StreamRagError, match=r"vLLM refuses the request|at least one token"):
        await answer(backend, at_once(prompts_of(*partial, [])))
    await assert_nothing_is_left(backend)


@pytest.mark.parametrize("partial", [[], [A]])
async def test_prompts_without_a_complete_one_are_an_error_not_a_hang(
    backend: VllmBackend, strategy: Strategy, partial: list[list[int]]
) -> None:
    with pytest.raises(BackendError, match="without a complete one"):
        await answer(backend, at_once(prompts_of(*partial, [])[:-1]))
    await assert_nothing_is_left(backend)


# ------------------------------------------------------------- what a stream cannot have, but a query with a stream can

MOST_DIFFERENCE = 1e-3
"""Between log-probabilities. vLLM's own requests differ by up to 1.1e-4 among each other here, for they split the
context over threads; in `test_streaming_engine`, where they do not, the limit is 1e-5."""

PROMPT_LOGPROBS = replace(GREEDY, extra={"prompt_logprobs": 1, "logprobs": 1})
SAMPLED = replace(GREEDY, temperature=1.0, n=3)
"""Without a seed, which vLLM does not take on a CPU. Its own sampler takes no `n` with a temperature of 0."""


async def one_shot_prompt_logprobs(backend: VllmBackend, prompt: Sequence[int]) -> list[float]:
    params = to_vllm(PROMPT_LOGPROBS, backend._engine.vllm_config)
    async with aclosing(backend._engine.generate(tokens_input(list(prompt)), params, "rows")) as outputs:
        return of_tokens(prompt, [row async for output in outputs for row in output.prompt_logprobs or ()])


def of_tokens(prompt: Sequence[int], rows: list[Any]) -> list[float]:
    """The log-probabilities of the tokens but the first, for which there is none."""
    assert rows[0] is None
    return [row[token_id].logprob for row, token_id in zip(rows[1:], prompt[1:], strict=True)]


async def chunks_of(backend: VllmBackend, prompts: AsyncIterator[Prompt], params: SamplingParams) -> list[AnswerChunk]:
    async with aclosing(backend.generate(prompts, params)) as events:
        return [event async for event in events if isinstance(event, AnswerChunk)]


async def each_prefilled(backend: VllmBackend, prompts: Sequence[Prompt]) -> AsyncIterator[Prompt]:
    for prompt in prompts:
        yield prompt
        if not prompt.is_complete:
            for _ in range(10):
                await asyncio.sleep(0)
            await until(lambda: is_asleep(backend))


def by_index(chunks: Sequence[AnswerChunk]) -> list[tuple[list[int], list[float], str, str | None]]:
    """Tokens, log-probabilities, text and finish reason of each answer."""
    answers: dict[int, tuple[list[int], list[float], str, str | None]] = {}
    for chunk in chunks:
        token_ids, logprobs, so_far, reason = answers.get(chunk.index, ([], [], "", None))
        assert reason is None
        entries = zip(chunk.token_ids, chunk.logprobs or (), strict=True)
        logprobs = logprobs + [entry[token_id].logprob for token_id, entry in entries]
        answers[chunk.index] = token_ids + list(chunk.token_ids), logprobs, so_far + chunk.text, chunk.finish_reason
    return [answers[index] for index in range(len(answers))]


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_a_query_has_the_log_probabilities_of_its_whole_prompt(
    backend: VllmBackend, strategy: Strategy, requests: Requests, pattern: str
) -> None:
    prompt = PATTERNS[pattern][-1]
    expected = await one_shot_prompt_logprobs(backend, prompt)
    assert await answer(backend, at_once(prompts_of(prompt)))  # from now on the prefix cache has most of the prompt
    requests.prompts.clear()
    first, *others = await chunks_of(backend, each_prefilled(backend, prompts_of(*PATTERNS[pattern])), PROMPT_LOGPROBS)
    assert requests.prompts == [len(prompt)]
    assert not any(chunk.prompt_logprobs for chunk in others)
    assert of_tokens(prompt, first.prompt_logprobs) == pytest.approx(expected, abs=MOST_DIFFERENCE)
    token_ids = [token_id for chunk in (first, *others) for token_id in chunk.token_ids]
    assert token_ids == await one_shot(backend, prompt)
    await assert_nothing_is_left(backend)


@pytest.mark.parametrize("pattern", PATTERNS)
async def test_each_of_several_answers_is_one_that_the_whole_prompt_could_have_had_alone(
    backend: VllmBackend, strategy: Strategy, pattern: str
) -> None:
    prompt = PATTERNS[pattern][-1]
    given = each_prefilled(backend, prompts_of(*PATTERNS[pattern]))
    answers = by_index(await chunks_of(backend, given, SAMPLED))
    assert len(answers) == 3
    assert len({tuple(token_ids) for token_ids, _, _, _ in answers}) > 1
    for token_ids, logprobs, answer_text, finish_reason in answers:
        assert finish_reason == "length"
        whole = await one_shot_prompt_logprobs(backend, [*prompt, *token_ids])
        assert logprobs == pytest.approx(whole[len(prompt) - 1 :], abs=MOST_DIFFERENCE)
        assert answer_text
    await assert_nothing_is_left(backend)


async def test_all_answers_with_top_k_1_are_the_greedy_one(backend: VllmBackend, strategy: Strategy) -> None:
    given = each_prefilled(backend, prompts_of(A, A + B, A + C + QUESTION))
    answers = by_index(await chunks_of(backend, given, replace(SAMPLED, top_k=1)))
    assert [token_ids for token_ids, _, _, _ in answers] == [await one_shot(backend, A + C + QUESTION)] * 3
    await assert_nothing_is_left(backend)


async def test_several_answers_share_one_prefill(backend: VllmBackend, requests: Requests) -> None:
    given = each_prefilled(backend, prompts_of(A, A + B, A + B + QUESTION))
    chunks = await chunks_of(backend, given, replace(SAMPLED, n=4))
    record = next(chunk.record for chunk in chunks if chunk.finish_reason)
    assert record
    assert [each.num_tokens for each in record.chunks] == [700, 1400, 1440]
    assert record.num_computed == 1440
    assert requests.prompts == [1440]  # for vLLM's client one request
    assert {output.num_cached_tokens for output in requests.outputs[-1]} == {1408}  # all blocks but the last one
    await assert_nothing_is_left(backend)


async def test_each_of_several_answers_ends_by_itself(backend: VllmBackend, strategy: Strategy) -> None:
    params = replace(SAMPLED, max_tokens=200, n=8, extra={}, stop=("a", "e"))
    chunks = await chunks_of(backend, at_once(prompts_of(A, A + QUESTION)), params)
    texts = ["".join(chunk.text for chunk in chunks if chunk.index == index) for index in range(8)]
    reasons = {chunk.index: chunk.finish_reason for chunk in chunks if chunk.finish_reason}
    assert not any("a" in each or "e" in each for each in texts)
    assert reasons.keys() == set(range(8))
    assert "stop" in reasons.values()
    await assert_nothing_is_left(backend)


async def test_a_pipeline_gives_the_first_answer_in_its_stream_and_the_others_at_its_end(backend: VllmBackend) -> None:
    source = ScriptedSource([Append(Chunk("one passage", "a.md")), Append(Chunk("another", "b.md"))])
    params = replace(SAMPLED, extra={"prompt_logprobs": 0, "logprobs": 1})
    async with Pipeline(source, backend, owns_backend=False) as pipeline:
        async with pipeline.stream("Why?", params=params) as stream:
            chunks = [chunk async for chunk in stream]
        result = stream.result
        with pytest.raises(ConfigurationError, match="n must be 1 when using greedy sampling, got 3"):
            async for _ in pipeline.stream("Why?", params=replace(params, temperature=0.0)):
                pass
    assert "".join(chunk.text for chunk in chunks) == result.text
    assert [len(chunk.logprobs) for chunk in chunks] == [len(chunk.token_ids) for chunk in chunks]
    assert len(result.prompt_logprobs) == result.num_prompt_tokens
    assert [len(each.token_ids) for each in (result, *result.alternatives)] == [12, 12, 12]
    assert result.usage.num_output_tokens == 36
    await assert_nothing_is_left(backend)


@pytest.mark.parametrize("params", [SAMPLED, replace(SAMPLED, n=1, extra={"prompt_logprobs": 1})])
async def test_leaving_a_query_ends_all_that_it_has_in_the_engine(
    backend: VllmBackend, strategy: Strategy, params: SamplingParams
) -> None:
    for num_events in range(1, 8):
        async with aclosing(
            backend.generate(at_once(prompts_of(A, B + QUESTION)), replace(params, max_tokens=4000))
        ) as events:
            for _ in range(num_events):
                await anext(events)
        await assert_nothing_is_left(backend)


@pytest.mark.parametrize("params", [SAMPLED, PROMPT_LOGPROBS])
async def test_a_push_interface_has_neither(backend: VllmBackend, params: SamplingParams) -> None:
    with pytest.raises(
        ConfigurationError, match=r"(n|prompt_logprobs) cannot be used with a streamed prompt.*pipeline"
    ):
        async with backend.streams.open(Prompt(tuple(A)), params):
            pass
    async with backend.streams.open(Prompt(tuple(A)), GREEDY) as stream:
        with pytest.raises(ConfigurationError, match="cannot be used with a streamed prompt"):
            await stream.finish(QUESTION, params=params)
    await assert_nothing_is_left(backend)


# -------------------------------------------------------------------------------------------------- the push interface


async def tokens_of(stream: TokenStream) -> list[int]:
    return [token_id async for event in stream if isinstance(event, AnswerChunk) for token_id in event.token_ids]


async def test_a_program_may_push_the_tokens_of_a_prompt(backend: VllmBackend) -> None:
    params = SamplingParams(max_tokens=40, ignore_eos=True, stop=("never",))
    async with backend.streams.open(Prompt(tuple(A)), SamplingParams()) as stream:
        assert await anext(stream) == Prefilled(699)
        await stream.append(B)
        await stream.update(Prompt(tuple(A[:300] + C), hint=Hint(end_s=1.0)))
        assert stream.num_tokens == 1000
        assert await backend.num_unfinished_requests() == 1
        await stream.finish(QUESTION, params=params)
        events = [event async for event in stream if isinstance(event, AnswerChunk)]
        expected = joined(await one_shot_chunks(backend, A[:300] + C + QUESTION, params))
        assert "".join(event.text for event in events) == expected[0]
        assert [token_id for event in events for token_id in event.token_ids] == expected[1]
        assert events[-1].finish_reason == "length"
        assert stream.record
        assert len(stream.record.chunks) == 4
        with pytest.raises(BackendError, match="complete"):
            await stream.append(B)
    await assert_nothing_is_left(backend)


async def test_an_aborted_stream_says_so_to_all_who_use_it(backend: VllmBackend) -> None:
    async with backend.streams.open(Prompt(tuple(A)), GREEDY) as stream:
        assert await anext(stream) == Prefilled(699)
        reading = asyncio.create_task(anext(stream))
        await asyncio.sleep(0)
        await stream.abort()
        await assert_nothing_is_left(backend)
        with pytest.raises(BackendError, match="dropped the stream"):
            await reading
        with pytest.raises(BackendError, match="has ended"):
            await stream.append(B)
        await stream.abort()


async def test_a_prompt_that_was_too_long_leaves_the_stream_as_it_was(backend: VllmBackend) -> None:
    async with backend.streams.open(Prompt(tuple(A)), GREEDY) as stream:
        with pytest.raises(PromptTooLongError, match="max_model_len is 8192"):
            await stream.append(text(MAX_MODEL_LEN))
        with pytest.raises(ConfigurationError, match="prompt_logprobs"):
            await stream.finish(params=SamplingParams(extra={"prompt_logprobs": 1}))
        await stream.finish(QUESTION)
        assert await tokens_of(stream) == await one_shot(backend, A + QUESTION)
    await assert_nothing_is_left(backend)


@pytest.mark.usefixtures("is_warming")
async def test_only_an_engine_with_our_scheduler_has_streams(
    backend: VllmBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "_streams", None)
    with pytest.raises(BackendError, match='strategy="warming" has no streams'):
        _ = backend.streams


async def test_the_model_is_described(backend: VllmBackend) -> None:
    assert Path(backend.model.name).name == "model"
    assert backend.model.max_model_len == MAX_MODEL_LEN
    assert backend.model.is_exact
    assert len(backend.process_ids) == 1


async def test_closing_the_backend_fails_what_runs_and_what_comes_after(backend: VllmBackend) -> None:
    """The last test of this module: it closes the engine that all others share."""

    async def drained(events: AsyncIterator[Any]) -> None:
        async for _ in events:
            pass

    endless = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    async with (
        backend.streams.open(Prompt(tuple(A)), GREEDY) as idle,
        aclosing(backend.generate(at_once(prompts_of(A)), endless)) as events,
    ):
        await anext(idle)
        await anext(events)
        closing = asyncio.create_task(backend.aclose())
        with pytest.raises(BackendError, match="closed"):
            await drained(events)
        with pytest.raises(BackendError, match="closed"):
            await drained(idle)
        await closing
        with pytest.raises(EngineDeadError, match="the engine was closed"):
            await idle.append(B)
    assert backend.process_ids == []
    with pytest.raises(BackendError, match="not running"):
        await anext(backend.generate(at_once(prompts_of(A)), endless))
    await backend.aclose()
