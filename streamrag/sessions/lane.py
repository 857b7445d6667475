"""One idle stream into the engine: a prompt that is never completed, so that its KV is there for others."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

from streamrag.core import Backend, Prefilled, Prompt, SamplingParams, common_prefix_len
from streamrag.errors import BackendError
from streamrag.retrieving import closing
from streamrag.support.tasks import end_or_leave

SETTLE_S = 2.0
SETTLE_TOKEN_S = 0.002
"""Seconds to wait for word that a prompt is prefilled, and for each token that is new to it: whoever asks before pays
for all that is missing. An engine that is short of memory gives no word."""


class Lane:
    """Opened by the first `advance`, closed by `aclose`. One caller at a time."""

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._token_ids: tuple[int, ...] = ()
        self._has_prompt = asyncio.Event()
        self._num_prefilled = 0
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def advance(self, token_ids: tuple[int, ...]) -> None:
        """Let the prompt be this one, and return when its KV is computed, or when that takes too long.

        :raises BackendError: the engine gave it up; make another lane.
        """
        num_new = len(token_ids) - common_prefix_len(self._token_ids, token_ids)
        self._token_ids = token_ids
        self._num_prefilled = 0
        self._has_prompt.set()
        if self._task is None:
            self._task = asyncio.create_task(self._hold(), name="streamrag session's lane")
        try:
            async with asyncio.timeout(SETTLE_S + SETTLE_TOKEN_S * num_new):
                while self._num_prefilled < len(token_ids) - 1:  # an engine leaves the last token to the answer
                    if self._task.done():
                        raise BackendError("the engine ended a stream that was not complete")
                    self._has_news.clear()
                    await self._has_news.wait()
        except TimeoutError:
            return

    async def aclose(self) -> None:
        """Free what it holds in the engine."""
        if self._task is not None:
            await end_or_leave(self._task, f"the stream of {self._name}, which was stopped,")

    async def _hold(self) -> None:
        try:
            async with (
                aclosing(self._pushed()) as prompts,
                closing(self._backend.generate(prompts, SamplingParams(max_tokens=1))) as events,
            ):
                async for event in events:
                    if isinstance(event, Prefilled):
                        self._num_prefilled = event.num_tokens
                        self._has_news.set()
        finally:
            self._has_news.set()

    async def _pushed(self) -> AsyncGenerator[Prompt, None]:
        given: tuple[int, ...] = ()
        while True:
            await self._has_prompt.wait()
            self._has_prompt.clear()
            before, given = given, self._token_ids  # the newest: an engine that is slow to ask misses those between
            num_shared = common_prefix_len(before, given)
            yield Prompt(given, num_shared, is_complete=False, source_name=self._name, request_class="stream")
