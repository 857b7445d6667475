"""Move chunks from the buffer into the window, and keep the window's prompt computed in the engine."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass

from streamrag.core import Backend, Chunk, Prefilled, Prompt, SamplingParams, common_prefix_len
from streamrag.core.retrieval import closing
from streamrag.errors import BackendError, PipelineClosedError, StreamRagError
from streamrag.sessions.log import SessionLog
from streamrag.sessions.prompts import SessionPrompts
from streamrag.sessions.window import Buffer, Numbered, Window, WindowChunk
from streamrag.support.tasks import Broadcast, cancel_and_wait, end_or_leave, wait_shielded

MAX_BATCH = 256
"""Most chunks that are added to the prompt at once. Chunks that arrive while they are computed form the next batch."""

RETRY_S = 1.0
"""Seconds until the next attempt after the engine gave up the stream. Meanwhile answers are exact but slower."""

SETTLE_S = 2.0
SETTLE_TOKEN_S = 0.002
"""Seconds to wait until a prompt is prefilled, in total and per new token. A question that is asked earlier must
compute the missing tokens itself. An engine that is short of memory may not report the end."""

CLOSED = "the session has been closed"


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A version of a session's data."""

    version: int
    """Number of chunks appended plus system texts frozen so far."""
    token_ids: tuple[int, ...]
    """Tokens of head and data."""
    prompts: SessionPrompts
    """The prompts with this head."""


class IdleStream:
    """A partial prompt that stays open in the engine so that its KV cache is reused. One caller at a time."""

    def __init__(self, backend: Backend, name: str, conversation_id: str) -> None:
        self._backend = backend
        self._name = name
        self._conversation_id = conversation_id
        self._token_ids: tuple[int, ...] = ()
        self._has_prompt = asyncio.Event()
        self._num_prefilled = 0
        self._has_news = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    async def advance(self, token_ids: tuple[int, ...]) -> None:
        """Replace the prompt, and wait until the engine has computed all tokens but the last.

        After `SETTLE_S` plus `SETTLE_TOKEN_S` per new token, returns without an error. The first call opens the stream.

        :raises BackendError: the engine gave up the stream; make another one.
        """
        num_new = len(token_ids) - common_prefix_len(self._token_ids, token_ids)
        self._token_ids = token_ids
        self._num_prefilled = 0
        self._has_prompt.set()
        if self._task is None:
            self._task = asyncio.create_task(self._hold(), name="streamrag session's stream")
        try:
            async with asyncio.timeout(SETTLE_S + SETTLE_TOKEN_S * num_new):
                while self._num_prefilled < len(token_ids) - 1:  # the last token is computed with the answer
                    if self._task.done():
                        raise BackendError("the engine ended a stream that was not complete")
                    self._has_news.clear()
                    await self._has_news.wait()
        except TimeoutError:
            return

    async def aclose(self) -> None:
        """End the stream, and free its KV."""
        if self._task is not None:
            await end_or_leave(self._task, f"the stream of {self._name}, which was stopped,")

    async def _hold(self) -> None:
        """Run one request for all prompts; wake `advance` when it reports prefilled tokens, ends or fails."""
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
        """Yield the newest prompt, as partial, each time that `advance` set one; skip older unread ones. Never ends."""
        previous: tuple[int, ...] = ()
        while True:
            await self._has_prompt.wait()
            self._has_prompt.clear()
            newest = self._token_ids  # a slow engine misses the prompts in between
            num_shared = common_prefix_len(previous, newest)
            yield Prompt(
                newest,
                num_shared,
                source_name=self._name,
                request_class="stream",
                conversation_id=self._conversation_id,
            )
            previous = newest


class Ingestion:
    """A background task that moves data from a buffer through a window into the engine, in batches."""

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
        """The newest version that is computed, from which questions are answered."""
        self.num_failures = 0
        self._backend = backend
        self._name = name
        self._buffer = buffer
        self._prompts = prompts
        self._next_prompts: tuple[int, SessionPrompts] = 0, prompts
        """The version from which on prompts apply, and these prompts."""
        self._log = log
        self._has_data = asyncio.Event()
        self._news = Broadcast()
        """Woken by each new version, and by the end of the task."""
        self._task: asyncio.Task[None] | None = None
        self._streams: list[IdleStream] = []
        """Open streams, the newest last. Older ones are about to be closed."""

    def resume(self, pieces: Sequence[WindowChunk]) -> None:
        """Fill the window with the pieces of a log. Call it before `start`."""
        self._add_to_window(pieces)
        self.ready = self._snapshot(self._buffer.num_appended)

    def start(self, on_version: Callable[[], None], on_end: Callable[[], None], batch_interval_s: float) -> None:
        """Start the background task, which calls `on_version` for each version and at the end, and then `on_end`."""
        self._task = asyncio.create_task(self._run(on_version, batch_interval_s), name=f"streamrag {self._name}")
        for call in (on_version, on_end, self._news.wake):
            self._task.add_done_callback(lambda _, call=call: call())  # type: ignore[misc]

    def append(self, chunk: Chunk) -> int:
        """Append a chunk to the buffer and the log, if there is one, wake the task, and return the chunk's number."""
        self._has_data.set()
        number = self._buffer.append(chunk)
        if self._log is not None:
            self._log.append(Numbered(number, chunk))
        return number

    def freeze(self, prompts: SessionPrompts, system: str) -> int:
        """Return a new version without waiting, from which on the task uses `prompts`; log their `system` text."""
        number = self._buffer.skip_number()
        self._next_prompts = number, prompts
        self._has_data.set()
        if self._log is not None:
            self._log.freeze(number, system)
        return number

    def check(self) -> None:
        """Raise PipelineClosedError if the task was cancelled, BackendError if it has failed."""
        if self._task is not None and self._task.done():
            if self._task.cancelled():
                raise PipelineClosedError(CLOSED)
            error = self._task.exception()
            raise BackendError(f"the session has failed: {error!r:.300}") from error

    async def at_least(self, version: int) -> Snapshot:
        """Wait until this version is computed, and return the newest one. Raises as `check` does."""
        while self.ready.version < version:
            self.check()
            await self._news.wait()
        return self.ready

    async def aclose(self) -> None:
        """Stop the task, and free the KV in the engine."""
        if self._task is not None:
            await cancel_and_wait([self._task])

    async def _run(self, on_version: Callable[[], None], batch_interval_s: float) -> None:
        """Compute the data, set `ready`, announce the version once, and go on with the next batch, at most one in each
        `batch_interval_s`, until cancelled. If the engine gives up the stream, do the same, but close it, and compute
        again `RETRY_S` later, with the next batch if there is one. At the end close all streams."""
        snapshot, has_slid = self.ready, False
        announced: Snapshot | None = None
        next_s = 0.0
        try:
            while True:
                is_computed = await self._compute(snapshot, has_slid)
                if snapshot is not announced:
                    self.ready = announced = snapshot
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
        """Have the engine compute the data, and return True; count a failure and return False if it gave up the stream.

        After a slide, the data get a new stream. The old one stays open until they are computed, because questions are
        answered from it meanwhile.
        """
        if has_slid or not self._streams:
            self._streams.append(IdleStream(self._backend, self._name, self._prompts.conversation_id))
        try:
            await self._streams[-1].advance(snapshot.token_ids)
        except BackendError:
            self.num_failures += 1
            return False
        return True

    async def _close_streams(self, *, num_kept: int = 0) -> None:
        """Close all streams but the newest `num_kept`."""
        num_closing = len(self._streams) - num_kept
        closed, self._streams = self._streams[:num_closing], self._streams[num_closing:]
        await wait_shielded([asyncio.create_task(each.aclose(), name="streamrag stream ends") for each in closed])

    async def _next(self) -> tuple[Snapshot, bool]:
        """Move the next batch to the window; return the data, and whether the tokens before that batch have changed.

        A batch is what is appended now, perhaps nothing, up to `MAX_BATCH` chunks, or with a new system text all that
        was appended before that text. The tokens before change when the window slides, and with a new system text.
        While the tokenizer fails, tries again every `RETRY_S`.
        """
        number, prompts = self._next_prompts
        batch = self._buffer.take(MAX_BATCH, number)
        if not len(self._buffer):
            self._has_data.clear()
        while True:
            try:
                pieces = await self._prompts.pieces_in_background(batch)
            except StreamRagError:  # a server's tokenizer raises it while the server is unreachable
                self.num_failures += 1
                await asyncio.sleep(RETRY_S)
            else:
                break
        has_changed = self._add_to_window(pieces) or prompts is not self._prompts
        self._prompts = prompts
        return self._snapshot(max(batch[-1].number if batch else 0, number, self.ready.version)), has_changed

    def _snapshot(self, version: int) -> Snapshot:
        return Snapshot(version, self._prompts.head + self.window.token_ids, self._prompts)

    def _add_to_window(self, pieces: Sequence[WindowChunk]) -> bool:
        """Add pieces to the window, return whether it has slid, and remove from the log what is not in the window."""
        has_slid = self.window.add(pieces)
        if self._log is not None:
            for piece in pieces:
                if not piece.token_ids:
                    self._log.forget(piece.number)
            if self.window.oldest is not None:
                self._log.slide(self.window.oldest, self.window.num_slid)
        return has_slid
