"""One engine for the whole module, so these tests also check that each leaves it as it was."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from streamrag.backends.vllm import VllmBackend
from streamrag.core import AnswerChunk, BackendEvent, Prefilled, Prompt, SamplingParams
from streamrag.errors import BackendError, ConfigurationError, PromptTooLongError
from streamrag.testing import make_tiny_llama

pytest.importorskip("vllm")
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
    backend = VllmBackend(model, dtype="float32", max_num_batched_tokens=1024, kv_cache_bytes=1 << 28)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCH_COMPILE_DISABLE", "1")  # vLLM would compile what ranks logprobs: 20 s
        environment = dict(os.environ)
        await backend.start(lines.append)
        assert dict(os.environ) == environment
    try:
        assert lines[:2] == ["importing vLLM", f"loading {model}"]
        assert lines[2].startswith("ready in ")
        assert lines[2].endswith(" s, KV cache of 65,536 tokens")
        yield backend
    finally:
        await backend.aclose()


class Requests:
    """What the engine was asked, and what it gave, below the backend's events."""

    def __init__(self, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.prompts: list[int] = []
        """Length of each."""
        self.outputs: list[list[Any]] = []
        self._generate = engine.generate
        monkeypatch.setattr(engine, "generate", self.generate)

    async def generate(self, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        outputs: list[Any] = []
        self.prompts.append(len(prompt["prompt_token_ids"]))
        self.outputs.append(outputs)
        async with aclosing(self._generate(prompt, params, request_id)) as stream:
            async for output in stream:
                outputs.append(output)
                yield output

    @property
    def num_cached_tokens(self) -> int:
        """Of the last request."""
        return int(self.outputs[-1][-1].num_cached_tokens)

    @property
    def logprobs(self) -> list[float]:
        """Of the last request's tokens."""
        parts = [output.outputs[0] for output in self.outputs[-1]]
        return [
            entry[token_id].logprob
            for part in parts
            for token_id, entry in zip(part.token_ids, part.logprobs, strict=True)
        ]


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
        pairs = enumerate(zip(last, context, strict=False))
        num_shared = next((at for at, (old, new) in pairs if old != new), min(len(last), len(context)))
        prompts.append(Prompt(tuple(context), num_shared, is_complete=number == len(contexts) - 1))
        last = context
    return prompts


async def at_once(prompts: Sequence[Prompt]) -> AsyncIterator[Prompt]:
    for prompt in prompts:
        yield prompt


async def until(condition: Callable[[], Any]) -> None:
    """Wait for what an engine in another process does; `condition` may be a coroutine function."""
    async with asyncio.timeout(10):
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


# ------------------------------------------------------------------------------------------------------ the same answer

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
    backend: VllmBackend, requests: Requests, pattern: str, pace: str
) -> None:
    prompts = prompts_of(*PATTERNS[pattern])
    expected = await answer(backend, at_once(prompts_of(PATTERNS[pattern][-1])))
    expected_logprobs = requests.logprobs
    assert requests.num_cached_tokens == 0
    await assert_nothing_is_left(backend)

    async def is_idle() -> bool:
        return await backend.num_unfinished_requests() == 0

    async def paced() -> AsyncIterator[Prompt]:
        for prompt in prompts:
            yield prompt
            if not prompt.is_complete and pace != "at once":
                for _ in range(10):  # enough for the request to leave, or to be found unnecessary
                    await asyncio.sleep(0)
            if not prompt.is_complete and pace == "each prefilled first":
                await until(is_idle)

    actual = await answer(backend, paced())
    assert actual == expected
    assert len(set(actual)) > len(actual) // 2, "a model that repeats itself proves nothing"
    assert requests.logprobs == pytest.approx(expected_logprobs, abs=1e-4)
    await assert_nothing_is_left(backend)


async def test_the_answer_depends_on_the_first_token_of_a_long_context(
    backend: VllmBackend, requests: Requests
) -> None:
    first = await answer(backend, at_once(prompts_of(A + B + C + QUESTION)))
    first_logprobs = requests.logprobs
    second = await answer(backend, at_once(prompts_of([7, *A[1:], *B, *C, *QUESTION])))
    assert first != second or max(map(abs, map(float.__sub__, first_logprobs, requests.logprobs))) > 0.01
    await assert_nothing_is_left(backend)


async def test_what_was_warmed_is_not_computed_again(backend: VllmBackend, requests: Requests) -> None:
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


async def test_an_append_costs_only_what_is_new(backend: VllmBackend, requests: Requests) -> None:
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


async def test_four_queries_at_once_do_not_mix(backend: VllmBackend, requests: Requests) -> None:
    contexts = [text(1500, seed) for seed in range(20, 24)]
    expected = [await answer(backend, at_once(prompts_of(context))) for context in contexts]
    await assert_nothing_is_left(backend)
    streams = [at_once(prompts_of(context[:500], context[:1000], context)) for context in contexts]
    assert await asyncio.gather(*(answer(backend, stream) for stream in streams)) == expected
    await assert_nothing_is_left(backend)


# -------------------------------------------------------------------------------------------- aborting and leaving


async def test_a_superseded_warming_request_is_aborted_in_the_engine(backend: VllmBackend, requests: Requests) -> None:
    first, second, complete = prompts_of(text(8000), B, QUESTION)

    async def prompts() -> AsyncIterator[Prompt]:
        yield first
        await until(lambda: len(requests.prompts) == 1)
        await until(has_work)
        yield second
        await until(lambda: len(requests.outputs) == 2 and requests.outputs[1])
        yield complete

    async def has_work() -> bool:
        return bool(await backend._engine.engine_core.call_utility_async("has_work"))

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
    backend: VllmBackend, requests: Requests, phase: str, how: str
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
        await until(lambda: len(requests.prompts) == 1)
        assert await backend.num_unfinished_requests() == 1
    else:
        async with asyncio.timeout(10):
            await reached.wait()
    if how == "cancelling" or phase.startswith("prefilling"):
        task.cancel()
    async with asyncio.timeout(2):
        await asyncio.wait([task])
    assert task.cancelled() or task.exception() is None
    await assert_nothing_is_left(backend)


async def test_a_bare_loop_that_is_left_early_is_aborted(backend: VllmBackend) -> None:
    events = backend.generate(at_once(prompts_of(A)), SamplingParams(max_tokens=4000, ignore_eos=True))
    async for _ in events:
        break
    del events
    await assert_nothing_is_left(backend)


async def test_an_error_of_the_prompts_is_raised_and_aborts_the_request(
    backend: VllmBackend, requests: Requests
) -> None:
    async def prompts() -> AsyncIterator[Prompt]:
        yield prompts_of(text(8000), QUESTION)[0]
        await until(lambda: len(requests.prompts) == 1)
        raise LookupError("no pages")

    with pytest.raises(LookupError, match="no pages"):
        await answer(backend, prompts())
    await assert_nothing_is_left(backend)


# ---------------------------------------------------------------------------------------------------------- parameters


async def collect(backend: VllmBackend, params: SamplingParams) -> list[AnswerChunk]:
    events = [event async for event in backend.generate(at_once(prompts_of(A + QUESTION)), params)]
    assert all(isinstance(event, AnswerChunk) for event in events)
    return events  # type: ignore[return-value]


async def test_chunks_make_up_the_text_and_the_last_says_why_it_ended(backend: VllmBackend) -> None:
    chunks = await collect(backend, SamplingParams(max_tokens=30, ignore_eos=True))
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids]
    assert len(token_ids) == 30
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    text_of_ids = backend.model.tokenizer.decode([token_id for token_id in token_ids if token_id > 2])
    # vLLM leaves out a character that is still incomplete at the end.
    assert "".join(chunk.text for chunk in chunks).rstrip("\ufffd") == text_of_ids.rstrip("\ufffd")


async def test_a_stop_text_ends_the_answer_before_it(backend: VllmBackend) -> None:
    whole = "".join(chunk.text for chunk in await collect(backend, SamplingParams(max_tokens=30, ignore_eos=True)))
    stop = whole[5:8]
    chunks = await collect(backend, SamplingParams(max_tokens=30, ignore_eos=True, stop=(stop,)))
    assert "".join(chunk.text for chunk in chunks) == whole[: whole.index(stop)]
    assert chunks[-1].finish_reason == "stop"
    await assert_nothing_is_left(backend)


async def test_a_seed_makes_sampling_repeatable(backend: VllmBackend) -> None:
    params = SamplingParams(max_tokens=20, temperature=1.0, top_p=0.9, top_k=50, seed=7, ignore_eos=True)
    assert await collect(backend, params) == await collect(backend, params)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"min_p": 2.0}, "min_p"),
        ({"no_such_parameter": 1}, "no_such_parameter"),
        ({"temperature": 1.0}, "temperature cannot be given there"),
        ({"n": 2}, "n cannot be given there"),
    ],
)
async def test_a_parameter_that_vllm_refuses_is_named(
    backend: VllmBackend, extra: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigurationError, match=message):
        await collect(backend, SamplingParams(extra=extra))


@pytest.mark.parametrize("is_complete", [True, False])
async def test_a_prompt_that_is_too_long_never_reaches_the_engine(
    backend: VllmBackend, requests: Requests, is_complete: bool
) -> None:
    prompt = Prompt(tuple(text(MAX_MODEL_LEN)), 0, is_complete)
    with pytest.raises(PromptTooLongError, match="8192 tokens leaves no room for an answer: max_model_len is 8192"):
        await answer(backend, at_once([prompt]))
    assert requests.prompts == []


async def test_a_prompt_just_short_enough_gets_one_token(backend: VllmBackend) -> None:
    assert len(await answer(backend, at_once(prompts_of(text(MAX_MODEL_LEN - 1))))) == 1
    await assert_nothing_is_left(backend)


async def test_an_empty_prompt_is_an_error_not_a_hang(backend: VllmBackend) -> None:
    with pytest.raises(BackendError, match="vLLM refuses the request"):
        await answer(backend, at_once(prompts_of([])))
    await assert_nothing_is_left(backend)


async def test_the_model_is_described(backend: VllmBackend) -> None:
    assert Path(backend.model.name).name == "model"
    assert backend.model.max_model_len == MAX_MODEL_LEN
    assert backend.model.is_exact
    assert len(backend.process_ids) == 1


async def test_closing_the_backend_fails_what_runs_and_what_comes_after(backend: VllmBackend) -> None:
    """The last test of this module: it closes the engine that all others share."""

    async def drained(events: AsyncIterator[BackendEvent]) -> None:
        async with asyncio.timeout(10):
            async for _ in events:
                pass

    endless = SamplingParams(max_tokens=MAX_MODEL_LEN, ignore_eos=True)
    async with aclosing(backend.generate(at_once(prompts_of(A)), endless)) as events:
        await anext(events)
        closing = asyncio.create_task(backend.aclose())
        with pytest.raises(BackendError, match="closed"):
            await drained(events)
        await closing
    assert backend.process_ids == []
    with pytest.raises(BackendError, match="not running"):
        await anext(backend.generate(at_once(prompts_of(A)), endless))
    await backend.aclose()
