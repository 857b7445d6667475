# mypy: allow-subclassing-any
"""A real vLLM engine that answers token ids and tells its steps: for measuring, not for serving. Imports vLLM.

    async with running_engine(model, args, is_stock=False) as client:
        async for token_ids in client.generate("q1", prompt, 16): ...

`streamrag.bench.arms.Client` is what this and the simulated engine's client have in common.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import anyio
import vllm
from vllm.engine.protocol import StreamingInput
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.metrics.loggers import StatLoggerBase

from streamrag.backends.strategy import scheduler_args
from streamrag.backends.token_streams import StreamedTokens, TokenStream, TokenStreams, record_of
from streamrag.core import Hint, SamplingParams
from streamrag.errors import BackendError, ConfigurationError
from streamrag.records import RequestRecord

__all__ = ["EngineClient", "EngineStream", "MeasuredStep", "running_engine"]

CPU_BLOCK_SIZE = 32
"""The smallest that vLLM's CPU attention takes."""
GPU_BLOCK_SIZE = 16
"""vLLM's default."""
CPU_KV_CACHE_BYTES = 4 << 30


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """One step, as the engine's process timed it. Its end is when this process heard of it, a moment later."""

    end_s: float
    elapsed_s: float
    num_tokens: int
    num_requests: int


class _Steps(StatLoggerBase):
    """Takes down every step that the engine reports."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        self.steps: list[MeasuredStep] = []

    def record(self, scheduler_stats: Any, iteration_stats: Any, *args: Any, **kwargs: Any) -> None:
        details = scheduler_stats and scheduler_stats.iteration_details
        if details:
            num_tokens = details.num_ctx_tokens + details.num_generation_tokens
            num_requests = details.num_ctx_requests + details.num_generation_requests
            self.steps.append(MeasuredStep(time.monotonic(), details.elapsed_ms / 1e3, num_tokens, num_requests))

    def log_engine_initialized(self) -> None:
        """There is nothing to tell."""


@asynccontextmanager
async def running_engine(
    model: str, engine_args: Mapping[str, Any], *, policy: str | None, kv_tokens: int | None = None
) -> AsyncIterator["EngineClient"]:
    """An engine with our scheduler and this policy, or with vLLM's own if there is none.

    `kv_tokens` is the capacity of its KV cache; None leaves that to vLLM, but on a CPU it is 4 GiB.

    :raises ConfigurationError: the event loop's time is virtual, or vLLM refuses the arguments.
    """
    if getattr(asyncio.get_running_loop(), "is_virtual", False):
        raise ConfigurationError("a real engine runs on the wall clock only: simulate the cell, or use asyncio.run")
    args = {"skip_tokenizer_init": True, "enable_prefix_caching": True, **engine_args}
    if policy is not None:
        args |= scheduler_args("streaming", policy, None, args)
    if vllm.platforms.current_platform.is_cpu():
        args = {"block_size": CPU_BLOCK_SIZE, "enforce_eager": True, "dtype": "float32", **args}
        args.setdefault("kv_cache_memory_bytes", CPU_KV_CACHE_BYTES)
    if kv_tokens is not None:
        args["num_gpu_blocks_override"] = kv_tokens // args.get("block_size", GPU_BLOCK_SIZE)
    steps: list[_Steps] = []

    def make_steps(vllm_config: Any, engine_index: int = 0) -> _Steps:
        steps.append(_Steps(vllm_config, engine_index))
        return steps[-1]

    try:
        made = vllm.AsyncEngineArgs(model=model, enable_logging_iteration_details=True, **args)
        engine = AsyncLLM.from_engine_args(made, stat_loggers=[make_steps])
    except (OSError, ValueError, TypeError) as error:
        raise ConfigurationError(f"vLLM cannot start {model}: {error}") from error
    try:
        yield EngineClient(engine, steps[0].steps)
    finally:
        with anyio.CancelScope(shield=True):
            await _stop(engine)


async def _stop(engine: AsyncLLM) -> None:
    resources = engine.engine_core.resources
    tasks = [task for task in (engine.output_handler, resources.output_queue_task) if task]
    await asyncio.to_thread(engine.shutdown)
    if tasks:
        await asyncio.wait(tasks)
    await asyncio.to_thread(resources.ctx.destroy, 0)


class EngineClient:
    """Speaks to one running engine. Made by `running_engine`."""

    def __init__(self, engine: AsyncLLM, steps: list[MeasuredStep]) -> None:
        self._engine = engine
        self._streams = TokenStreams(engine)
        self._num_requests = 0
        self.steps = steps
        """All steps so far."""
        self.records: dict[str, list[RequestRecord]] = {}
        """By query: what became of its requests, from our scheduler only."""

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return int(self._engine.vllm_config.cache_config.block_size)

    @property
    def kv_tokens(self) -> int:
        """Capacity of the KV cache."""
        return int(self._engine.vllm_config.cache_config.num_gpu_blocks) * self.block_size

    @property
    def is_async(self) -> bool:
        """Whether it schedules one step while another computes."""
        return bool(self._engine.vllm_config.scheduler_config.async_scheduling)

    async def reset_prefix_cache(self) -> None:
        await self._engine.reset_prefix_cache()

    async def generate(
        self, query_id: str, token_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Send a prompt and yield its answer as it comes; closing aborts."""
        params = _params(num_output_tokens)
        outputs = self._engine.generate(tokens_input(list(token_ids)), params, self._request_id(query_id))
        async with aclosing(outputs):
            async for output in outputs:
                self._note(query_id, record_of(output))
                if output.outputs[0].token_ids:
                    yield tuple(output.outputs[0].token_ids)

    @asynccontextmanager
    async def stream(
        self, query_id: str, token_ids: Sequence[int], num_output_tokens: int, *, is_complete: bool = False
    ) -> AsyncIterator["EngineStream"]:
        """A prompt that grows or changes while it is computed. Leaving the context aborts what is not finished."""
        params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
        async with self._streams.open(token_ids, params, is_complete=is_complete) as stream:
            yield EngineStream(stream)
            self._note(query_id, stream.record)

    async def session(
        self, query_id: str, chunks: AsyncIterator[tuple[Sequence[int], bool]], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Push each chunk into one of vLLM's own sessions, and yield the answer to the last; closing aborts.

        `chunks` says of each whether it is the last. The others are answered with one token, which is not shown.
        """
        num_before = 0  # tokens that answer chunks before the last
        is_last_sent = False

        async def inputs() -> AsyncGenerator[StreamingInput, None]:
            nonlocal num_before, is_last_sent
            async for token_ids, is_last in chunks:
                is_last_sent = is_last
                num_before += not is_last
                yield StreamingInput(tokens_input(list(token_ids)), _params(num_output_tokens if is_last else 1))

        num_seen = 0
        outputs = self._engine.generate(inputs(), _params(num_output_tokens), self._request_id(query_id))
        async with aclosing(outputs):
            async for output in outputs:
                # Counted by tokens: what comes quickly, vLLM merges into one output, ends of chunks included.
                new = output.outputs[0].token_ids
                num_shown = min(num_seen + len(new) - num_before, len(new)) if is_last_sent else 0
                num_seen += len(new)
                if num_shown > 0:
                    yield tuple(new[len(new) - num_shown :])

    def _request_id(self, query_id: str) -> str:
        self._num_requests += 1
        return f"{query_id}#{self._num_requests}"

    def _note(self, query_id: str, record: RequestRecord | None) -> None:
        if record is not None:
            self.records.setdefault(query_id, []).append(record)


class EngineStream:
    """One growing prompt. Made by `EngineClient.stream`."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    async def append(self, token_ids: Sequence[int], *, is_last: bool = False, hint: Hint | None = None) -> None:
        """Let it grow; if it `is_last`, have the answer sampled."""
        if is_last:
            await self._stream.finish(token_ids)
        else:
            await self._stream.append(token_ids, hint=hint)

    async def update(self, token_ids: Sequence[int], *, is_last: bool = False, hint: Hint | None = None) -> None:
        """Replace it; if it `is_last`, have the answer sampled."""
        await self._stream.update(token_ids, is_last=is_last, hint=hint)

    async def __aiter__(self) -> AsyncGenerator[tuple[int, ...], None]:
        """The answer as it comes."""
        async for event in self._stream:
            if isinstance(event, StreamedTokens) and event.token_ids:
                yield event.token_ids
            if isinstance(event, StreamedTokens) and event.finish_reason == "error":
                raise BackendError("the engine gave the stream up")


def _params(num_output_tokens: int) -> Any:
    return vllm.SamplingParams(
        max_tokens=num_output_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
