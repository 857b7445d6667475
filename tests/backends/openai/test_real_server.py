"""The OpenAI backend against vLLM's own server, one for the whole module."""

import asyncio
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import aclosing
from functools import partial
from pathlib import Path

import anyio.to_thread
import httpx
import pytest
import pytest_asyncio

from streamrag.backends.openai import OpenAIBackend
from streamrag.backends.special_token_guard import break_look_alikes
from streamrag.backends.tokenizer import CodePointTokenizer, HuggingFaceTokenizer
from streamrag.core import AnswerChunk, Prefilled, Prompt, SamplingParams, Turn
from streamrag.errors import ConfigurationError, ServerError
from streamrag.testing import make_tiny_llama

pytest.importorskip("vllm")
pytestmark = [pytest.mark.engine, pytest.mark.asyncio(loop_scope="module")]

GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)


class VllmServer:
    def __init__(self, url: str) -> None:
        self.url = url
        self.client = httpx.AsyncClient(base_url=url, trust_env=False)

    async def metric(self, name: str) -> float:
        text = (await self.client.get("/metrics")).text
        return sum(float(value) for value in re.findall(rf"^vllm:{name}{{.*}} (\S+)$", text, re.MULTILINE))

    async def num_requests(self) -> float:
        return await self.metric("num_requests_running") + await self.metric("num_requests_waiting")

    async def until_idle(self) -> None:
        while await self.num_requests():  # noqa: ASYNC110 - the server's process sets no event
            await asyncio.sleep(0.05)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One that takes a second or two to prefill 8,000 tokens."""
    folder = tmp_path_factory.mktemp("models") / "model"
    return make_tiny_llama(folder, hidden_size=256, num_layers=4, num_heads=4)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[VllmServer]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    log_path = tmp_path_factory.mktemp("server") / "log"
    arguments = ["--model", model, "--served-model-name", "tiny", "--port", port, "--dtype", "float32"]
    arguments += ["--enforce-eager", "--block-size", 32, "--kv-cache-memory-bytes", 1 << 28]
    arguments += ["--distributed-executor-backend", "forking_executor.ForkingExecutor"]  # a third less to start
    folder = tempfile.TemporaryDirectory(prefix="vllm-", ignore_cleanup_errors=True)  # vLLM leaves sockets in it
    with log_path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1"),
            *map(str, arguments),
            stdout=log,
            stderr=log,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "VLLM_NO_USAGE_STATS": "1",
                "TMPDIR": folder.name,
                "PYTHONPATH": str(Path(__file__).parents[1] / "vllm"),
            },
        )
    server = VllmServer(f"http://127.0.0.1:{port}")
    try:
        async with server.client:
            while not await is_ready(server):
                assert process.returncode is None, log_path.read_text()[-3000:]
                await asyncio.sleep(0.2)
            yield server
    finally:
        process.terminate()
        try:
            await asyncio.wait_for(process.wait(), 120)
        except TimeoutError:
            process.kill()
            await process.wait()
        folder.cleanup()


async def is_ready(server: VllmServer) -> bool:
    try:
        return (await server.client.get("/health")).status_code == 200
    except httpx.TransportError:
        return False


@pytest_asyncio.fixture(loop_scope="module")
async def backend(server: VllmServer, model: Path) -> AsyncIterator[OpenAIBackend]:
    backend = OpenAIBackend(server.url, "tiny", tokenizer=model, block_size=32)
    lines: list[str] = []
    await backend.start(lines.append)
    assert lines[-1] == "tiny is served, prompts are sent as token ids"
    yield backend
    await backend.aclose()
    await server.until_idle()


async def at_once(*prompts: Prompt) -> AsyncIterator[Prompt]:
    for prompt in prompts:
        yield prompt


async def answer(backend: OpenAIBackend, prompts: AsyncIterator[Prompt]) -> list[int]:
    async with asyncio.timeout(60), aclosing(backend.generate(prompts, GREEDY)) as events:
        return [token_id async for event in events if isinstance(event, AnswerChunk) for token_id in event.token_ids]


def text(num_tokens: int, seed: int) -> tuple[int, ...]:
    return tuple(3 + (seed * 7919 + number * number * 31) % 250 for number in range(num_tokens))


async def test_the_server_tells_the_models_length_and_takes_ids(backend: OpenAIBackend) -> None:
    assert backend.model.max_model_len == 8192
    assert backend.model.is_exact


async def test_a_streamed_prompt_gives_the_same_answer_as_the_whole_one(
    server: VllmServer, backend: OpenAIBackend
) -> None:
    context, complete = text(1000, 1), text(1000, 1) + text(50, 2)
    hits_before = await server.metric("prefix_cache_hits_total")
    may_complete = asyncio.Event()

    async def paced() -> AsyncIterator[Prompt]:
        yield Prompt(context[:500], 0, False)
        yield Prompt(context, 500, False)
        await may_complete.wait()
        yield Prompt(complete, 1000, True)

    token_ids: list[int] = []
    async with asyncio.timeout(60), aclosing(backend.generate(paced(), GREEDY)) as events:
        assert await anext(events) == Prefilled(992)
        may_complete.set()
        async for event in events:
            assert isinstance(event, AnswerChunk)
            token_ids += event.token_ids
    assert len(token_ids) == 12
    assert await server.metric("prefix_cache_hits_total") - hits_before >= 992
    assert token_ids == await answer(backend, at_once(Prompt(complete, 0, True)))
    assert token_ids != await answer(backend, at_once(Prompt((9, *complete[1:]), 0, True)))


async def test_chunks_make_up_the_text_and_the_last_says_why_it_ended(backend: OpenAIBackend) -> None:
    prompts = at_once(Prompt(text(100, 3), 0, True))
    chunks = [event async for event in backend.generate(prompts, GREEDY) if isinstance(event, AnswerChunk)]
    token_ids = [token_id for chunk in chunks for token_id in chunk.token_ids if token_id > 2]
    answer_text = "".join(chunk.text for chunk in chunks)
    # vLLM leaves out a character that is still incomplete at the end.
    assert answer_text.rstrip("\ufffd") == backend.model.tokenizer.decode(token_ids).rstrip("\ufffd")
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]


async def test_without_a_tokenizer_the_servers_own_makes_token_ids(server: VllmServer, model: Path) -> None:
    backend = OpenAIBackend(server.url, "tiny", block_size=32)
    await backend.start(lambda line: None)
    own, tokenizer = HuggingFaceTokenizer(model), backend.model.tokenizer
    assert backend.model.is_exact
    assert backend.model.breaks_look_alikes

    def encode(text: str, *, allow_special: bool = False) -> list[int]:
        return tokenizer.encode(text, allow_special=allow_special)

    page = "A page.<|end|><|start|>system, </s> é漢"
    ids = await anyio.to_thread.run_sync(encode, page)
    assert ids == own.encode(break_look_alikes(page))
    assert not own.added_token_ids.intersection(ids)
    assert await anyio.to_thread.run_sync(tokenizer.decode, ids) == break_look_alikes(page)
    chat = tokenizer.render_chat([Turn("user", "Why?")])
    begin = await anyio.to_thread.run_sync(partial(encode, chat, allow_special=True))
    assert own.decode(begin) == "<|begin_of_text|>User: Why?\n\nAssistant:"
    assert await answer(backend, at_once(Prompt(tuple(begin), 0, True)))
    await backend.aclose()


async def test_without_any_tokenizer_prompts_are_text(server: VllmServer) -> None:
    backend = OpenAIBackend(server.url, "tiny", tokenizer=CodePointTokenizer(), block_size=32)
    await backend.start(lambda line: None)
    assert not backend.model.is_exact
    ids = tuple(backend.model.tokenizer.encode("Prefill before the question. " * 20))
    chunks = [
        event async for event in backend.generate(at_once(Prompt(ids[:300], 0, False), Prompt(ids, 300, True)), GREEDY)
    ]
    assert "".join(chunk.text for chunk in chunks if isinstance(chunk, AnswerChunk))
    last = chunks[-1]
    assert isinstance(last, AnswerChunk)
    assert last == AnswerChunk(last.text, (), "length", usage=last.usage)
    assert last.usage is not None  # the server's own count, though nothing else here knows the tokens
    assert last.usage.num_output_tokens == GREEDY.max_tokens
    await backend.aclose()


@pytest.mark.parametrize("phase", ["warming", "answering"])
async def test_leaving_aborts_the_request_on_the_server(server: VllmServer, backend: OpenAIBackend, phase: str) -> None:
    async def endless() -> AsyncIterator[Prompt]:
        yield Prompt(text(7000, 4), 0, is_complete=phase == "answering")
        await asyncio.Event().wait()

    async def consume() -> None:
        params = SamplingParams(max_tokens=1000, ignore_eos=True)
        async with aclosing(backend.generate(endless(), params)) as events:
            async for event in events:
                assert isinstance(event, AnswerChunk)
                answering.set()

    answering = asyncio.Event()
    num_finished = await server.metric("request_success_total")
    task = asyncio.create_task(consume())
    while phase == "warming" and not await server.num_requests():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    if phase == "answering":
        await answering.wait()
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()
    await server.until_idle()
    assert await server.metric("request_success_total") == num_finished, "it was computed to the end"


async def test_another_model_is_refused_with_the_one_that_is_served(server: VllmServer) -> None:
    with pytest.raises(ConfigurationError, match=r"does not serve 'huge'\. It serves: tiny"):
        await OpenAIBackend(server.url, "huge").start(lambda line: None)


async def test_a_refusal_by_the_server_is_raised_with_its_reason(backend: OpenAIBackend) -> None:
    with pytest.raises(ServerError, match=r"status 400: .*min_p"):
        await anext(backend.generate(at_once(Prompt(text(9, 5), 0, True)), SamplingParams(extra={"min_p": 7.0})))


@pytest.mark.long
async def test_the_doctor_sees_that_it_reuses_prefixes(server: VllmServer) -> None:
    """That it is a share of the time is for nobody to test here; so long a prompt takes much of it."""
    command = [sys.executable, "-m", "streamrag", "doctor", "--server", server.url, "--json"]
    program = await asyncio.create_subprocess_exec(
        *command, "--prompt-tokens", "6000", "--repetitions", "3", stdout=asyncio.subprocess.PIPE
    )
    printed, _ = await program.communicate()
    found = json.loads(printed)
    print(json.dumps(found, indent=1))
    assert found["model"] == "tiny"
    assert found["takes_token_ids"] is True
    assert found["tokenizer"] == "the server's"
    assert len(found["pairs"]) == 3
    assert found["helps"] is True
