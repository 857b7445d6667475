"""A simulated engine as its clients see it: vLLM's loop as a task, in virtual time.

    async with SimulatedClient(engine) as client:
        async for token_ids in client.generate("q1", prompt, 16): ..       # a plain request
        async with client.stream("q2", prompt, 16) as stream: ..           # for our scheduler
        async for token_ids in client.session("q3", chunks): ..            # for vLLM's own

`streamrag.bench.arms.Client` is what this and a real engine's client have in common.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, FinishReason

from streamrag.backends.simulated.config import EngineShape
from streamrag.backends.simulated.engine import SimulatedEngine
from streamrag.backends.simulated.hashing import quick_block_hasher
from streamrag.backends.simulated.loop import Abort, EngineLoop, Input, check_virtual
from streamrag.backends.simulated.runner import BlindRunner
from streamrag.backends.simulated.stream import Answer, SimulatedStream
from streamrag.backends.simulated.watch import Watch
from streamrag.backends.vllm.chunk_wire import KEY, PromptMessage
from streamrag.backends.vllm.scheduler.scheduler import streaming_scheduler
from streamrag.backends.vllm.scheduler.step_parts import parts_of
from streamrag.core import RequestClass
from streamrag.engine.copies import CopyCosts
from streamrag.engine.costs import Part
from streamrag.errors import BackendError
from streamrag.records import RequestRecord
from streamrag.support.tasks import wait_regardless


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One step that computed, and how many tokens for whom."""

    start_s: float
    end_s: float
    num_tokens_of: dict[str, int]


@dataclass(slots=True)
class _Progress:
    """How far one session is: chunks sent, chunks answered."""

    num_sent: int = 0
    num_answered: int = 0
    is_all_sent: bool = False


def by_parts(step_s: Callable[[Sequence[Part]], float]) -> Callable[[SchedulerOutput, float], float]:
    """How long steps take where only what they compute matters."""

    def compute_s(step: SchedulerOutput, start_s: float) -> float:
        return step_s([part for _, part in parts_of(step)]) if step.total_num_scheduled_tokens else 0.0

    return compute_s


def simulated_engine(
    shape: EngineShape,
    step_s: Callable[[SchedulerOutput, float], float],
    *,
    is_stock: bool,
    copy_costs: CopyCosts | None = None,
) -> SimulatedEngine:
    """An engine that answers always the same, with vLLM's own scheduler or with ours, and quick hashes."""
    stock = AsyncScheduler if shape.is_async else Scheduler
    return SimulatedEngine(
        shape,
        BlindRunner(copy_costs=copy_costs),
        step_s,
        stock if is_stock else streaming_scheduler,
        block_hasher=quick_block_hasher(shape.block_size) if shape.has_prefix_cache else None,
    )


class SimulatedClient:
    """Runs the engine while it is open. To be opened on a loop whose time is virtual."""

    def __init__(self, engine: SimulatedEngine, *, delivery_s: float = 0.0, keep_steps: bool = False) -> None:
        self._engine = engine
        self._loop = EngineLoop(engine, delivery_s=delivery_s, took_in=self._took_in, deliver=self._deliver)
        self._failure: Exception | None = None
        self._answers: dict[str, Answer] = {}
        self._query_of: dict[str, str] = {}
        self._num_requests = 0
        self._params_of: dict[int, SamplingParams] = {}
        self._steps: list[SimulatedStep] | None = [] if keep_steps else None
        self._watch = None if hasattr(engine.scheduler, "streaming_policy") else Watch()
        self.records: dict[str, list[RequestRecord]] = {}
        """By query: what became of its requests, in the order in which they ended. Aborted ones only where known."""
        self.busy_s = 0.0
        """Time in which the engine computed."""
        engine.on_step = self._on_step

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self._engine.shape.block_size

    @property
    def num_steps(self) -> int:
        """Steps so far, empty ones included."""
        return self._engine.num_steps

    @property
    def steps(self) -> Sequence[SimulatedStep]:
        """Those that computed, if they are kept."""
        return self._steps or ()

    async def __aenter__(self) -> "SimulatedClient":
        check_virtual()
        self._task = asyncio.create_task(self._run(), name="simulated engine")
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._task.cancel()
        await wait_regardless([self._task])

    # -------------------------------------------------------------------------------------------------- for clients

    async def generate(
        self, query_id: str, token_ids: Sequence[int], num_output_tokens: int
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Send a prompt and yield its answer as it comes; closing aborts."""
        with self._opened(query_id) as (request_id, answer):
            self.send(request_id, token_ids, num_output_tokens)
            while True:
                output = await answer.get()
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
    ) -> AsyncIterator["SimulatedStream"]:
        """A prompt that grows or changes while it is computed. Leaving the context aborts what is not finished."""
        with self._opened(query_id) as (request_id, answer):
            stream = SimulatedStream(self.send, request_id, answer, num_output_tokens, request_class)
            await stream.update(token_ids, is_complete=is_complete)
            yield stream

    async def session(
        self, query_id: str, chunks: AsyncIterator[tuple[Sequence[int], int]]
    ) -> AsyncGenerator[tuple[int, ...], None]:
        """Push each chunk into one of vLLM's own sessions, and yield the answers to all of them; closing aborts.

        `chunks` says of each how many tokens answer it, one at least.
        """
        with self._opened(query_id) as (request_id, answer):
            progress = _Progress()
            pushing = asyncio.create_task(self._push(request_id, answer, chunks, progress))
            try:
                while not (progress.is_all_sent and progress.num_answered == progress.num_sent):
                    output = await answer.get()
                    progress.num_answered += output.finish_reason is not None
                    if output.new_token_ids:
                        yield tuple(output.new_token_ids)
            finally:
                pushing.cancel()
                await wait_regardless([pushing])

    # ------------------------------------------------------------------------------------------------------- inside

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    @contextmanager
    def _opened(self, query_id: str) -> Iterator[tuple[str, Answer]]:
        request_id = f"{query_id}#{self._num_requests}"
        self._num_requests += 1
        if self._failure:
            raise self._failed()
        answer = self._answers[request_id] = Answer()
        self._query_of[request_id] = query_id
        try:
            yield request_id, answer
        finally:
            if self._answers.pop(request_id, None):  # else it has ended
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
        """Put one input on its way to the engine."""
        params = self._params(num_output_tokens)
        self._loop.send(Input(request_id, token_ids, params, self._now(), chunk, is_session))

    def _params(self, num_output_tokens: int) -> SamplingParams:
        if num_output_tokens not in self._params_of:
            self._params_of[num_output_tokens] = SamplingParams(
                max_tokens=num_output_tokens, temperature=0.0, ignore_eos=True, detokenize=False
            )
        return self._params_of[num_output_tokens]

    async def _push(
        self,
        request_id: str,
        answer: Answer,
        chunks: AsyncIterator[tuple[Sequence[int], int]],
        progress: _Progress,
    ) -> None:
        try:
            async for token_ids, num_output_tokens in chunks:
                progress.num_sent += 1
                self.send(request_id, token_ids, num_output_tokens, is_session=True)
            progress.is_all_sent = True
            answer.put(EngineCoreOutput(request_id, []))  # wakes whoever has read all answers already
            self.send(request_id, [0], 1)  # as vLLM's client does: the end of the session
        except Exception as error:
            answer.put(error)

    async def _run(self) -> None:
        try:
            await self._loop.run()
        except Exception as error:
            self._failure = error
            for answer in self._answers.values():
                answer.put(self._failed())
            raise

    def _failed(self) -> BackendError:
        return BackendError(f"the simulated engine failed: {self._failure!r}")

    def _took_in(self, message: Input | Abort) -> None:
        if self._watch is None:
            return
        now_s = self._engine.now_s
        if isinstance(message, Abort):
            self._note_end(message.request_id, self._watch.ends(message.request_id, "aborted", now_s))
        else:
            self._watch.adds(message.request_id, len(message.token_ids), message.sent_s, now_s)

    def _deliver(self, output: EngineCoreOutput) -> None:
        ours = (output.kv_transfer_params or {}).get(KEY, {})
        request_id = output.request_id
        answer = self._answers.get(request_id)
        if "chunk" in ours:  # the end of a chunk, not of the answer
            if answer is not None:
                answer.put(output)
            return
        if "record" in ours:
            self._note_end(request_id, RequestRecord.from_dict(ours["record"]))
        if answer is None:
            return
        if output.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
            answer.put(BackendError(f"{request_id}: the engine gave it up: {ours.get('error', output.finish_reason)}"))
        else:
            answer.put(output)
        if self._watch:
            self._watch.brings(request_id, len(output.new_token_ids))
        if output.finish_reason is not None and request_id not in self._engine.scheduler.requests:
            del self._answers[request_id]
            if self._watch:
                self._note_end(request_id, self._watch.ends(request_id, "finished", self._engine.now_s))

    def _note_end(self, request_id: str, record: RequestRecord | None) -> None:
        query_id = self._query_of.pop(request_id, None)
        if record and query_id is not None:
            self.records.setdefault(query_id, []).append(record)

    def _on_step(self, step: SchedulerOutput, start_s: float, end_s: float) -> None:
        self.busy_s += end_s - start_s
        if self._watch:
            self._watch.runs(step, start_s, end_s)
        if self._steps is not None:
            tokens = {self._query_of.get(r, r): n for r, n in step.num_scheduled_tokens.items()}
            self._steps.append(SimulatedStep(start_s, end_s, tokens))
