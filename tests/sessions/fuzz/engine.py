"""vLLM's real client and scheduler in one event loop, in virtual time, with a runner that knows what KV must hold.

    Session ─▶ TokenStreams ─▶ AsyncLLM ─▶ SimulatedCore ─▶ our scheduler, vLLM's KV cache ─▶ OracleRunner

Only the model is missing, and the socket between vLLM's two processes.
"""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import aclosing
from functools import reduce
from types import SimpleNamespace
from typing import Any

from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest
from vllm.v1.outputs import ModelRunnerOutput

from streamrag import BackendEvent, Prompt, SamplingParams
from streamrag.backends.simulated.engine import SimulatedEngine
from streamrag.backends.simulated.loop import Abort, EngineLoop, Input
from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.backends.vllm.client.streaming import stream_then_generate
from streamrag.backends.vllm.client.token_streams import TokenStreams
from streamrag.core import ModelInfo
from tests.backends.vllm.client.fake_engine import make_client
from tests.engine.oracle import OracleRunner, V1OracleRunner, V2OracleRunner, fingerprint, next_token

__all__ = [
    "LONGEST",
    "VOCABULARY",
    "CheckedEngine",
    "OracleBackend",
    "SimulatedCore",
    "V1Runner",
    "V2Runner",
    "answer_to",
    "prepare",
]

VOCABULARY = 50
END = 2
"""The token that ends an answer, as the client's model has it."""
LONGEST = 400
"""Tokens of prompt and answer, at most."""


def answer_to(prompt: Sequence[int], params: SamplingParams, allowed: Sequence[int] = ()) -> tuple[int, ...]:
    """What the model answers to this prompt, asked in one request: the truth."""
    prefix = reduce(fingerprint, prompt, 0)
    answer: list[int] = []
    while len(answer) < min(params.max_tokens, LONGEST - len(prompt)):
        answer.append(sampled(prefix, allowed))
        if answer[-1] == END and not params.ignore_eos:
            break
        prefix = fingerprint(prefix, answer[-1])
    return tuple(answer)


def sampled(prefix: int, allowed: Sequence[int]) -> int:
    """The token behind a prefix, of those that may be."""
    return sorted(allowed)[prefix % len(allowed)] if allowed else next_token(prefix, VOCABULARY)


class _Restricted(OracleRunner):
    """Samples of the tokens that a request allows."""

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._allowed: dict[str, list[int]] = {}

    def execute(self, step: SchedulerOutput) -> ModelRunnerOutput:
        for request_id in step.finished_req_ids:
            self._allowed.pop(request_id, None)
        for new in step.scheduled_new_reqs:
            self._allowed[new.req_id] = (new.sampling_params and new.sampling_params.allowed_token_ids) or []
        return super().execute(step)

    def choose(self, request_id: str, prefix: int) -> int:
        return sampled(prefix, self._allowed[request_id])


class V1Runner(_Restricted, V1OracleRunner):
    """The first kind of model runner."""


class V2Runner(_Restricted, V2OracleRunner):
    """The second kind of model runner."""


class CheckedEngine(SimulatedEngine):
    """Is looked at after each step, and does between two steps what an operator wants done."""

    check: Callable[[], None]
    _wanted: tuple[Callable[[], None], ...] = ()

    def collect(self) -> list[EngineCoreOutput]:
        outputs = super().collect()
        self.check()
        wanted, self._wanted = self._wanted, ()
        for action in wanted:
            action()
        return outputs

    def do(self, action: Callable[[], None]) -> None:
        """At once if no step is in flight."""
        if self._in_flight:
            self._wanted = (*self._wanted, action)
        else:
            action()


class SimulatedCore:
    """The engine at the other end of vLLM's socket.

    Whoever sends something waits for some turns of the loop before it is sent, and for some more before it hears so.
    """

    def __init__(self, engine: CheckedEngine, num_turns: int) -> None:
        self.engine = engine
        self.resources = SimpleNamespace(engine_dead=False, output_queue_task=None)
        self._num_turns = num_turns
        self._outputs: asyncio.Queue[EngineCoreOutputs] = asyncio.Queue()
        self._loop = EngineLoop(engine, delivery_s=0.0, took_in=lambda message: None, deliver=self._deliver)

    async def run(self) -> None:
        """Until it is cancelled."""
        await self._loop.run()

    def _deliver(self, output: EngineCoreOutput) -> None:
        self._outputs.put_nowait(EngineCoreOutputs(outputs=[output]))

    # ----------------------------------------------------------------------------------------- what vLLM's client calls

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        await self._turns()
        return ("generate",)

    async def get_output_async(self) -> EngineCoreOutputs:
        return await self._outputs.get()

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        await self._turns()
        assert request.sampling_params is not None
        now_s = asyncio.get_running_loop().time()
        token_ids = request.prompt_token_ids or []
        self._loop.send(
            Input(request.request_id, token_ids, request.sampling_params, now_s, is_session=request.resumable)
        )
        await self._turns()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        await self._turns()
        for request_id in request_ids:
            self._loop.send(Abort(request_id, asyncio.get_running_loop().time()))
        await self._turns()

    async def _turns(self) -> None:
        for _ in range(self._num_turns):
            await asyncio.sleep(0)


class OracleBackend:
    """A backend as `VllmBackend` is one, on this core. Its tokens are characters."""

    def __init__(self, core: SimulatedCore) -> None:
        self.client = make_client(core, LONGEST)
        self.model = ModelInfo("oracle", CodePointTokenizer(), LONGEST)
        self.num_open: Counter[str] = Counter()
        """Streams by their source's name."""
        self._streams = TokenStreams(self.client, clock=asyncio.get_running_loop().time)

    async def generate(
        self, prompts: AsyncIterator[Prompt], params: SamplingParams
    ) -> AsyncGenerator[BackendEvent, None]:
        names: set[str] = set()

        async def named() -> AsyncGenerator[Prompt, None]:
            async for prompt in prompts:
                if prompt.source_name not in names:
                    names.add(prompt.source_name)
                    self.num_open[prompt.source_name] += 1
                yield prompt

        try:
            async with (
                aclosing(named()) as seen,
                aclosing(stream_then_generate(seen, self._streams, params)) as events,
            ):
                async for event in events:
                    yield event
        finally:
            self.num_open.subtract(names)


def prepare() -> None:
    """Make vLLM's client, which takes seconds the first time, and starts no task where no loop runs."""
    make_client(None, LONGEST)
