"""The loop of vLLM's engine process as a task in virtual time.

    inputs ─▶ inbox ─taken in between steps─▶ SimulatedEngine ─▶ deliver(output)

As in the real engine, input that arrives during a step is processed when the step has ended. Without work, or without
work that is possible before the next input, the loop sleeps.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from vllm.sampling_params import SamplingParams
from vllm.v1.engine import EngineCoreOutput

from streamrag.backends.simulated.engine import SimulatedEngine
from streamrag.backends.vllm.chunk_wire import PromptMessage
from streamrag.errors import ConfigurationError

MOST_EMPTY_TURNS = 8  # turns without computation and output after which only new input can change anything


class Input(NamedTuple):
    """A plain request, a chunk of a stream of ours, or a chunk or the end of one of vLLM's sessions."""

    request_id: str
    token_ids: Sequence[int]
    params: SamplingParams
    sent_s: float
    chunk: PromptMessage | None = None
    is_session: bool = False
    """Whether it is a chunk of one of vLLM's sessions. Any other input ends the session of its id."""


class Abort(NamedTuple):
    request_id: str
    sent_s: float


def check_virtual() -> None:
    """Check that the running event loop's time is virtual.

    :raises ConfigurationError: it is not.
    """
    if not getattr(asyncio.get_running_loop(), "is_virtual", False):
        raise ConfigurationError(
            "a simulated engine runs in virtual time only: start it with run_virtual of "
            "streamrag.backends.simulated.virtual_time"
        )


class EngineLoop:
    """Drives the engine and passes input to it, `delivery_s` after the input was sent."""

    def __init__(
        self,
        engine: SimulatedEngine,
        *,
        delivery_s: float,
        took_in: Callable[[Input | Abort], None],
        deliver: Callable[[EngineCoreOutput], None],
    ) -> None:
        self._engine = engine
        self._delivery_s = delivery_s
        self._took_in = took_in
        self._deliver = deliver
        self._inbox: deque[Input | Abort] = deque()
        self._has_input = asyncio.Event()
        self._sessions: set[str] = set()
        self._num_empty_turns = 0
        self._last_end_s = 0.0

    def send(self, message: Input | Abort) -> None:
        self._inbox.append(message)
        self._has_input.set()

    async def run(self) -> None:
        """Run the engine until cancelled."""
        while True:
            await self._turn()

    async def _turn(self) -> None:
        """Take in input, wait for the end of the oldest step and deliver its outputs. Without a step, or after
        `MOST_EMPTY_TURNS` that changed nothing, wait for input."""
        engine = self._engine
        engine.now_s = asyncio.get_running_loop().time()
        self._take_in()
        end_s = engine.launch() if self._num_empty_turns <= MOST_EMPTY_TURNS else None
        if end_s is None:
            await self._wait_for_input()
            return
        if end_s > engine.now_s:
            await asyncio.sleep(end_s - engine.now_s)
        outputs = engine.collect()
        self._num_empty_turns = 0 if outputs or end_s > self._last_end_s else self._num_empty_turns + 1
        self._last_end_s = end_s
        for output in outputs:
            self._deliver(output)

    async def _wait_for_input(self) -> None:
        """Wait until the oldest message in the inbox is due, or until one is sent if there is none."""
        if self._inbox:
            ready_s = self._inbox[0].sent_s + self._delivery_s
            await asyncio.sleep(max(ready_s - asyncio.get_running_loop().time(), 0))
        else:
            self._has_input.clear()
            await self._has_input.wait()

    def _take_in(self) -> None:
        """Pass all messages that are due to the engine and to `took_in`."""
        engine, inbox = self._engine, self._inbox
        while inbox and inbox[0].sent_s + self._delivery_s <= engine.now_s:
            message = inbox.popleft()
            self._num_empty_turns = 0
            if isinstance(message, Abort):
                self._sessions.discard(message.request_id)
                engine.abort(message.request_id)
                self._took_in(message)
            else:
                self._add(message)

    def _add(self, message: Input) -> None:
        """Pass an input to the engine, and to `took_in` unless it ends a session; ignore the end of an ended one."""
        request_id = message.request_id
        is_end = not message.is_session and request_id in self._sessions
        if message.is_session:
            self._sessions.add(request_id)
        elif is_end:
            self._sessions.discard(request_id)
            if request_id not in self._engine.scheduler.requests:
                return  # it has ended already
        self._engine.add(
            request_id,
            message.token_ids,
            message.params,
            message.chunk,
            is_session=message.is_session,
            arrival_s=message.sent_s,
        )
        if not is_end:
            self._took_in(message)
