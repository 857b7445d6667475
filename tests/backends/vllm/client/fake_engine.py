"""vLLM's real client before a made-up engine: it takes messages as our scheduler would, and keeps its own truth.

Of vLLM everything is real that runs in the program's process (`AsyncLLM`, its output processor and input tasks); what
is made up is the other end of its socket.
"""

import asyncio
import copy
import tempfile
from collections.abc import Coroutine, Generator, Iterable
from dataclasses import dataclass, field
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import vllm.v1.engine.async_llm as async_llm
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from vllm.v1.engine.core_client import EngineCoreClient
from vllm.v1.engine.exceptions import EngineDeadError as VllmEngineDeadError
from vllm.v1.engine.output_processor import OutputProcessor
from vllm.v1.executor import Executor

from streamrag.backends.vllm.chunk_wire import KEY, EndOfInput, decode
from streamrag.testing import make_tiny_llama

T = TypeVar("T")

MAX_MODEL_LEN = 64
TEXT_TOKENS = range(10, 200)


@dataclass
class Held:
    """A request in the engine."""

    prompt: list[int]
    num_messages: int = 1
    num_acknowledged: int = 0
    is_complete: bool = False
    params: Any = None


@dataclass
class FakeCore:
    """The engine's end of the socket."""

    answers_after: int | None = None
    """Turns of the loop after which each chunk is acknowledged, and each complete prompt answered, by itself."""
    num_turns: int = 0
    """How often a message waits for the socket before it is sent; who is cancelled meanwhile has sent nothing."""
    num_turns_after: int = 0
    """The same, but the message is on its way already."""
    is_deaf: bool = False
    """Whether questions stay without an answer."""
    held: dict[str, Held] = field(default_factory=dict)
    answered: dict[str, list[int]] = field(default_factory=dict)
    num_requests: int = 0
    problems: list[str] = field(default_factory=list)
    resources: Any = field(default_factory=lambda: SimpleNamespace(engine_dead=False, output_queue_task=None))
    outputs: "asyncio.Queue[EngineCoreOutputs | Exception]" = field(default_factory=asyncio.Queue)

    # ----------------------------------------------------------------------------------------- what vLLM's client calls

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return await self.call_utility_async(("generate",))

    async def call_utility_async(self, value: Any) -> Any:
        self._check_alive()
        await asyncio.sleep(0)
        if self.is_deaf:
            await asyncio.get_running_loop().create_future()
        return bool(self.held) if value == "has_work" else value

    async def reset_prefix_cache_async(self, *args: Any) -> bool:
        return bool(await self.call_utility_async(True))

    async def get_output_async(self) -> EngineCoreOutputs:
        outputs = await self.outputs.get()
        if isinstance(outputs, Exception):
            raise outputs
        return outputs

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self._check_alive()
        await self._turns(self.num_turns)
        if not self.resources.engine_dead:
            self._take(request)
        await self._turns(self.num_turns_after)

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        if request_ids and not self.resources.engine_dead:
            await self._turns(self.num_turns)
            for request_id in request_ids:
                self.held.pop(request_id, None)
            await self._turns(self.num_turns_after)

    def shutdown(self, timeout: float | None = None) -> None:
        self.die()

    def _check_alive(self) -> None:
        if self.resources.engine_dead:
            raise VllmEngineDeadError

    async def _turns(self, num: int) -> None:
        for _ in range(num):
            await asyncio.sleep(0)

    # ------------------------------------------------------------------------------------------------- as the scheduler

    def _take(self, request: EngineCoreRequest) -> None:
        assert request.sampling_params is not None
        message = decode(request.sampling_params.extra_args)
        request_id, new = request.request_id, list(request.prompt_token_ids or [])
        held = self.held.get(request_id)
        if isinstance(message, EndOfInput):
            if held and not held.is_complete:  # the client has refused a chunk
                self.give_up(request_id)
            return
        if message is None or message.index == 0:
            if held is not None or (message is not None and message.num_kept):
                self.problems.append(f"the first chunk came again, or keeps something: {message}")
            self.num_requests += 1
            self.held[request_id] = held = Held(new)
        elif held is None:
            return  # aborted
        else:
            if message.index != held.num_messages or held.is_complete or message.num_kept > len(held.prompt):
                self.problems.append(f"{message} does not follow {held}")
            held.prompt = held.prompt[: message.num_kept] + new
            held.num_messages += 1
        held.is_complete = message is None or message.is_complete
        held.params = request.sampling_params
        if self.answers_after is not None:
            self._answer_later(request_id, held.num_messages, self.answers_after)

    def _answer_later(self, request_id: str, num_messages: int, num_turns: int) -> None:
        held = self.held.get(request_id)
        if held is None or held.num_messages != num_messages:
            return
        if num_turns:
            asyncio.get_running_loop().call_soon(self._answer_later, request_id, num_messages, num_turns - 1)
            return
        self.acknowledge(request_id)
        if held.is_complete:
            self.answer(request_id, list(TEXT_TOKENS[:3]), is_last=True)

    def acknowledge(self, request_id: str) -> None:
        """The finishes that the client expects for all chunks but the last one of a complete prompt."""
        held = self.held[request_id]
        for index in range(held.num_acknowledged, held.num_messages - held.is_complete):
            self._send(request_id, [], FinishReason.STOP, {"chunk": index, "num_computed": len(held.prompt) - 1})
            held.num_acknowledged += 1

    def answer(self, request_id: str, token_ids: list[int], *, is_last: bool) -> None:
        if self.held[request_id].params.max_tokens == 1:  # a warming request
            token_ids, is_last = token_ids[:1], True
        self.answered.setdefault(request_id, []).extend(token_ids)
        self._send(request_id, token_ids, FinishReason.LENGTH if is_last else None, {})
        if is_last:
            del self.held[request_id]

    def give_up(self, request_id: str) -> None:
        del self.held[request_id]
        self._send(request_id, [], FinishReason.ERROR, {"error": "it was given up"})

    def die(self) -> None:
        if not self.resources.engine_dead:
            self.resources.engine_dead = True
            self.outputs.put_nowait(VllmEngineDeadError())

    def _send(self, request_id: str, tokens: list[int], reason: FinishReason | None, ours: dict[str, Any]) -> None:
        output = EngineCoreOutput(request_id, tokens, finish_reason=reason, kv_transfer_params={KEY: ours})
        self.outputs.put_nowait(EngineCoreOutputs(outputs=[output]))


class Client(async_llm.AsyncLLM):
    """With a tokenizer, and without anything to shut down."""

    engine_core: Any

    def __del__(self) -> None:
        """What it consists of is shared."""


@cache
def _client(max_model_len: int) -> Client:
    with tempfile.TemporaryDirectory() as folder:
        model = make_tiny_llama(
            Path(folder) / "model", hidden_size=64, num_layers=1, num_heads=2, max_model_len=max_model_len
        )
        args = EngineArgs(model=str(model), max_model_len=max_model_len, enforce_eager=True, dtype="float32")
        config = args.create_engine_config()
        with mock.patch.object(EngineCoreClient, "make_async_mp_client", return_value=None):
            return Client(config, Executor.get_class(config), log_stats=False, log_requests=False)


def make_client(core: Any, max_model_len: int = MAX_MODEL_LEN) -> Client:
    """vLLM's client of this engine. The first takes a few seconds."""
    client = copy.copy(_client(max_model_len))
    client.engine_core = core
    client.output_processor = OutputProcessor(client.tokenizer, log_stats=False)
    client.output_handler = None
    return client


async def settle() -> None:
    """Let everything run that can run."""
    for _ in range(40):
        await asyncio.sleep(0)


def cancelled_at(cuts: Iterable[int], coroutine: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
    """A task that is cancelled when it waits for the so-manyth times, from 1."""
    return asyncio.ensure_future(_Counted(coroutine, frozenset(cuts)).wait())


@dataclass
class _Counted:
    coroutine: Coroutine[Any, Any, Any]
    cuts: frozenset[int]

    async def wait(self) -> Any:
        return await self

    def __await__(self) -> Generator[Any, Any, Any]:
        error: BaseException | None = None
        for number in count(1):
            try:
                waited_for = self.coroutine.send(None) if error is None else self.coroutine.throw(error)
            except StopIteration as stop:
                return stop.value
            error = None
            if number in self.cuts:
                task = asyncio.current_task()
                assert task
                task.cancel()  # delivered where the task is about to wait
            try:
                yield waited_for
            except BaseException as thrown:  # goes where it was meant to
                error = thrown
