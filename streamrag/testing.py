"""Test doubles that are exact, instant and able to fail on purpose, and small models for the real engine.

    source = ScriptedSource([Append(Chunk("Paris is in France.", "geo.md"))])
    backend = ScriptedBackend(answer="In France.")
    async with Pipeline(source, backend) as pipeline:
        print("".join([chunk.text async for chunk in pipeline.stream("Where is Paris?")]))
    assert backend.prompts[-1][-1].is_complete  # all prompts of all queries are recorded

`make_tiny_llama` writes a Llama with random weights for `VllmBackend`; its answers are noise. `make_demo_model` writes
a small model that answers in English, from two installed packages.
"""

from collections.abc import AsyncIterator, Callable, Iterable
from itertools import product
from typing import TYPE_CHECKING, TypeAlias

import anyio
import anyio.lowlevel

from streamrag.backends.tokenizer import CodePointTokenizer
from streamrag.core import (
    AnswerChunk,
    BackendEvent,
    ModelInfo,
    Prefilled,
    Progress,
    Prompt,
    SamplingParams,
    SourceEvent,
)
from streamrag.core.lifecycle import started_once
from streamrag.support.lazy_imports import attributes

if TYPE_CHECKING:
    from streamrag.demo.smollm2 import make_demo_model as make_demo_model
    from streamrag.demo.tiny_llama import make_tiny_llama as make_tiny_llama
else:
    __getattr__ = attributes(
        __name__,
        {"make_demo_model": "streamrag.demo.smollm2", "make_tiny_llama": "streamrag.demo.tiny_llama"},
    )

__all__ = [
    "CodePointTokenizer",
    "ScriptedBackend",
    "ScriptedSource",
    "Step",
    "make_demo_model",
    "make_tiny_llama",
]

Step: TypeAlias = SourceEvent | float | BaseException | anyio.Event
"""An event to yield, seconds to sleep, an error to raise, or an `anyio.Event` to wait for."""


class ScriptedSource:
    """A source that records the queries and plays the same steps for each.

    `num_streams` and `is_started` show whether anything is left running.

    steps: the steps, or a function that returns those for a query.
    """

    def __init__(self, steps: Iterable[Step] | Callable[[str], Iterable[Step]]) -> None:
        fixed = () if callable(steps) else tuple(steps)
        self._make_steps = steps if callable(steps) else lambda query: fixed
        self.queries: list[str] = []
        self.num_streams = 0
        self.is_started = False

    @started_once
    async def start(self, progress: Progress) -> None:
        progress("scripted source is ready")

    async def aclose(self) -> None:
        self.is_started = False

    async def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Record the query, then take each step: yield an event, sleep, wait for an `anyio.Event`, or raise."""
        self.queries.append(query)
        self.num_streams += 1
        try:
            for step in self._make_steps(query):
                match step:
                    case BaseException():
                        raise step
                    case anyio.Event():
                        await step.wait()
                    case float() | int():
                        await anyio.sleep(step)
                    case _:
                        yield step
        finally:
            self.num_streams -= 1


class ScriptedBackend:
    """A backend that answers every prompt with the same text, one character per token, and records all prompts.

    answer: the text, of which a query gets at most `max_tokens` characters.
    max_model_len: most tokens of prompt and answer together, for the pipeline.
    hold: prefilling waits for this event.
    error: raised in place of the answer's second token.
    is_endless: whether the answer never finishes.
    """

    def __init__(
        self,
        answer: str = "An answer.",
        *,
        max_model_len: int = 100_000,
        hold: anyio.Event | None = None,
        error: Exception | None = None,
        is_endless: bool = False,
    ) -> None:
        self.model = ModelInfo("scripted", CodePointTokenizer(), max_model_len)
        self.prompts: list[list[Prompt]] = []
        """The prompts of each query, in order."""
        self.num_requests = 0
        self.is_started = False
        self._answer = answer
        self._hold = hold
        self._error = error
        self._is_endless = is_endless

    @started_once
    async def start(self, progress: Progress) -> None:
        progress("scripted backend is ready")

    async def aclose(self) -> None:
        self.is_started = False

    async def generate(self, prompts: AsyncIterator[Prompt], params: SamplingParams) -> AsyncIterator[BackendEvent]:
        """Record each prompt, wait for the event `hold` if there is one, and yield Prefilled; after the last prompt,
        yield `n` answers one after the other, in chunks of one character."""
        received: list[Prompt] = []
        self.prompts.append(received)
        self.num_requests += 1
        try:
            async for prompt in prompts:
                received.append(prompt)
                if self._hold is not None:
                    await self._hold.wait()
                yield Prefilled(len(prompt.token_ids))
            answer = self._answer[: params.max_tokens]
            for index, (i, character) in product(range(params.n), enumerate(answer)):
                if self._error is not None and i == 1:
                    raise self._error
                is_last = i + 1 == len(answer) and not self._is_endless
                reason = "length" if len(answer) < len(self._answer) else "stop"
                yield AnswerChunk(character, (ord(character),), reason if is_last else None, index=index)
                await anyio.lowlevel.checkpoint()
            if self._is_endless:
                await anyio.sleep_forever()
        finally:
            self.num_requests -= 1
