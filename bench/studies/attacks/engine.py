"""A backend that behaves like an engine of its own process: continuous batching with a fixed cost per token."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass, field

from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.core import AnswerChunk, BackendEvent, ModelInfo, Prefilled, Progress, Prompt, SamplingParams
from streamrag.engine.urgency_classes import RANKS

STEP_S = 0.010
TOKEN_S = 0.000_010
MAX_STEP_TOKENS = 2048
MAX_SEQUENCES = 32
AGEING = 0.1  # that of the policy srpf


@dataclass(eq=False)
class _Request:
    max_tokens: int
    rank: int = 0
    num_tokens: int = 0
    num_computed: int = 0
    num_to_generate: int = 0
    is_complete: bool = False
    newest_s: float = 0.0
    """When the newest prompt came."""
    events: asyncio.Queue[BackendEvent | None] = field(default_factory=asyncio.Queue)
    """What happened; None if there are no more prompts, and none was complete."""

    @property
    def num_to_prefill(self) -> int:
        return self.num_tokens - self.num_computed

    @property
    def place(self) -> tuple[int, bool, float]:
        """Place among the prefills; the smallest is served first."""
        seconds = self.num_to_prefill * TOKEN_S if self.is_complete else 0.0
        return self.rank, not self.is_complete, seconds + AGEING * self.newest_s

    def update(self, prompt: Prompt, now_s: float) -> None:
        """Take the next prompt in place of the one before; what both share stays computed, but the last token."""
        self.rank, self.newest_s, self.is_complete = RANKS[prompt.request_class], now_s, prompt.is_complete
        self.num_tokens = len(prompt.token_ids)
        self.num_computed = max(min(self.num_computed, prompt.num_shared, self.num_tokens - 1), 0)

    def prefill(self, num_tokens: int) -> None:
        """Compute tokens of the prompt."""
        self.num_computed += num_tokens
        if num_tokens and not self.num_to_prefill:
            self.events.put_nowait(Prefilled(self.num_tokens))
            self.num_to_generate = self.max_tokens if self.is_complete else 0

    def decode(self) -> None:
        """Generate a token."""
        self.num_to_generate -= 1
        self.events.put_nowait(AnswerChunk("a", (97,), None if self.num_to_generate else "length"))


class SteppedBackend:
    """Answer each prompt with `max_tokens` letters, in steps that all requests share.

    A step lasts 10 ms, and 10 us more for each token that it computes. Decodes come first, then prefills by request
    class, and within a class the shortest first, as in the service's default policy. If the event loop was late, the
    next steps follow at once: a real engine does not wait for the process of the service.
    """

    def __init__(self) -> None:
        self.model = ModelInfo("stepped", CodePointTokenizer(), 100_000)
        self._requests: list[_Request] = []
        self._has_work = asyncio.Event()
        self._stepping: asyncio.Task[None] | None = None

    @property
    def num_requests(self) -> int:
        """Number of open requests."""
        return len(self._requests)

    async def start(self, progress: Progress) -> None:
        self._stepping = asyncio.create_task(self._run(), name="stepped engine")

    async def aclose(self) -> None:
        if self._stepping is not None:
            self._stepping.cancel()
            with suppress(asyncio.CancelledError):
                await self._stepping
            self._stepping = None

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        request = _Request(params.max_tokens)

        async def read() -> None:
            try:
                async for prompt in prompts:
                    request.update(prompt, asyncio.get_running_loop().time())
                    self._has_work.set()
            finally:
                if not request.is_complete:
                    request.events.put_nowait(None)

        reading = asyncio.create_task(read(), name="prompts of a stepped engine")
        self._requests.append(request)
        try:
            while (event := await request.events.get()) is not None:
                yield event
                if isinstance(event, AnswerChunk) and event.finish_reason:
                    break
            if reading.done():
                reading.result()  # raises what the prompts raised
        finally:
            self._requests.remove(request)
            reading.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await reading

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        due_s = loop.time()
        while True:
            decoding = [each for each in self._requests if each.num_to_generate][:MAX_SEQUENCES]
            prefilling = sorted((each for each in self._requests if each.num_to_prefill), key=lambda each: each.place)
            if not decoding and not prefilling:
                self._has_work.clear()
                await self._has_work.wait()
                due_s = loop.time()
                continue
            num_left = MAX_STEP_TOKENS - len(decoding)
            prefills: list[tuple[_Request, int]] = []
            for request in prefilling[: MAX_SEQUENCES - len(decoding)]:
                num_tokens = min(request.num_to_prefill, num_left)
                num_left -= num_tokens
                prefills.append((request, num_tokens))
            due_s += STEP_S + (MAX_STEP_TOKENS - num_left) * TOKEN_S
            await asyncio.sleep(max(due_s - loop.time(), 0))
            for request in decoding:
                request.decode()
            for request, num_tokens in prefills:
                request.prefill(min(num_tokens, request.num_to_prefill))
