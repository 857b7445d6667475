"""Taking data in: what was appended goes into the window, and the window's prompt is kept computed."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from streamrag.core import Backend, Chunk
from streamrag.errors import BackendError, PipelineClosedError, StreamRagError
from streamrag.sessions.buffer import Buffer, Numbered
from streamrag.sessions.lane import Lane
from streamrag.sessions.log import SessionLog
from streamrag.sessions.prompts import SessionPrompts
from streamrag.sessions.window import Piece, Window
from streamrag.support.tasks import Broadcast, cancel_regardless, wait_regardless

MAX_BATCH = 256
"""Chunks that go into the prompt at once; what comes while they are computed makes the next batch."""

RETRY_S = 1.0
"""After the engine gave the session's stream up. Answers are exact meanwhile, and slower."""

CLOSED = "the session has been closed"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Data that questions are asked about."""

    version: int
    """How many chunks had been appended, and system texts frozen."""
    token_ids: tuple[int, ...]
    """Head and data."""
    prompts: SessionPrompts
    """That the head is of."""


class Ingestion:
    """Moves data from a buffer through a window into the engine, one batch at a time, in a task of its own."""

    def __init__(
        self,
        backend: Backend,
        name: str,
        buffer: Buffer,
        window: Window,
        prompts: SessionPrompts,
        log: SessionLog | None = None,
    ) -> None:
        self.window = window
        self.ready = Snapshot(0, prompts.head, prompts)
        """What questions are asked about."""
        self.num_failures = 0
        self._backend = backend
        self._name = name
        self._buffer = buffer
        self._prompts = prompts
        self._next_prompts: tuple[int, SessionPrompts] = 0, prompts
        """From this version on."""
        self._log = log
        self._has_data = asyncio.Event()
        self._news = Broadcast()
        """Of each version, and of the end."""
        self._task: asyncio.Task[None] | None = None
        self._lanes: list[Lane] = []
        """The newest last; those before it are on their way out."""

    def resume(self, pieces: list[Piece]) -> None:
        """Have these in the window, as the newest that were appended. Before `start`."""
        self._take_in(pieces)
        self.ready = self._snapshot(self._buffer.num_appended)

    def start(self, on_version: Callable[[], None], on_end: Callable[[], None], batch_interval_s: float) -> None:
        """Begin. `on_version` is called whenever another version stands, and at the end; then `on_end`."""
        self._task = asyncio.create_task(self._run(on_version, batch_interval_s), name=f"streamrag {self._name}")
        self._task.add_done_callback(lambda _: on_version())
        self._task.add_done_callback(lambda _: on_end())
        self._task.add_done_callback(lambda _: self._news.wake())

    def append(self, chunk: Chunk) -> int:
        """Its number; never waits."""
        self._has_data.set()
        number = self._buffer.append(chunk)
        if self._log is not None:
            self._log.append(Numbered(number, chunk))
        return number

    def freeze(self, prompts: SessionPrompts, system: str) -> int:
        """Have another head, of this system text, from the version on that is returned; never waits."""
        number = self._buffer.skip()
        self._next_prompts = number, prompts
        self._has_data.set()
        if self._log is not None:
            self._log.frozen(number, system)
        return number

    def check(self) -> None:
        """
        :raises PipelineClosedError: it was stopped.
        :raises BackendError: it has failed.
        """
        if self._task is not None and self._task.done():
            if self._task.cancelled():
                raise PipelineClosedError(CLOSED)
            error = self._task.exception()
            raise BackendError(f"the session has failed: {error!r:.300}") from error

    async def at_least(self, version: int) -> Snapshot:
        """The data of this version or a newer one, once that stands.

        :raises PipelineClosedError: the session was closed.
        """
        while self.ready.version < version:
            self.check()
            await self._news.wait()
        return self.ready

    async def aclose(self) -> None:
        """Stop, and free what the engine holds."""
        if self._task is not None:
            await cancel_regardless([self._task])

    async def _run(self, on_version: Callable[[], None], batch_interval_s: float) -> None:
        snapshot, has_slid = self.ready, False
        next_s = 0.0
        try:
            while True:
                stands = await self._computed(snapshot, has_slid)
                self.ready = snapshot
                on_version()
                self._news.wake()
                await self._close_lanes(num_kept=int(stands))
                if not stands:
                    await asyncio.sleep(RETRY_S)
                if stands or self._has_data.is_set():
                    await self._has_data.wait()
                    await asyncio.sleep(max(next_s - asyncio.get_running_loop().time(), 0.0))
                    next_s = asyncio.get_running_loop().time() + batch_interval_s
                    snapshot, has_slid = await self._next()
        finally:
            await self._close_lanes()

    async def _computed(self, snapshot: Snapshot, has_slid: bool) -> bool:
        """Whether the engine has it. Data that have slid get a lane of their own: the one before stays until they
        stand, because questions are answered from it."""
        if has_slid or not self._lanes:
            self._lanes.append(Lane(self._backend, self._name))
        try:
            await self._lanes[-1].advance(snapshot.token_ids)
        except BackendError:
            self.num_failures += 1
            return False
        return True

    async def _close_lanes(self, *, num_kept: int = 0) -> None:
        """All but the newest."""
        gone, self._lanes = self._lanes[: len(self._lanes) - num_kept], self._lanes[len(self._lanes) - num_kept :]
        await wait_regardless([asyncio.create_task(lane.aclose(), name="streamrag lane ends") for lane in gone])

    async def _next(self) -> tuple[Snapshot, bool]:
        """The data with the next batch, and whether what stands before them has changed: the oldest had to go, or the
        head is another. That takes all data with it that came before."""
        number, prompts = self._next_prompts
        batch = self._buffer.take(MAX_BATCH, number)
        if not len(self._buffer):
            self._has_data.clear()
        while True:
            try:
                pieces = await self._prompts.pieces_in_background(batch)
            except StreamRagError:  # as a server's tokenizer raises while the server is away
                self.num_failures += 1
                await asyncio.sleep(RETRY_S)
            else:
                break
        has_changed = self._take_in(pieces) or prompts is not self._prompts
        self._prompts = prompts
        return self._snapshot(max(batch[-1].number if batch else 0, number, self.ready.version)), has_changed

    def _snapshot(self, version: int) -> Snapshot:
        return Snapshot(version, self._prompts.head + self.window.token_ids, self._prompts)

    def _take_in(self, pieces: list[Piece]) -> bool:
        """Whether the oldest had to go."""
        has_slid = self.window.add(pieces)
        if self._log is not None:
            for piece in pieces:
                if not piece.token_ids:
                    self._log.forget(piece.number)
            if self.window.oldest is not None:
                self._log.slid(self.window.oldest, self.window.num_slid)
        return has_slid
