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
    rank: int
    num_to_prefill: int = 0
    num_to_generate: int = 0
    is_complete: bool = False
    newest_s: float = 0.0
    """When the newest prompt came."""
    progress: asyncio.Queue[int] = field(default_factory=asyncio.Queue)
    """One item for each finished prefill or generated token."""

    @property
    def place(self) -> tuple[int, bool, float]:
        """Place among the prefills; the smallest is served first."""
        seconds = self.num_to_prefill * TOKEN_S if self.is_complete else 0.0
        return self.rank, not self.is_complete, seconds + AGEING * self.newest_s


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
        request: _Request | None = None
        try:
            async for prompt in prompts:
                if request is None:
                    request = _Request(RANKS[prompt.request_class])
                    self._requests.append(request)
                request.num_to_prefill = len(prompt.token_ids) - prompt.num_shared
                request.is_complete = prompt.is_complete
                request.newest_s = asyncio.get_running_loop().time()
                self._has_work.set()
                await request.progress.get()
                yield Prefilled(len(prompt.token_ids))
            assert request is not None
            request.num_to_generate = params.max_tokens
            self._has_work.set()
            for number in range(params.max_tokens):
                await request.progress.get()
                yield AnswerChunk("a", (97,), "length" if number + 1 == params.max_tokens else None)
        finally:
            if request is not None:
                self._requests.remove(request)

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
                request.num_to_generate -= 1
                request.progress.put_nowait(1)
            for request, num_tokens in prefills:
                request.num_to_prefill = max(request.num_to_prefill - num_tokens, 0)
                if num_tokens and not request.num_to_prefill:
                    request.progress.put_nowait(1)
