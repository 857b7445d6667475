"""A client of a simulated engine, which runs as a task in virtual time.

    async with SimulatedClient(engine) as client:
        async for token_ids in client.generate("q1", prompt, 16): ..       # a plain request
        async with client.stream("q2", prompt, 16) as stream: ..           # for our scheduler
        async for token_ids in client.session("q3", chunks): ..            # for vLLM's own

`streamrag_bench.arms.Client` is the interface that this shares with a real engine's client.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from functools import cache

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason

from streamrag.backends.simulated.blind_runner import BlindRunner, Runner
from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine, quick_block_hasher
from streamrag.backends.simulated.loop import Abort, EngineLoop, Input, check_virtual
from streamrag.backends.simulated.stock_records import StockRecords
from streamrag.backends.simulated.stream import Outputs, SimulatedStream, next_output
from streamrag.backends.vllm.chunk_wire import KEY, PromptMessage
from streamrag.backends.vllm.scheduler.hooks import streaming_scheduler
from streamrag.backends.vllm.scheduler.host_memory.costs import parts_of
from streamrag.core import RequestClass
from streamrag.engine.costs.copy_costs import CopyCosts
from streamrag.engine.costs.step_profiles import StepPart
from streamrag.errors import BackendError
from streamrag.records import RequestRecord
from streamrag.support.tasks import wait_shielded


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """A step that computed tokens, and the number of tokens for each query."""

    start_s: float
    end_s: float
    num_tokens_of: dict[str, int]


def by_parts(step_s: Callable[[Sequence[StepPart]], float]) -> Callable[[SchedulerOutput, float], float]:
    """Return a function of a step and its start that calls `step_s` with the step's parts; 0 if there are no tokens."""

    def compute_s(step: SchedulerOutput, start_s: float) -> float:
        return step_s([part for _, part in parts_of(step)]) if step.total_num_scheduled_tokens else 0.0

    return compute_s


def simulated_engine(
    shape: EngineShape,
    step_s: Callable[[SchedulerOutput, float], float],
    *,
    is_stock: bool,
    copy_costs: CopyCosts | None = None,
    runner: Runner | None = None,
) -> SimulatedEngine:
    """Construct an engine with vLLM's own scheduler (`is_stock`) or ours, and fast hashes for its prefix cache.

    `step_s` returns the seconds of a step, given its start. Without a `runner`, the engine always samples the same
    token, and reports copies as fast as `copy_costs` say.
    """
    stock = AsyncScheduler if shape.is_async else Scheduler
    return SimulatedEngine(
        shape,
        runner or BlindRunner(copy_costs=copy_costs),
        step_s,
        stock if is_stock else streaming_scheduler,
        block_hasher=quick_block_hasher(shape.block_size) if shape.has_prefix_cache else None,
    )


@cache
class SimulatedClient:
    """Runs the engine inside its context. The event loop's time must be virtual."""

    def __init__(self, engine: SimulatedEngine, *, delivery_s: float = 0.0, keep_steps: bool = False) -> None:
        self._engine = engine
        self._loop = EngineLoop(engine, delivery_s=delivery_s, took_in=self._record_input, deliver=self._deliver)
        self._failure: Exception | None = None
        self._outputs: dict[str, Outputs] = {}
        self._query_of: dict[str, str] = {}
        self._num_requests = 0
        self._stock_records = StockRecords()
        self._keeps_steps = keep_steps
        self.steps: list[SimulatedStep] = []  # the steps that computed tokens, if they are kept
        self.records: dict[str, list[RequestRecord]] = {}
        """Records of each query's requests, in the order in which they ended."""
        self.busy_s = 0.0  # seconds in which the engine computed
        engine.on_step = self._on_step

    @property
    def block_size(self) -> int:
        return self._engine.shape.block_size

    @property
    def num_steps(self) -> int:
        """Number of steps so far, including empty ones."""
        return self._engine.num_steps

    async def __aenter__(self) -> "SimulatedClient":
        check_virtual()
        self._task = asyncio.create_task(self._run(), name="simulated engine")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await wait_shielded([self._task])

    async def generate(
        self, query_id: str, token_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Send a prompt and yield the answer's `num_output_tokens` tokens as they arrive. Closing the generator aborts
        the request. Raises BackendError if the engine fails or drops the request."""
        with self._opened(query_id) as (request_id, outputs):
            self.send(request_id, token_ids, num_output_tokens)
            while True:
                output = await next_output(outputs)
                if output.new_token_ids:
                    yield tuple(output.new_token_ids)
                if output.finish_reason is not None:
                    return

    @asynccontextmanager
    async def stream(
        self,
        query_id: str,
        token_ids: Sequence[int],
        num_output_tokens: int,
        *,
        is_complete: bool = False,
        request_class: RequestClass = "pool",
        draft: Sequence[int] = (),
    ) -> AsyncIterator["SimulatedStream"]:
        """Send a prompt, and yield the stream that can change it. Leaving the context aborts an unfinished request."""
        with self._opened(query_id) as (request_id, outputs):
            stream = SimulatedStream(self.send, request_id, outputs, num_output_tokens, request_class)
            await stream.update(token_ids, is_complete=is_complete, draft=draft)
            yield stream

    async def session(
        self, query_id: str, chunks: AsyncIterator[tuple[Sequence[int], int]]
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Push all chunks into one of vLLM's own sessions, which answers each, and yield the new tokens of each output.

        `chunks` are pairs of tokens and the number of answer tokens, at least 1. An error of `chunks` is raised.
        Closing the generator aborts the request.
        """
        with self._opened(query_id) as (request_id, outputs):
            num_unanswered, is_all_sent = 0, False

            async def push() -> None:
                nonlocal num_unanswered, is_all_sent
                try:
                    async for token_ids, num_output_tokens in chunks:
                        num_unanswered += 1
                        self.send(request_id, token_ids, num_output_tokens, is_session=True)
                    is_all_sent = True
                    outputs.put_nowait(EngineCoreOutput(request_id, []))  # wakes the reader if it has read all answers
                    self.send(request_id, [0], 1)  # ends the session, as vLLM's client does
                except Exception as error:
                    outputs.put_nowait(error)

            pushing = asyncio.create_task(push())
            try:
                while num_unanswered or not is_all_sent:
                    output = await next_output(outputs)
                    num_unanswered -= output.finish_reason is not None
                    if output.new_token_ids:
                        yield tuple(output.new_token_ids)
            finally:
                pushing.cancel()
                await wait_shielded([pushing])

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @contextmanager
    def _opened(self, query_id: str) -> Iterator[tuple[str, Outputs]]:
        """Yield a new request's id and output queue, and abort the request if it has not ended after the block. Raises
        BackendError at once if the engine has failed."""
        request_id = f"{query_id}#{self._num_requests}"
        self._num_requests += 1
        if self._failure:
            raise self._failed()
        outputs = self._outputs[request_id] = asyncio.Queue()
        self._query_of[request_id] = query_id
        try:
            yield request_id, outputs
        finally:
            if self._outputs.pop(request_id, None) is not None:  # the request has not ended
                self._loop.send(Abort(request_id, self._now()))

    def send(
        self,
        request_id: str,
        token_ids: Sequence[int],
        num_output_tokens: int,
        chunk: PromptMessage | None = None,
        *,
        is_session: bool = False,
    ) -> None:
        params = SamplingParams(max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        self._loop.send(Input(request_id, token_ids, params, self._now(), chunk, is_session))

    async def _run(self) -> None:
        """Run the engine until cancelled; after an error, fail all open requests and new ones, and raise the error."""
        try:
            await self._loop.run()
        except Exception as error:
            self._failure = error
            for outputs in self._outputs.values():
                outputs.put_nowait(self._failed())
            raise

    def _failed(self) -> BackendError:
        return BackendError(f"the simulated engine failed: {self._failure!r}")

    def _record_input(self, message: Input | Abort) -> None:
        """Add an input of the engine to its request's record, or end the record because of an abort."""
        now_s = self._engine.now_s
        if isinstance(message, Abort):
            self._add_record(message.request_id, self._stock_records.end(message.request_id, "aborted", now_s))
        else:
            self._stock_records.add(message.request_id, len(message.token_ids), message.sent_s, now_s)

    def _deliver(self, output: EngineCoreOutput) -> None:
        """Queue an output for its request's reader, or a BackendError if the request was dropped. At the end of the
        request, keep the record of our scheduler, or one from `StockRecords`."""
        ours = (output.kv_transfer_params or {}).get(KEY, {})
        request_id = output.request_id
        outputs = self._outputs.get(request_id)
        is_end_of_chunk = "chunk" in ours  # not of the answer
        if "record" in ours and not is_end_of_chunk:
            self._add_record(request_id, RequestRecord.from_dict(ours["record"]))
        if outputs is None:
            return
        if is_end_of_chunk:
            outputs.put_nowait(output)
            return
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            why = ours.get("error", output.finish_reason)
            outputs.put_nowait(BackendError(f"{request_id}: the engine dropped it: {why}"))
        else:
            outputs.put_nowait(output)
        self._stock_records.add_output(request_id, len(output.new_token_ids))
        if output.finish_reason is not None and request_id not in self._engine.scheduler.requests:
            del self._outputs[request_id]
            self._add_record(request_id, self._stock_records.end(request_id, "finished", self._engine.now_s))

    def _add_record(self, request_id: str, record: RequestRecord | None) -> None:
        query_id = self._query_of.pop(request_id, None)
        if record and query_id is not None:
            self.records.setdefault(query_id, []).append(record)

    def _on_step(self, step: SchedulerOutput, start_s: float, end_s: float) -> None:
        """Add a step to `busy_s`, to the stock records, and to `steps` if they are kept."""
        self.busy_s += end_s - start_s
        self._stock_records.add_step(step, start_s, end_s)
        if self._keeps_steps:
            tokens = {self._query_of.get(r, r): n for r, n in step.num_scheduled_tokens.items()}
            self.steps.append(SimulatedStep(start_s, end_s, tokens))
