"""Write a session's text to disk in the background, so that a restarted process can resume the session."""

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import TypeVar

import anyio
import anyio.lowlevel
import anyio.to_thread

from streamrag.core import Chunk
from streamrag.errors import ConfigurationError, SessionLogError
from streamrag.sessions.log.contents import LogContents, LogState, SessionHeader, encode_watch
from streamrag.sessions.log.file import LogFile
from streamrag.sessions.question_options import WatchOptions
from streamrag.sessions.window import Numbered, num_characters
from streamrag.support.messages import message_of, short_repr
from streamrag.support.tasks import LET_GO_S, Broadcast, wait_shielded

MAX_CHARACTERS = 1_000_000
"""Most characters of a chunk, of a watch, and of the system text."""

RETRY_S = 5.0
"""Seconds until the next attempt after a failed write."""

EVENTS_AHEAD = 1024
"""Event numbers that are reserved in the log at a time, and again when half of them are used, so that a resumed session
does not reuse a number of the killed process."""

MAX_THREADS = 4
"""Most threads per event loop that wait for disks."""

T = TypeVar("T")

log = logging.getLogger("streamrag.sessions")

_limiter = anyio.lowlevel.RunVar[anyio.CapacityLimiter]("streamrag session logs")


class SessionLog:
    """The log of a session. Changes never block: a background task writes them to disk.

    owner: stored in the log, and returned by `read_header`.
    on_failure: called with the reason when a write fails, once per series of failures.
    max_watches: most watches to read from the file; None reads all.

    :raises ConfigurationError: `path` is not a path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        owner: str = "",
        on_failure: Callable[[str], None] = lambda reason: None,
        max_watches: int | None = None,
    ) -> None:
        self.state = LogState()
        self.watches: dict[str, WatchOptions] = {}
        self.num_events = 0
        """Number of the newest event, counted across restarts."""
        self._owner = owner
        self._on_failure = on_failure
        self._max_watches = max_watches
        try:
            self._file = LogFile(Path(path))
        except (TypeError, ValueError):
            raise ConfigurationError(f"log={short_repr(path)} must be the path of a file") from None
        self._header: SessionHeader
        self._held: dict[int, Chunk] = {}
        """Chunks in the session's window and buffer, by number."""
        self._is_dirty = True
        self._has_events = False
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self._has_work = asyncio.Event()
        self._hurry = asyncio.Event()
        """Set when a caller waits for the disk, to cut the wait before a retry short."""
        self._attempts = Broadcast()
        """Woken after each attempt to write."""

    @property
    def path(self) -> Path:
        """Path of the log, with links resolved."""
        return self._file.path

    async def open(self) -> LogContents | None:
        """Lock the file, and return its contents, None if it is new. Sets `num_events` and `watches` from it, and warns
        if it has more than `max_watches`. Raises as `LogFile.open` does."""
        try:
            contents = await _in_thread(self._file.open)
        except asyncio.CancelledError:
            self._file.close()
            raise
        if contents is not None:
            self.state = LogState(is_resumed=True)
            self.num_events, self._held = contents.header.num_events, dict(contents.chunks)
            self.watches = dict(islice(contents.watches.items(), self._max_watches))
            if len(self.watches) < len(contents.watches):
                log.warning("%s: watches beyond the first %d are left out", self.path, len(self.watches))
        return contents

    def start(self, system: str, window_tokens: int, slide_share: float, contents: LogContents | None) -> None:
        """Start the task that writes the log, with the header of `contents`, or a new one if that is None, but with the
        given window and share. The header reserves numbers of events: await `wait_for_attempt`, the first attempt to
        write it, before `next_event`. Raises as `check_system` does."""
        self.check_system(system)
        header = SessionHeader(system, window_tokens, slide_share, self._owner) if contents is None else contents.header
        self._header = replace(header, window_tokens=window_tokens, slide_share=slide_share)
        self._change(num_events=self.num_events + EVENTS_AHEAD)
        self._is_closing = False
        self._task = asyncio.create_task(self._write_all(), name="streamrag session's log")

    async def wait_for_attempt(self) -> None:
        """Wait for the end of the next attempt to write. The first one reserves event numbers."""
        await self._attempts.wait()

    async def aclose(self, *, removes: bool = False) -> None:
        """Write the remaining changes, with one attempt, and release the file; with `removes`, delete it.

        If the disk does not respond within `LET_GO_S`, logs a warning and returns; a background task does this later.

        :raises SessionLogInUseError: with `removes`, the log was never opened, and another session has it.
        """
        end = self._file.remove if removes else self._file.close
        if self._task is not None:
            if self._has_events:
                self._change(num_events=self.num_events)
            self._is_closing = True
            self._has_work.set()
            self._hurry.set()
            await wait_shielded([self._task], at_most_s=LET_GO_S)
            if not self._task.done():
                what = "%s: the disk has not answered for %g s, and the log is left as it is until it does"
                log.warning(what, self.path, LET_GO_S)
                self._task = asyncio.create_task(_end_late(end, self._task), name="streamrag session's log ends")
                return
        await _in_thread(end)

    @staticmethod
    def check(chunk: Chunk) -> None:
        """Raise SessionLogError if `chunk` is too long for a log."""
        if num_characters(chunk) > MAX_CHARACTERS:
            raise SessionLogError(f"a chunk has more than {MAX_CHARACTERS:,} characters, the most in a log: split it")

    @staticmethod
    def check_system(system: str) -> None:
        """Raise SessionLogError if the system text is too long for a log."""
        if len(system) > MAX_CHARACTERS:
            raise SessionLogError(f"a session with a log has a system text of at most {MAX_CHARACTERS:,} characters")

    def append(self, numbered: Numbered) -> None:
        """Add a chunk that was appended."""
        self._held[numbered.number] = numbered.chunk
        self._change(num_appended=numbered.number)

    def freeze(self, number: int, system: str) -> None:
        """Set the system text of the version `number`."""
        self._change(num_appended=number, frozen=system)

    def drop(self, number: int) -> None:
        """Remove a chunk that was dropped from the buffer, and count it."""
        self.forget(number)
        self._change(num_dropped=self._header.num_dropped + 1)

    def forget(self, number: int) -> None:
        """Remove a chunk that has no tokens in the window."""
        self._held.pop(number, None)
        self._change()

    def slide(self, oldest: int, num_slid: int) -> None:
        """Remove the chunks before `oldest`, the first one in the window, if the window has slid."""
        if num_slid != self._header.num_slid:
            self._held = {number: chunk for number, chunk in self._held.items() if number >= oldest}
            self._change(num_slid=num_slid)

    def add_watch(self, watch: WatchOptions) -> None:
        """Add a named watch, or replace that of the same name.

        :raises SessionLogError: it is too long for a log.
        :raises ConfigurationError: its parameters cannot be written.
        """
        assert watch.name is not None
        if len(encode_watch(watch)) > MAX_CHARACTERS:
            raise SessionLogError(f"a watch has more than {MAX_CHARACTERS:,} characters, the most in a log: shorten it")
        self.watches[watch.name] = watch
        self._change()

    def remove_watch(self, name: str) -> None:
        """Remove a named watch."""
        del self.watches[name]
        self._change()

    def next_event(self) -> int:
        """Return the number of a new event, reserving more numbers in the log if fewer than half are left."""
        self.num_events += 1
        self._has_events = True
        if self.num_events + EVENTS_AHEAD // 2 > self._header.num_events:
            self._change(num_events=self.num_events + EVENTS_AHEAD)
        return self.num_events

    async def flush(self) -> int:
        """Wait until all data appended so far are synced to disk, and return the version on disk.

        :raises SessionLogError: the write failed and will be tried again, or the log was closed.
        """
        newest, num_failures = self._header.num_appended, self.state.num_failures
        while self.state.flushed < newest:
            if self.state.num_failures > num_failures:
                raise SessionLogError(f"{self.path} cannot be written: {self.state.error}")
            if self._task is None or self._task.done():
                raise SessionLogError(f"{self.path} has been closed")
            self._has_work.set()
            self._hurry.set()
            await self._attempts.wait()
        return self.state.flushed

    async def touch(self, at_s: float) -> None:
        """Set the file's time to when the session was last used, on the wall clock."""
        await _in_thread(partial(self._file.touch, at_s))

    def _change(self, **header: int | str) -> None:
        """Set fields of the header, if any, and wake the task that writes."""
        if header:
            self._header = replace(self._header, **header)  # type: ignore[arg-type]
        self._is_dirty = True
        self._has_work.set()

    async def _write_all(self) -> None:
        """Write whenever there are changes, and again `RETRY_S` after a failure, or sooner if a caller waits for the
        disk. When closing, end once all is written, or after a failure."""
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            self._hurry.clear()
            has_failed = not await self._write()
            self._attempts.wake()
            if self._is_closing and (has_failed or not self._is_dirty):
                return
            if has_failed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._hurry.wait()
                self._has_work.set()

    async def _write(self) -> bool:
        """Write any changes, set `state`, and return whether that succeeded. Changes that failed stay pending."""
        if not self._is_dirty:
            return True
        contents = LogContents(self._header, dict(self._held), dict(self.watches))
        self._is_dirty = False
        try:
            await _in_thread(partial(self._file.write, contents))
        except (OSError, SessionLogError) as error:
            self._is_dirty = True
            self._count_failure((isinstance(error, OSError) and error.strerror) or message_of(error))
            return False
        self.state = replace(self.state, flushed=contents.header.num_appended, error=None)
        return True

    def _count_failure(self, reason: str) -> None:
        """Count a failed attempt in `state`; log a warning and call `on_failure` if the one before did not fail."""
        is_news = self.state.error is None
        self.state = replace(self.state, num_failures=self.state.num_failures + 1, error=reason)
        if is_news:
            log.warning(
                "%s cannot be written: %s. The session continues, and writing is tried again", self.path, reason
            )
            self._on_failure(reason)


async def _end_late(end: Callable[[], None], writing: "asyncio.Task[None]") -> None:
    await asyncio.wait([writing])
    await _in_thread(end)


async def _in_thread(function: Callable[[], T]) -> T:
    """Return `function`'s result from a thread. A cancelled caller waits for its end, as a thread cannot be stopped."""
    try:
        limiter = _limiter.get()
    except LookupError:
        _limiter.set(limiter := anyio.CapacityLimiter(MAX_THREADS))
    task = asyncio.create_task(anyio.to_thread.run_sync(function, limiter=limiter), name="streamrag log")
    await wait_shielded([task])
    return task.result()
