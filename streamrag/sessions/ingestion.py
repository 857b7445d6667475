"""Taking data in: what was appended goes into the window, and the window's prompt is kept computed."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

from streamrag.core import Backend, Chunk
from streamrag.errors import BackendError, PipelineClosedError, PromptTooLongError
from streamrag.sessions.buffer import Buffer
from streamrag.sessions.lane import Lane
from streamrag.sessions.prompts import SessionPrompts
from streamrag.sessions.window import Window
from streamrag.tasks import cancel_regardless
from streamrag.tokenizing import in_thread

MAX_BATCH = 256
"""Chunks that go into the prompt at once; what comes while they are computed makes the next batch."""

RETRY_S = 1.0
"""After the engine gave the session's stream up. Answers are exact meanwhile, and slower."""

CLOSED = "the session has been closed"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Data that questions are asked about."""

    version: int
    """How many chunks had been appended."""
    token_ids: tuple[int, ...]
    """Head and data."""


class Ingestion:
    """Moves data from a buffer through a window into the engine, one batch at a time, in a task of its own."""

    def __init__(self, backend: Backend, name: str, buffer: Buffer, window: Window, prompts: SessionPrompts) -> None:
        self.window = window
        self.ready = Snapshot(0, prompts.head)
        """What questions are asked about."""
        self.num_failures = 0
        self._backend = backend
        self._name = name
        self._buffer = buffer
        self._prompts = prompts
        self._has_data = asyncio.Event()
        self._has_news = asyncio.Event()
        """Set, and replaced by another, with each version and at the end."""
        self._task: asyncio.Task[None] | None = None
        self._lane: Lane | None = None

    def start(self, on_version: Callable[[], None]) -> None:
        """Begin. `on_version` is called whenever another version stands."""
        self._task = asyncio.create_task(self._run(on_version), name=f"streamrag {self._name}")
        self._task.add_done_callback(lambda _: self._wake())

    def append(self, chunk: Chunk) -> int:
        """Its number; never waits."""
        self._has_data.set()
        return self._buffer.append(chunk)

    def check(self) -> None:
        """Raises what ended it, if it has ended."""
        if self._task is not None and self._task.done():
            if self._task.cancelled():
                raise PipelineClosedError(CLOSED)
            self._task.result()

    async def at_least(self, version: int) -> Snapshot:
        """The data of this version or a newer one, once that stands.

        :raises PipelineClosedError: the session was closed.
        """
        while self.ready.version < version:
            self.check()
            await self._has_news.wait()
        return self.ready

    async def aclose(self) -> None:
        """Stop, and free what the engine holds."""
        if self._task is not None:
            await cancel_regardless([self._task])

    def _wake(self) -> None:
        self._has_news.set()
        self._has_news = asyncio.Event()

    async def _run(self, on_version: Callable[[], None]) -> None:
        try:
            snapshot, has_slid = self.ready, False
            while True:
                try:
                    await (self._slide(snapshot) if has_slid else self._advance(snapshot))
                except (BackendError, PromptTooLongError):
                    self.num_failures += 1
                    if self._lane is not None:
                        failed, self._lane = self._lane, None
                        await failed.aclose()
                    await asyncio.sleep(RETRY_S)
                self.ready = snapshot
                on_version()
                self._wake()
                await self._has_data.wait()
                snapshot, has_slid = await self._next()
        finally:
            if self._lane is not None:
                await self._lane.aclose()

    async def _next(self) -> tuple[Snapshot, bool]:
        """The data with the next batch, and whether the oldest had to go for it."""
        batch = self._buffer.take(MAX_BATCH)
        if not len(self._buffer):
            self._has_data.clear()
        pieces = await in_thread(self._backend.model.tokenizer, partial(self._prompts.pieces, batch))
        has_slid = self.window.add(pieces)
        return Snapshot(batch[-1].number, self._prompts.head + self.window.token_ids), has_slid

    async def _advance(self, snapshot: Snapshot) -> None:
        self._lane = self._lane or Lane(self._backend, self._name)
        await self._lane.advance(snapshot.token_ids)

    async def _slide(self, snapshot: Snapshot) -> None:
        """A lane for data that has slid. The one before stays until it stands: questions are answered from it."""
        async with AsyncExitStack() as undo:
            new = Lane(self._backend, self._name)
            undo.push_async_callback(new.aclose)
            await new.advance(snapshot.token_ids)
            undo.pop_all()
        before, self._lane = self._lane, new
        if before is not None:
            await before.aclose()
