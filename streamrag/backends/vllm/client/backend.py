"""A vLLM engine embedded in this process's event loop; the model runs in processes of its own."""

import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import anyio.to_thread

from streamrag.backends.tokenizer import HuggingFaceTokenizer, local_model_path
from streamrag.backends.vllm.client.arguments import Strategy, scheduler_args
from streamrag.backends.vllm.client.calls import ask_engine, request_outputs
from streamrag.backends.vllm.client.processes import EngineProcesses, import_vllm
from streamrag.backends.vllm.client.sampling import for_stream, to_vllm
from streamrag.backends.vllm.client.stats import EngineStats
from streamrag.backends.vllm.client.streaming import stream_then_generate
from streamrag.backends.vllm.client.token_streams import TokenStreams, check_prompt_len, record_of
from streamrag.backends.warming import warm_then_generate
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Progress, Prompt, SamplingParams
from streamrag.core.lifecycle import started_once
from streamrag.engine.eviction import EvictionMode
from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.errors import BackendError, ConfigurationError, EngineDeadError, ModelError
from streamrag.records import KvHeld, KvUse
from streamrag.support.tasks import run_regardless
from streamrag.support.validation import Count, PositiveFraction, validated

T = TypeVar("T")


class VllmBackend:
    """Any model that vLLM 0.32 loads, on CPU or CUDA.

    With the strategy "streaming" vLLM runs our scheduler, in which a prompt may grow and change while it is computed.
    With "warming" vLLM is left as it is, and partial prompts are prefilled by warming its prefix cache.

    vLLM starts its processes by importing the program's main module anew, so a program must start under
    `if __name__ == "__main__":`.

    model: a folder, or a name on the Hugging Face hub.
    strategy: how partial prompts are prefilled.
    policy: who is served first: "arrival", "fcfs", "lcas", "lcas_oldest", "mcps", "k_lpm(4)", "srpf(ageing=0.1)", or
        "package.module.function" of a function from a `RequestView` and the time to something to sort by.
    can_partial_evict: whether a prompt that is not complete may take memory from another one. By default only one that
        grows may, and only where host memory has room for the KV of all: others would compute it in vain, in turn.
    eviction: what becomes of the KV of those that must make room: it is computed again, copied to host memory and back
        ("swap"), or whatever is expected to take less time ("cost", the default where host memory can be had).
    host_kv_bytes: bounds the host memory of each worker. By default they share a quarter of the machine's,
        and none takes more than six times its KV cache.
    profile: name or path of the hardware's costs; without one they are estimated from the model's shape, and corrected
        by what the engine's own steps take.
    max_model_len: most tokens of prompt and answer together. This, and what else is None below, is vLLM's choice.
    dtype: of weights and KV, as vLLM names it. "auto" is vLLM's choice, or float32 on a CPU without instructions
        for that choice, unless the weights are quantized.
    max_num_batched_tokens: most tokens computed in one step.
    max_num_seqs: most requests computed in one step.
    kv_cache_bytes: size of the KV cache, in place of `gpu_memory_utilization`; 4 GiB by default on a CPU.
    gpu_memory_utilization: the share of the device's memory to use, of a CPU's too.
    seed: of vLLM's random numbers, for requests that have none.
    collect_stats: whether the engine tells of itself after each step: `kv_use`, and vLLM's own metrics, which it
        registers with prometheus_client's default registry.
    log_path: where the engine's own log goes; else a temporary file, which is read when the engine fails.
    engine_args: further arguments of `vllm.AsyncEngineArgs`; they take precedence.

    :raises ConfigurationError: values that cannot work.
    """

    @validated
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        strategy: Strategy = "streaming",
        policy: str = DEFAULT_POLICY,
        can_partial_evict: bool | None = None,
        eviction: EvictionMode | None = None,
        host_kv_bytes: Count | None = None,
        profile: str | None = None,
        max_model_len: Count | None = None,
        dtype: str = "auto",
        max_num_batched_tokens: Count | None = None,
        max_num_seqs: Count | None = None,
        kv_cache_bytes: Count | None = None,
        gpu_memory_utilization: PositiveFraction | None = None,
        seed: int = 0,
        collect_stats: bool = False,
        log_path: str | os.PathLike[str] | None = None,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        if kv_cache_bytes is not None and gpu_memory_utilization is not None:
            raise ConfigurationError("kv_cache_bytes and gpu_memory_utilization exclude each other: give one")
        self._model_name = str(model)
        self._path = local_model_path(model)
        self._log_path = Path(log_path) if log_path else None
        self._strategy = strategy
        self._stats = EngineStats() if collect_stats else None
        named = {
            "max_model_len": max_model_len,
            "dtype": dtype,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "kv_cache_memory_bytes": kv_cache_bytes,
            "gpu_memory_utilization": gpu_memory_utilization,
            "seed": seed,
        }
        args = {name: value for name, value in named.items() if value is not None} | dict(engine_args or {})
        others = {"eviction": eviction, "host_kv_bytes": host_kv_bytes, "profile": profile}
        if collect_stats and strategy == "streaming":
            others["tells_kv_use"] = True
        self._engine_args = args | scheduler_args(strategy, policy, can_partial_evict, args, **others)
        self._vllm: Any = None
        self._engine: Any = None
        self._streams: TokenStreams | None = None
        self._processes: EngineProcesses | None = None
        self._info: ModelInfo | None = None
        self._block_size = 1
        self._request_ids: set[str] = set()

    @property
    def model(self) -> ModelInfo:
        """The model, once the backend has started."""
        if self._info is None:
            raise BackendError("the engine has not been started: await backend.start(print) first")
        return self._info

    @property
    def streams(self) -> TokenStreams:
        """Streams into the running engine, for programs that push the tokens of their prompts themselves.

        :raises BackendError: when the engine is not running, or does not run our scheduler.
        """
        self._live_engine()
        if self._streams is None:
            raise BackendError('an engine with strategy="warming" has no streams: start it with strategy="streaming"')
        return self._streams

    # ------------------------------------------------------------------------------------------- starting and stopping

    @started_once
    async def start(self, progress: Progress) -> None:
        """Start the engine's processes, which takes 20 to 60 s, most of it imports.

        :raises MissingDependencyError: when vLLM is not installed.
        :raises UnsupportedVersionError: when it is not 0.32.
        :raises ModelError: when it cannot load the model.
        :raises ConfigurationError: when it, or our scheduler, refuses the arguments.
        :raises BackendError: when it fails otherwise.
        """
        began_s = time.monotonic()
        model = self._path or self._model_name
        self._processes = processes = EngineProcesses(model, self._log_path)
        try:
            progress("importing vLLM")
            self._vllm = await anyio.to_thread.run_sync(import_vllm, abandon_on_cancel=True)
            progress(f"loading {self._model_name}" + ("" if self._path else " from the Hugging Face hub or its cache"))
            make_tokenizer = partial(HuggingFaceTokenizer.of_engine, model, self._engine_args)
            tokenizer = await anyio.to_thread.run_sync(make_tokenizer, abandon_on_cancel=True)
            # vLLM makes its own metrics when it is given any logger of stats.
            stats = self._stats
            stat_loggers = [] if stats is None else [lambda config, index: stats]
            self._engine = await processes.start(self._engine_args, stat_loggers=stat_loggers)
            if "generate" not in await self._ask(self._engine.get_supported_tasks()):
                raise ModelError(f"{self._model_name} does not generate text")
        except BaseException:
            await self.aclose()
            raise
        self._streams = TokenStreams(self._engine, why_dead=self._why_dead) if self._strategy == "streaming" else None
        cache = self._engine.vllm_config.cache_config
        model_config = self._engine.vllm_config.model_config
        max_model_len, dtype = model_config.max_model_len, str(model_config.dtype).removeprefix("torch.")
        # Where nothing is cached, nothing is worth warming: no prompt has a whole block.
        self._block_size = cache.block_size if cache.enable_prefix_caching else max_model_len
        self._info = ModelInfo(self._model_name, tokenizer, max_model_len)
        num_kv_tokens = cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size
        progress(f"ready in {time.monotonic() - began_s:.0f} s, KV cache of {num_kv_tokens:,} tokens, {dtype}")

    async def aclose(self) -> None:
        """Abort what is running, and end the engine's processes. Does nothing when not started."""
        engine, self._engine, self.is_started = self._engine, None, False
        streams, self._streams = self._streams, None
        processes, self._processes = self._processes, None
        if processes is not None:
            await run_regardless(self._close(engine, streams, processes), "vLLM backend closes")

    async def _close(self, engine: Any, streams: TokenStreams | None, processes: EngineProcesses) -> None:
        async with aclosing(processes):
            if streams is not None:
                await streams.aclose()
            if engine is not None and not engine.errored:
                await engine.abort(list(self._request_ids))

    # ------------------------------------------------------------------------------------------------------- answering

    async def generate(
        self, prompts: AsyncIterator[Prompt], params: SamplingParams
    ) -> AsyncGenerator[BackendEvent, None]:
        """Prefill each prompt as it comes; sample the answer to the complete one.

        :raises PromptTooLongError: when a prompt leaves no room for an answer.
        :raises ConfigurationError: for parameters that vLLM does not know, or that a streamed prompt cannot have.
        :raises EngineDeadError: when the engine's processes are gone.
        :raises BackendError: when the engine fails otherwise.
        """
        answering = to_vllm(params, self._live_engine().vllm_config)
        if self._strategy == "streaming":
            for_stream(answering)  # what it refuses, it refuses before retrieval begins
            events = stream_then_generate(prompts, self.streams, params)
        else:
            events = self._warm_then_generate(prompts, answering)
        async with aclosing(events):
            async for event in events:
                yield event

    def _warm_then_generate(self, prompts: AsyncIterator[Prompt], answering: Any) -> AsyncGenerator[BackendEvent, None]:
        # Greedy and without text: the one token is not used.
        warming = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)

        async def prefill(token_ids: tuple[int, ...]) -> None:
            async with aclosing(self._request(token_ids, warming)) as outputs:
                async for _ in outputs:
                    pass

        async def answer(token_ids: tuple[int, ...]) -> AsyncGenerator[AnswerChunk, None]:
            async with aclosing(self._request(token_ids, answering)) as outputs:
                async for output in outputs:
                    (part,) = output.outputs
                    yield AnswerChunk(
                        part.text, tuple(part.token_ids), part.finish_reason, record_of(output), part.logprobs or None
                    )

        return warm_then_generate(prompts, prefill=prefill, generate=answer, block_size=self._block_size)

    async def _request(self, token_ids: tuple[int, ...], params: Any) -> AsyncGenerator[Any, None]:
        """Yield vLLM's RequestOutputs of one request; closing the generator aborts it."""
        engine = self._live_engine()
        check_prompt_len(len(token_ids), self.model.max_model_len)
        request_id = uuid.uuid4().hex
        prompt = self._vllm.inputs.tokens_input(list(token_ids))
        self._request_ids.add(request_id)
        try:
            async with aclosing(request_outputs(engine, prompt, params, request_id, self._why_dead)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            self._request_ids.discard(request_id)

    def _why_dead(self) -> str:
        if self._engine is None or self._processes is None:
            return "the engine was closed"
        return self._processes.why_dead()

    # ----------------------------------------------------------------------------------------------------- maintenance

    @property
    def process_ids(self) -> list[int]:
        """Ids of the engine's first processes, which may have started others."""
        if self._engine is None:
            return []
        return [process.pid for process in self._engine.engine_core.resources.engine_manager.processes]

    async def num_unfinished_requests(self) -> int:
        """Count the requests that the engine holds: streams, idle ones too, and warming requests.

        Counted in this process, where a request ends a moment before the engine hears of its abort, so the engine is
        asked as well: it counts as one request as long as it has work.
        """
        engine = self._live_engine()
        has_work = await self._ask(engine.engine_core.call_utility_async("has_work"))
        return max(int(has_work), int(engine.output_processor.get_num_unfinished_requests()))

    @property
    def kv_use(self) -> KvUse | None:
        """Use of the engine's KV memory at the end of its last step; None if it collects no stats.

        Once no request is open there are no more steps, and none of them holds anything.
        """
        use = self._stats.kv_use() if self._stats is not None and self._engine is not None else None
        if use is None or self._engine.output_processor.get_num_unfinished_requests():
            return use
        nothing = KvHeld(0, 0)
        return replace(use, running=nothing, waiting=nothing, idle=nothing)

    async def reset_prefix_cache(self) -> bool:
        """Forget all cached KV; False if that is impossible because requests hold blocks."""
        return bool(await self._ask(self._live_engine().reset_prefix_cache()))

    def check_health(self) -> None:
        """Check that the engine runs, as far as this process knows: it hears of a process that died within a moment.

        :raises EngineDeadError: its processes are gone.
        :raises BackendError: it was not started, or was closed.
        """
        self._live_engine()

    def _live_engine(self) -> Any:
        if self._engine is None:
            raise BackendError("the engine is not running: it was closed, or not started")
        if self._engine.errored:
            raise EngineDeadError(self._why_dead())
        return self._engine

    async def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        return await ask_engine(self._engine, question, self._why_dead)
