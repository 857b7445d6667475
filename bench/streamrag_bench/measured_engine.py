"""A real vLLM engine that returns token ids and reports its steps: for measurements, not for serving.

    async with running_engine(model, args, policy="fcfs") as client:
        async for token_ids in client.generate("q1", prompt, 16): ...

`streamrag_bench.arms.Client` is the interface that this shares with the simulated engine's client.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import TYPE_CHECKING, Any

import anyio.to_thread

from streamrag.backends.tokenizer import local_model_path
from streamrag.backends.vllm.client.arguments import scheduler_args
from streamrag.backends.vllm.client.calls import ask_engine, request_outputs, vllm_model_errors_translated
from streamrag.backends.vllm.client.processes import CPU_BLOCK_SIZE, EngineProcesses, check_can_start, import_vllm
from streamrag.backends.vllm.client.stats import EngineStats
from streamrag.backends.vllm.client.stats import MeasuredStep as MeasuredStep
from streamrag.backends.vllm.client.token_streams import TokenStream, TokenStreams, record_of
from streamrag.backends.vllm.facts import EngineFacts, engine_facts
from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.core import AnswerChunk, Hint, Prompt, SamplingParams
from streamrag.errors import BackendError, ConfigurationError
from streamrag.records import RequestRecord

if TYPE_CHECKING:
    from vllm.engine.protocol import StreamingInput
    from vllm.v1.engine.async_llm import AsyncLLM


@asynccontextmanager
async def running_engine(
    model: str, engine_args: Mapping[str, Any], *, policy: str | None, kv_tokens: int | None = None
) -> AsyncIterator["EngineClient"]:
    """Run an engine with our scheduler and this policy, or with None vLLM's own; yield its client. Stops it at the end.

    `kv_tokens` is the capacity of its KV cache, in whole blocks; None is vLLM's choice, and 4 GiB on a CPU.

    :raises ConfigurationError: the event loop's time is virtual, or vLLM refuses the arguments.
    :raises MissingDependencyError: vLLM is not installed.
    :raises ModelError: vLLM cannot load the model.
    :raises BackendError: the engine fails otherwise.
    """
    if getattr(asyncio.get_running_loop(), "is_virtual", False):
        raise ConfigurationError("a real engine needs the wall clock: simulate the cell, or use asyncio.run")
    name_or_path = local_model_path(model) or model
    async with aclosing(EngineProcesses(name_or_path)) as processes:
        await anyio.to_thread.run_sync(import_vllm, abandon_on_cancel=True)
        stats = EngineStats(keeps_steps=True)
        args = _for_measuring(engine_args, policy, kv_tokens)
        engine = await processes.start(args, stat_loggers=[lambda config, index: stats])
        yield EngineClient(engine, stats.steps, processes.why_dead)


def model_len(model: str) -> int:
    """Return the most tokens of prompt and answer that vLLM allows for a model. Imports vLLM, which takes seconds.

    :raises ModelError: there is no such model, or its configuration cannot be read.
    :raises MissingDependencyError: vLLM is not installed.
    """
    name_or_path = local_model_path(model) or model
    check_can_start(name_or_path)
    args = import_vllm().AsyncEngineArgs(model=str(name_or_path), skip_tokenizer_init=True)
    with vllm_model_errors_translated(model):
        return int(args.create_model_config().max_model_len)


def _for_measuring(engine_args: Mapping[str, Any], policy: str | None, kv_tokens: int | None) -> dict[str, Any]:
    """Return `engine_args`, timed and without tokenizer, with our scheduler for a policy and `kv_tokens` as blocks."""
    from vllm.config import CacheConfig
    from vllm.platforms import current_platform

    args = {"skip_tokenizer_init": True, "enable_logging_iteration_details": True, **engine_args}
    if policy is not None:
        args |= scheduler_args("streaming", SchedulerOptions(policy=policy), args)
    if kv_tokens is not None:
        default = CPU_BLOCK_SIZE if current_platform.is_cpu() else CacheConfig.DEFAULT_BLOCK_SIZE
        args["num_gpu_blocks_override"] = kv_tokens // args.get("block_size", default)
    return args


class EngineClient:
    """A client of one running engine. Created by `running_engine`."""

    def __init__(self, engine: "AsyncLLM", steps: list[MeasuredStep], why_dead: Callable[[], str]) -> None:
        self._engine = engine
        self._streams = TokenStreams(engine, why_dead=why_dead)
        self._why_dead = why_dead
        self._num_requests = 0
        self.steps = steps  # the steps so far
        self.records: dict[str, list[RequestRecord]] = {}
        """Records of the requests by query id, from our scheduler only."""

    @property
    def facts(self) -> EngineFacts:
        """Facts about the engine that its profile depends on."""
        return engine_facts(self._engine.vllm_config)

    @property
    def block_size(self) -> int:
        return int(self._engine.vllm_config.cache_config.block_size)

    @property
    def kv_tokens(self) -> int:
        return int(self._engine.vllm_config.cache_config.num_gpu_blocks) * self.block_size

    @property
    def is_async(self) -> bool:
        """Whether it plans one step while another computes."""
        return bool(self._engine.vllm_config.scheduler_config.async_scheduling)

    async def reset_prefix_cache(self) -> None:
        await ask_engine(self._engine, self._engine.reset_prefix_cache(), self._why_dead)

    async def generate(
        self, query_id: str, token_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Send a prompt and yield pieces of its greedy answer: `num_output_tokens` token ids, end tokens included.

        Adds our scheduler's record to `records`. Closing the generator aborts the request.
        """
        async with aclosing(self._outputs(query_id, _tokens_input(token_ids), num_output_tokens)) as outputs:
            async for output in outputs:
                self._add_record(query_id, record_of(output))
                if output.outputs[0].token_ids:
                    yield tuple(output.outputs[0].token_ids)

    @asynccontextmanager
    async def stream(
        self, query_id: str, token_ids: Sequence[int], num_output_tokens: int, *, is_complete: bool = False
    ) -> AsyncIterator["EngineStream"]:
        """Open a prompt that changes while it is computed, for an answer of exactly `num_output_tokens` tokens.

        Leaving the context aborts an unfinished request; without an error, the record is added to `records`.
        """
        params = SamplingParams(max_tokens=num_output_tokens, ignore_eos=True)
        async with self._streams.open(Prompt(tuple(token_ids), is_complete=is_complete), params) as stream:
            yield EngineStream(stream)
            self._add_record(query_id, stream.record)

    async def session(
        self, query_id: str, chunks: AsyncIterator[tuple[Sequence[int], int]]
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Push each chunk into one of vLLM's own sessions, and yield all answers' tokens. Closing aborts the request.

        `chunks` are pairs of tokens and the number of answer tokens, at least 1. vLLM may merge rapid chunks.
        """

        async def inputs() -> AsyncGenerator["StreamingInput", None]:
            from vllm.engine.protocol import StreamingInput

            async for token_ids, num_output_tokens in chunks:
                yield StreamingInput(_tokens_input(token_ids), _params(num_output_tokens))

        async with aclosing(self._outputs(query_id, inputs(), 1)) as outputs:
            async for output in outputs:
                if output.outputs[0].token_ids:
                    yield tuple(output.outputs[0].token_ids)

    async def _outputs(self, query_id: str, prompt: Any, num_output_tokens: int) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs of a greedy request under a new id. Closing the generator aborts the request."""
        self._num_requests += 1
        request_id = f"{query_id}#{self._num_requests}"
        params = _params(num_output_tokens)
        async with aclosing(request_outputs(self._engine, prompt, params, request_id, self._why_dead)) as outputs:
            async for output in outputs:
                yield output

    def _add_record(self, query_id: str, record: RequestRecord | None) -> None:
        if record is not None:
            self.records.setdefault(query_id, []).append(record)


class EngineStream:
    """A prompt that changes while it is computed. Created by `EngineClient.stream`."""

    def __init__(self, stream: TokenStream) -> None:
        self._stream = stream

    async def append(self, token_ids: Sequence[int], *, is_complete: bool = False, hint: Hint | None = None) -> None:
        """Append tokens; with `is_complete`, have the answer sampled, and ignore the hint."""
        if is_complete:
            await self._stream.finish(token_ids)
        else:
            await self._stream.append(token_ids, hint=hint)

    async def update(self, token_ids: Sequence[int], *, is_complete: bool = False, hint: Hint | None = None) -> None:
        """Replace the prompt; with `is_complete`, have the answer sampled."""
        await self._stream.update(Prompt(tuple(token_ids), is_complete=is_complete, hint=hint))

    async def __aiter__(self) -> AsyncGenerator[tuple[int, ...], None]:
        async for event in self._stream:
            if isinstance(event, AnswerChunk) and event.token_ids:
                yield event.token_ids
            if isinstance(event, AnswerChunk) and event.finish_reason == "error":
                raise BackendError("the engine dropped the stream")


def _tokens_input(token_ids: Sequence[int]) -> Any:
    from vllm.inputs import tokens_input

    return tokens_input(list(token_ids))


def _params(num_output_tokens: int) -> Any:
    """Return vLLM's parameters of a greedy answer of exactly this many tokens, sent as ids in pieces, without text."""
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    return SamplingParams(
        max_tokens=num_output_tokens,
        temperature=0.0,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
