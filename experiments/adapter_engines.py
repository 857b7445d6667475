"""vLLM's own server, an engine in this process, and a slow site, for `adapters.py`."""

import asyncio
import os
import socket
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import httpx
from adapter_applications import MODEL

from streamrag import OpenAIBackend, SamplingParams, VllmBackend
from streamrag.core import BackendEvent, ModelInfo, Prompt

ROOT = Path(__file__).resolve().parent.parent
SETTINGS: dict[str, Any] = {
    "max_model_len": 8_192,
    "dtype": "float32",
    "block_size": 32,
    "enforce_eager": True,
    "kv_cache_memory_bytes": 1 << 29,
}
"""Of both engines."""


class Kept:
    """A backend that keeps the last prompt."""

    def __init__(self, backend: OpenAIBackend | VllmBackend) -> None:
        self._backend = backend
        self.prompt: tuple[int, ...] = ()

    @property
    def model(self) -> ModelInfo:
        return self._backend.model

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncGenerator[BackendEvent]:
        async def kept() -> AsyncIterator[Prompt]:
            async for prompt in prompts:
                self.prompt = prompt.token_ids
                yield prompt

        async with aclosing(self._backend.generate(kept(), params)) as events:
            async for event in events:
                yield event


@dataclass(frozen=True)
class Served:
    """vLLM's own server."""

    url: str
    backend: OpenAIBackend
    _client: httpx.AsyncClient

    async def forget(self) -> None:
        """Empty the prefix cache."""
        (await self._client.post("/reset_prefix_cache")).raise_for_status()

    async def prompt_of(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """The token ids that the server makes of them."""
        response = await self._client.post("/tokenize", json={"model": MODEL, "messages": messages})
        return tuple(response.raise_for_status().json()["tokens"])


@dataclass(frozen=True)
class Embedded:
    """vLLM in this process."""

    backend: VllmBackend

    async def forget(self) -> None:
        """Empty the prefix cache."""
        await self.backend.reset_prefix_cache()


@asynccontextmanager
async def start_server(model: Path, log: Path) -> AsyncIterator[Served]:
    async with AsyncExitStack() as stack:
        url, process = await stack.enter_async_context(_serve_model(model, log))
        client = await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False, timeout=60))
        while not await _is_ready(client):
            if process.returncode is not None:
                raise SystemExit(f"vLLM's server has not started:\n{await anyio.Path(log).read_text()}")
            await asyncio.sleep(0.2)
        backend = OpenAIBackend(url, MODEL, tokenizer=model, block_size=SETTINGS["block_size"])
        stack.push_async_callback(backend.aclose)
        await backend.start(lambda line: None)
        yield Served(url, backend, client)


@asynccontextmanager
async def start_embedded(model: Path) -> AsyncIterator[Embedded]:
    backend = VllmBackend(
        model,
        max_model_len=SETTINGS["max_model_len"],
        dtype=SETTINGS["dtype"],
        kv_cache_bytes=SETTINGS["kv_cache_memory_bytes"],
        engine_args={name: SETTINGS[name] for name in ("block_size", "enforce_eager")},
    )
    try:
        await backend.start(lambda line: None)
        yield Embedded(backend)
    finally:
        await backend.aclose()


@asynccontextmanager
async def serve_site(folder: Path) -> AsyncIterator[str]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, str(ROOT / "examples" / "demo_site.py"), str(folder)), stdout=asyncio.subprocess.PIPE
    )
    assert process.stdout
    try:
        yield f"http://127.0.0.1:{int(await process.stdout.readline())}"
    finally:
        process.terminate()
        await process.wait()


@asynccontextmanager
async def _serve_model(model: Path, log: Path) -> AsyncIterator[tuple[str, Process]]:
    """The address and the process of vLLM's own server, which is starting."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = {**SETTINGS, "served_model_name": MODEL, "host": "127.0.0.1"}
    arguments = [f"--model={model}", f"--port={port}"]
    for name, value in options.items():
        option = f"--{name.replace('_', '-')}"
        arguments.append(option if value is True else f"{option}={value}")
    environment = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_SERVER_DEV_MODE": "1"}
    with log.open("wb") as written:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "vllm.entrypoints.openai.api_server", *arguments),
            stdout=written,
            stderr=written,
            env={**os.environ, **environment, "TMPDIR": str(log.parent)},
        )
    try:
        yield f"http://127.0.0.1:{port}", process
    finally:
        if process.returncode is None:
            process.terminate()
        await process.wait()


async def _is_ready(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).is_success
    except httpx.TransportError:
        return False
