"""A vLLM engine embedded in this process's event loop. The model runs in separate processes."""

import os
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Mapping
from contextlib import aclosing
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import anyio.to_thread

from streamrag.backends.tokenizer import HuggingFaceTokenizer, local_model_path
from streamrag.backends.vllm.client.arguments import Strategy, draft_args, scheduler_args
from streamrag.backends.vllm.client.calls import ask_engine, request_outputs
from streamrag.backends.vllm.client.lane_engine import NO_LANE, Lane, lane_args, lane_environment, lane_facts
from streamrag.backends.vllm.client.processes import EngineProcesses, import_vllm
from streamrag.backends.vllm.client.sampling import for_stream, to_vllm
from streamrag.backends.vllm.client.stats import EngineStats
from streamrag.backends.vllm.client.streaming import stream_then_generate
from streamrag.backends.vllm.client.token_streams import TokenStreams, check_prompt_len, record_of
from streamrag.backends.vllm.scheduler_options import SchedulerOptions
from streamrag.backends.warming import warm_then_generate
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Progress, Prompt, SamplingParams
from streamrag.core.lifecycle import started_once
from streamrag.errors import BackendError, EngineDeadError, ModelError
from streamrag.records import KvHeld, KvUse
from streamrag.support.tasks import run_shielded
from streamrag.support.validation import Count, Flag, validated

T = TypeVar("T")


class VllmBackend:
    """Runs any model that vLLM loads, on CPU or CUDA.

    With the strategy "streaming" vLLM runs our scheduler, in which a prompt may grow and change while it is computed.
    With "warming" vLLM is unchanged, and partial prompts are prefilled by warming its prefix cache.

    vLLM starts its processes by importing the program's main module again, so a program must start under
    `if __name__ == "__main__":`.

    model: a folder, or a name on the Hugging Face hub.
    scheduler: how our scheduler orders requests, and what it does with their KV.
    strategy: how partial prompts are prefilled.
    answer_ahead: whether the engine verifies drafts of answers, for `Pipeline(answer_ahead=True)`. It then schedules
        synchronously, as on a CPU anyway, and refuses the parameters `min_p`, `logit_bias` and `logprob_token_ids`.
    lane: "prefill" for an engine that computes prompts for others, "decode" for one that samples their answers; see
        `DisaggregatedBackend`. NIXL moves the KV, so none goes to host memory. A decode lane runs vLLM's own scheduler.
    max_model_len: most tokens of prompt and answer together. This, and further options that are None, is vLLM's choice.
    max_num_batched_tokens: most tokens computed in one step.
    max_num_seqs: most requests computed in one step.
    kv_cache_bytes: size of the KV cache; by default 4 GiB on a CPU.
    host_kv_bytes: limit of host memory per worker. By default all workers share a quarter of the machine's memory, and
        each takes at most six times its KV cache.
    collect_stats: whether the engine reports statistics after each step: `kv_use`, but not of a lane, and vLLM's own
        metrics, which it registers with prometheus_client's default registry.
    engine_args: further arguments of `vllm.AsyncEngineArgs`, such as `dtype` and `seed`; they take precedence. Without
        a `dtype` it is vLLM's choice, or float32 on a CPU without instructions for that choice, unless the weights are
        quantized.

    :raises ConfigurationError: an option has an invalid value, or options exclude each other.
    """

    @validated
    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        scheduler: SchedulerOptions | None = None,
        strategy: Strategy = "streaming",
        answer_ahead: Flag = False,
        lane: Lane | None = None,
        max_model_len: Count | None = None,
        max_num_batched_tokens: Count | None = None,
        max_num_seqs: Count | None = None,
        kv_cache_bytes: Count | None = None,
        host_kv_bytes: Count | None = None,
        collect_stats: bool = False,
        engine_args: Mapping[str, Any] | None = None,
    ) -> None:
        self._model_name = str(model)
        self._path = local_model_path(model)
        self.lane = lane
        self._strategy = strategy = "warming" if lane == "decode" else strategy
        self.stats = EngineStats() if collect_stats else None
        named = {
            "max_model_len": max_model_len,
            "max_num_batched_tokens": max_num_batched_tokens,
            "max_num_seqs": max_num_seqs,
            "kv_cache_memory_bytes": kv_cache_bytes,
        }
        args = {name: value for name, value in named.items() if value is not None} | dict(engine_args or {})
        self._answer_ahead = answer_ahead
        scheduler = scheduler or SchedulerOptions()
        args |= lane_args(lane, strategy, scheduler.eviction, answer_ahead, args) if lane else {}
        args |= draft_args(strategy, args) if answer_ahead else {}
        # vLLM's metrics of NIXL take no other values.
        reports_kv_use = True if collect_stats and strategy == "streaming" and lane is None else None
        others = {"host_kv_bytes": host_kv_bytes, "reports_kv_use": reports_kv_use}
        self._engine_args = args | scheduler_args(strategy, scheduler, args, **others)
        self._vllm: Any = None
        self._engine: Any = None
        self._streams: TokenStreams | None = None
        self._processes: EngineProcesses | None = None
        self._info: ModelInfo | None = None
        self._block_size = 1
        self.lane_facts = NO_LANE  # until the engine runs
        self._request_ids: set[str] = set()

    @property
    def model(self) -> ModelInfo:
        """The engine's model and tokenizer; raises BackendError before the start."""
        if self._info is None:
            raise BackendError("the engine has not been started: await backend.start(print) first")
        return self._info

    @property
    def streams(self) -> TokenStreams:
        """Streams into the running engine, for programs that push their prompts' tokens themselves.

        :raises BackendError: when the engine is not running, or does not run our scheduler.
        """
        self._live_engine()
        if self._streams is None:
            raise BackendError('an engine with strategy="warming" has no streams: start it with strategy="streaming"')
        return self._streams

    @started_once
    async def start(self, progress: Progress) -> None:
        """Load the tokenizer, start the engine's processes and set `model`, in 20 to 60 s. If that fails, close all.

        :raises MissingDependencyError: when vLLM is not installed.
        :raises UnsupportedVersionError: when the installed series of vLLM is not supported.
        :raises ModelError: when vLLM cannot load the model, or the model does not generate text.
        :raises ConfigurationError: when vLLM, or our scheduler, refuses the arguments.
        :raises BackendError: when the engine fails otherwise.
        """
        began_s = time.monotonic()
        model = self._path or self._model_name
        self._processes = processes = EngineProcesses(model)
        try:
            progress("importing vLLM")
            self._vllm = await anyio.to_thread.run_sync(import_vllm, abandon_on_cancel=True)
            progress(f"loading {self._model_name}" + ("" if self._path else " from the Hugging Face hub or its cache"))
            make_tokenizer = partial(HuggingFaceTokenizer.of_engine, model, self._engine_args)
            tokenizer = await anyio.to_thread.run_sync(make_tokenizer, abandon_on_cancel=True)
            # With any stat logger, vLLM also registers its own metrics.
            stat_loggers: list[Any] = [] if self.stats is None else [lambda config, index: self.stats]
            with lane_environment(self.lane) as environment:
                self._engine = await processes.start(self._engine_args, environment, stat_loggers=stat_loggers)
            if "generate" not in await self._ask(self._engine.get_supported_tasks()):
                raise ModelError(f"{self._model_name} does not generate text")
        except BaseException:
            await self.aclose()
            raise
        self._streams = TokenStreams(self._engine, why_dead=self._why_dead) if self._strategy == "streaming" else None
        config = self._engine.vllm_config
        has_cache = config.cache_config.enable_prefix_caching  # without one, no prompt fills a block: nothing is warmed
        self._block_size = config.cache_config.block_size if has_cache else config.model_config.max_model_len
        self.lane_facts = lane_facts(config)
        self._info = ModelInfo(
            self._model_name,
            tokenizer,
            config.model_config.max_model_len,
            shares_processors=config.device_config.device_type == "cpu",
            verifies_drafts=self._answer_ahead,
            min_head_len=None if self.lane else config.cache_config.block_size,
        )
        progress(f"ready in {time.monotonic() - began_s:.0f} s, {_memory(config)}")

    async def aclose(self) -> None:
        """Abort all requests and stop the engine's processes. Does nothing if the backend is not started."""
        engine, self._engine, self.is_started = self._engine, None, False
        streams, self._streams = self._streams, None
        processes, self._processes = self._processes, None
        if processes is not None:
            await run_shielded(self._close(engine, streams, processes), "vLLM backend closes")

    async def _close(self, engine: Any, streams: TokenStreams | None, processes: EngineProcesses) -> None:
        """Abort all streams and, unless the engine is dead, other requests; then stop the processes in any case."""
        async with aclosing(processes):
            if streams is not None:
                await streams.aclose()
            if engine is not None and not engine.errored:
                await engine.abort(list(self._request_ids))

    def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncGenerator[BackendEvent, None]:
        """Prefill each prompt when it arrives; yield `Prefilled` if it is computed while the newest, then the answer.

        For several answers, the complete prompt is a request of its own. With the strategy "warming", each prompt is,
        except partial ones that add little. With `prompt_logprobs`, no partial prompt is prefilled. Parameters are
        checked before the first prompt is read.

        :raises PromptTooLongError: when a prompt leaves no room for an answer.
        :raises ConfigurationError: when vLLM does not know a parameter, or a streamed prompt cannot have it.
        :raises EngineDeadError: when the engine's processes are gone.
        :raises BackendError: when the engine fails otherwise.
        """
        answering = to_vllm(params, self._live_engine().vllm_config)
        answer = partial(self._answer, answering)
        if self._strategy == "warming" or answering.prompt_logprobs is not None:
            # vLLM computes all of a prompt for its log-probabilities: nothing is prefilled before.
            block_size = self._block_size if answering.prompt_logprobs is None else self.model.max_model_len
            return warm_then_generate(prompts, prefill=self._prefill, generate=answer, block_size=block_size)
        if answering.n > 1:
            one_token = SamplingParams(max_tokens=1)
            return stream_then_generate(prompts, self.streams, one_token, lambda stream: answer(stream.token_ids))
        for_stream(answering)  # raises before retrieval begins
        return stream_then_generate(prompts, self.streams, params)

    async def _prefill(self, token_ids: tuple[int, ...]) -> None:
        """Compute the KV of a prompt, by a request for one token, which is discarded."""
        params = self._vllm.SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        async with aclosing(self._request(token_ids, params)) as outputs:
            async for _ in outputs:
                pass

    async def _answer(self, params: Any, token_ids: tuple[int, ...]) -> AsyncGenerator[AnswerChunk, None]:
        """Yield a chunk for each output and alternative; the first has the log-probabilities of the complete prompt.

        The engine's record is in the last chunk, if there is one alternative only.
        """
        is_first = True
        async with aclosing(self._request(token_ids, params)) as outputs:
            async for output in outputs:
                record = record_of(output) if params.n == 1 else None
                for part in output.outputs:
                    values = part.text, tuple(part.token_ids), part.finish_reason, record, part.logprobs or None
                    rows = output.prompt_logprobs if is_first else None  # vLLM repeats them after a preemption
                    yield AnswerChunk(*values, prompt_logprobs=rows, index=part.index)
                    is_first = False

    async def _request(self, token_ids: tuple[int, ...], params: Any) -> AsyncGenerator[Any, None]:
        """Yield vLLM's outputs of a new request; closing the generator aborts the request.

        Raises PromptTooLongError, or BackendError if the engine is not running, before there is a request.
        """
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

    @property
    def process_ids(self) -> list[int]:
        """Ids of the engine's first processes. These may have started others."""
        if self._engine is None:
            return []
        return [process.pid for process in self._engine.engine_core.resources.engine_manager.processes]

    async def num_unfinished_requests(self) -> int:
        """Count the unfinished requests: streams, including idle ones, and warming requests.

        They are counted in this process, where an aborted request ends slightly before the engine processes the abort.
        An engine that still has work therefore counts as at least one request.
        """
        engine = self._live_engine()
        has_work = await self._ask(engine.engine_core.call_utility_async("has_work"))
        return max(int(has_work), int(engine.output_processor.get_num_unfinished_requests()))

    @property
    def kv_use(self) -> KvUse | None:
        """Use of the engine's KV memory after its last step.

        None if our scheduler does not run with `collect_stats`, before the first step, and when closed.

        Without open requests there are no further steps, so `running`, `waiting` and `idle` are 0 then.
        """
        use = self.stats.kv_use() if self.stats is not None and self._engine is not None else None
        if use is None or self._engine.output_processor.get_num_unfinished_requests():
            return use
        nothing = KvHeld(0, 0)
        return replace(use, running=nothing, waiting=nothing, idle=nothing)

    async def reset_prefix_cache(self) -> bool:
        """Drop all cached KV. Return whether that was possible: it is not while requests hold blocks."""
        return bool(await self._ask(self._live_engine().reset_prefix_cache()))

    def check_health(self) -> None:
        """Check that the engine is running. This process notices a dead engine within a moment.

        :raises EngineDeadError: its processes are gone.
        :raises BackendError: it was not started, or was closed.
        """
        self._live_engine()

    def check_params(self, params: SamplingParams) -> None:
        """Check the parameters of an answer, with its grammar; raise ConfigurationError if vLLM refuses them."""
        to_vllm(params, self._live_engine().vllm_config, self._engine.tokenizer)

    def _live_engine(self) -> Any:
        """Return the engine; raise BackendError if it is not running, EngineDeadError if its processes are gone."""
        if self._engine is None:
            raise BackendError("the engine is not running: it was closed, or not started")
        if self._engine.errored:
            raise EngineDeadError(self._why_dead())
        return self._engine

    async def _ask(self, question: Coroutine[Any, Any, T]) -> T:
        return await ask_engine(self._engine, question, self._why_dead)


def _memory(config: Any) -> str:
    """Describe the size of the KV cache, and its dtype."""
    cache = config.cache_config
    num_tokens = cache.kv_cache_size_tokens or cache.num_gpu_blocks * cache.block_size
    return f"KV cache of {num_tokens:,} tokens, {str(config.model_config.dtype).removeprefix('torch.')}"
