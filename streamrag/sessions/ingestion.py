"""Taking data in: chunks go from the buffer into the window, and the window's prompt is kept computed."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from streamrag.core import Backend, Chunk, Prefilled, Prompt, SamplingParams, common_prefix_len
from streamrag.errors import BackendError, PipelineClosedError, StreamRagError
from streamrag.query.retrieval import closing
from streamrag.sessions.log import SessionLog
from streamrag.sessions.prompts import SessionPrompts
from streamrag.sessions.window import Buffer, Numbered, Piece, Window
from streamrag.support.tasks import Broadcast, cancel_regardless, end_or_leave, wait_regardless

MAX_BATCH = 256
"""Chunks that go into the prompt at once; those that come while they are computed make the next batch."""

RETRY_S = 1.0
"""Seconds until the next attempt, after the engine gave the stream up. Answers are exact meanwhile, and slower."""

SETTLE_S = 2.0
SETTLE_TOKEN_S = 0.002
"""Seconds to wait for word that a prompt is prefilled, in all and for each new token: a question that is asked before
pays for all that is missing. An engine that is short of memory gives no word."""

CLOSED = "the session has been closed"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Data that questions are asked about."""

    version: int
    """Number of chunks that had been appended, and system texts frozen."""
    token_ids: tuple[int, ...]
    """Head and data."""
    prompts: SessionPrompts
    """The prompts that the head is of."""


class IdleStream:
    """A partial prompt that stays open in the engine so that its KV cache is shared. For one caller at a time.

    The first `advance` opens it.
    """

    def __init__(self, backend: Backend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._token_ids: tuple[int, ...] = ()
        self._has_prompt = asyncio.Event()
        self._num_prefilled = 0
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def advance(self, token_ids: tuple[int, ...]) -> None:
        """Change the prompt, and return when its KV is computed, or when that takes too long.

        :raises BackendError: the engine gave it up; make another one.
        """
        num_new = len(token_ids) - common_prefix_len(self._token_ids, token_ids)
        self._token_ids = token_ids
        self._num_prefilled = 0
        self._has_prompt.set()
        if self._task is None:
            self._task = asyncio.create_task(self._hold(), name="streamrag session's stream")
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
                aclosing(self._prompts()) as prompts,
                closing(self._backend.generate(prompts, SamplingParams(max_tokens=1))) as events,
            ):
                async for event in events:
                    if isinstance(event, Prefilled):
                        self._num_prefilled = event.num_tokens
                        self._has_news.set()
        finally:
            self._has_news.set()

    async def _prompts(self) -> AsyncGenerator[Prompt, None]:
        before: tuple[int, ...] = ()
        while True:
            await self._has_prompt.wait()
            self._has_prompt.clear()
            newest = self._token_ids  # an engine that is slow to ask misses the prompts between
            num_shared = common_prefix_len(before, newest)
            yield Prompt(newest, num_shared, is_complete=False, source_name=self._name, request_class="stream")
            before = newest


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
        """The data that questions are asked about."""
        self.num_failures = 0
        self._backend = backend
        self._name = name
        self._buffer = buffer
        self._prompts = prompts
        self._next_prompts: tuple[int, SessionPrompts] = 0, prompts
        """The prompts from this version on."""
        self._log = log
        self._has_data = asyncio.Event()
        self._news = Broadcast()
        """Woken by each version, and by the end."""
        self._task: asyncio.Task[None] | None = None
        self._streams: list[IdleStream] = []
        """The newest last; those before it are about to be closed."""

    def resume(self, pieces: Sequence[Piece]) -> None:
        """Have these in the window, as the newest that were appended. Before `start`."""
        self._take_in(pieces)
        self.ready = self._snapshot(self._buffer.num_appended)

    def start(self, on_version: Callable[[], None], on_end: Callable[[], None], batch_interval_s: float) -> None:
        """Start the task, which calls `on_version` for each version, and at the end; then `on_end`."""
        self._task = asyncio.create_task(self._run(on_version, batch_interval_s), name=f"streamrag {self._name}")
        for call in (on_version, on_end, self._news.wake):
            self._task.add_done_callback(lambda _, call=call: call())  # type: ignore[misc]

    def append(self, chunk: Chunk) -> int:
        """Add a chunk and return its number. Never waits."""
        self._has_data.set()
        number = self._buffer.append(chunk)
        if self._log is not None:
            self._log.append(Numbered(number, chunk))
        return number

    def freeze(self, prompts: SessionPrompts, system: str) -> int:
        """Have the head of another system text, from the version on that is returned. Never waits."""
        number = self._buffer.skip_number()
        self._next_prompts = number, prompts
        self._has_data.set()
        if self._log is not None:
            self._log.freeze(number, system)
        return number

    def check(self) -> None:
        """Check that data are taken in.

        :raises PipelineClosedError: it was stopped.
        :raises BackendError: it has failed.
        """
        if self._task is not None and self._task.done():
            if self._task.cancelled():
                raise PipelineClosedError(CLOSED)
            error = self._task.exception()
            raise BackendError(f"the session has failed: {error!r:.300}") from error

    async def at_least(self, version: int) -> Snapshot:
        """Return the data of this version or a newer one, once they are computed.

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
                is_computed = await self._compute(snapshot, has_slid)
                self.ready = snapshot
                on_version()
                self._news.wake()
                await self._close_streams(num_kept=int(is_computed))
                if not is_computed:
                    await asyncio.sleep(RETRY_S)
                if is_computed or self._has_data.is_set():
                    await self._has_data.wait()
                    await asyncio.sleep(max(next_s - asyncio.get_running_loop().time(), 0.0))
                    next_s = asyncio.get_running_loop().time() + batch_interval_s
                    snapshot, has_slid = await self._next()
        finally:
            await self._close_streams()

    async def _compute(self, snapshot: Snapshot, has_slid: bool) -> bool:
        """Return whether the engine has computed the data.

        Data that have slid get a stream of their own. The one before stays until they are computed, because questions
        are answered from it.
        """
        if has_slid or not self._streams:
            self._streams.append(IdleStream(self._backend, self._name))
        try:
            await self._streams[-1].advance(snapshot.token_ids)
        except BackendError:
            self.num_failures += 1
            return False
        return True

    async def _close_streams(self, *, num_kept: int = 0) -> None:
        """Close all but the newest `num_kept`."""
        num_gone = len(self._streams) - num_kept
        gone, self._streams = self._streams[:num_gone], self._streams[num_gone:]
        await wait_regardless([asyncio.create_task(each.aclose(), name="streamrag stream ends") for each in gone])

    async def _next(self) -> tuple[Snapshot, bool]:
        """Return the data with the next batch, and whether what stands before that batch has changed.

        It changes when the oldest data go, and with another head, whose version takes all data with it that came
        before.
        """
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

    def _take_in(self, pieces: Sequence[Piece]) -> bool:
        """Return whether the oldest data had to go."""
        has_slid = self.window.add(pieces)
        if self._log is not None:
            for piece in pieces:
                if not piece.token_ids:
                    self._log.forget(piece.number)
            if self.window.oldest is not None:
                self._log.slide(self.window.oldest, self.window.num_slid)
        return has_slid
