"""A session's text on disk, written in the background, so that a restarted process resumes it."""

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
from streamrag.sessions.log.contents import Header, LogContents, LogState, encode_watch
from streamrag.sessions.log.file import LogFile
from streamrag.sessions.question import WatchOptions
from streamrag.sessions.window import Numbered, num_characters
from streamrag.support.messages import message_of, short
from streamrag.support.tasks import LET_GO_S, Broadcast, wait_regardless

MAX_CHARACTERS = 1_000_000
"""Most characters of one chunk's texts, of a watch, and of the system text."""

RETRY_S = 5.0
"""Seconds until the next attempt, after the disk refused one."""

EVENTS_AHEAD = 1024
"""Numbers of events that are reserved at a time, and again when half of them are left: a process that is killed has
given no number that its successor gives too."""

MAX_THREADS = 4
"""Threads that wait for disks, in one event loop."""

T = TypeVar("T")

log = logging.getLogger("streamrag.sessions")

_limiter = anyio.lowlevel.RunVar[anyio.CapacityLimiter]("streamrag session logs")


class SessionLog:
    """The log of a session. Appending never waits: a task writes what has changed meanwhile, and waits for the disk.

    owner: kept in the log, and read by `read_header`.
    on_failure: called with the reason when the disk does not take something, the first time in a row.
    max_watches: most watches that are read from the file; None reads all.

    :raises ConfigurationError: the path is none.
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
        """Events that were told, also before a restart. A new event's number is one more."""
        self._owner = owner
        self._on_failure = on_failure
        self._max_watches = max_watches
        try:
            self._file = LogFile(Path(path))
        except (TypeError, ValueError):
            raise ConfigurationError(f"log={short(path)} must be the path of a file") from None
        self._header: Header
        self._held: dict[int, Chunk] = {}
        """All that the session holds: in its window, and not there yet."""
        self._is_dirty = True
        self._has_events = False
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self._has_work = asyncio.Event()
        self._hurry = asyncio.Event()
        """Set when somebody waits for the disk."""
        self._attempts = Broadcast()

    @property
    def path(self) -> Path:
        """Path of the log, with links resolved."""
        return self._file.path

    # --------------------------------------------------------------------------------------------- starting and ending

    async def open(self) -> LogContents | None:
        """Take the file and read it; return None if it is new.

        :raises SessionLogError: it cannot be opened, another session has it, or it is damaged. Nothing was changed.
        """
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
        """Begin to write the log. Events may be added once `wait_for_attempt` has returned.

        :raises SessionLogError: the system text is too long for a log.
        """
        self.check_system(system)
        before = Header(system, window_tokens, slide_share, self._owner) if contents is None else contents.header
        self._header = replace(before, window_tokens=window_tokens, slide_share=slide_share)
        self._change(num_events=self.num_events + EVENTS_AHEAD)
        self._is_closing = False
        self._task = asyncio.create_task(self._write_all(), name="streamrag session's log")

    async def wait_for_attempt(self) -> None:
        """Wait for the next attempt to write. The first one reserves numbers for events."""
        await self._attempts.wait()

    async def aclose(self, *, removes: bool = False) -> None:
        """Write what is left, and let others have the file; with `removes`, delete it.

        If the disk does not answer, this is done once it does.

        :raises SessionLogInUseError: it is to be deleted, was never opened, and another session has it.
        """
        end = self._file.remove if removes else self._file.close
        if self._task is not None:
            if self._has_events:
                self._change(num_events=self.num_events)
            self._is_closing = True
            self._has_work.set()
            self._hurry.set()
            await wait_regardless([self._task], at_most_s=LET_GO_S)
            if not self._task.done():
                what = "%s: the disk has not answered for %g s, and the log is left as it is until it does"
                log.warning(what, self.path, LET_GO_S)
                self._task = asyncio.create_task(_end_late(end, self._task), name="streamrag session's log ends")
                return
        await _in_thread(end)

    # ------------------------------------------------------------------------------------------------------------ data

    @staticmethod
    def check(chunk: Chunk) -> None:
        """Check that a log takes this chunk.

        :raises SessionLogError: it is too long.
        """
        if num_characters(chunk) > MAX_CHARACTERS:
            raise SessionLogError(f"a chunk has more than {MAX_CHARACTERS:,} characters, the most in a log: split it")

    @staticmethod
    def check_system(system: str) -> None:
        """Check that a log takes this system text.

        :raises SessionLogError: it is too long.
        """
        if len(system) > MAX_CHARACTERS:
            raise SessionLogError(f"a session with a log has a system text of at most {MAX_CHARACTERS:,} characters")

    def append(self, numbered: Numbered) -> None:
        """Keep a chunk that was appended. Never waits."""
        self._held[numbered.number] = numbered.chunk
        self._change(num_appended=numbered.number)

    def freeze(self, number: int, system: str) -> None:
        """Keep the system text that the version of this number has."""
        self._change(num_appended=number, frozen=system)

    def drop(self, number: int) -> None:
        """Delete a chunk that was dropped before it came into the window, and count it."""
        self.forget(number)
        self._change(num_dropped=self._header.num_dropped + 1)

    def forget(self, number: int) -> None:
        """Delete a chunk that takes no room in the window."""
        self._held.pop(number, None)
        self._change()

    def slide(self, oldest: int, num_slid: int) -> None:
        """Delete what went out of the window, which begins with the chunk of number `oldest` now."""
        if num_slid != self._header.num_slid:
            self._held = {number: chunk for number, chunk in self._held.items() if number >= oldest}
            self._change(num_slid=num_slid)

    def add_watch(self, watch: WatchOptions) -> None:
        """Keep a watched question, which has a name.

        :raises SessionLogError: it is too long for a log.
        :raises ConfigurationError: its parameters cannot be written.
        """
        assert watch.name is not None
        if len(encode_watch(watch)) > MAX_CHARACTERS:
            raise SessionLogError(f"a watch has more than {MAX_CHARACTERS:,} characters, the most in a log: shorten it")
        self.watches[watch.name] = watch
        self._change()

    def remove_watch(self, name: str) -> None:
        """Delete a watched question."""
        del self.watches[name]
        self._change()

    def next_event(self) -> int:
        """Return the number of a new event."""
        self.num_events += 1
        self._has_events = True
        if self.num_events + EVENTS_AHEAD // 2 > self._header.num_events:
            self._change(num_events=self.num_events + EVENTS_AHEAD)
        return self.num_events

    async def flush(self) -> int:
        """Wait until all that was appended is on the disk, as far as the system knows; return the version that is.

        :raises SessionLogError: the disk does not take it, or the log was closed. It is tried again later.
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
        """Set the file's time: the session was last used then, on the wall clock, though nothing was appended."""
        await _in_thread(partial(self._file.touch, at_s))

    # --------------------------------------------------------------------------------------------------------- writing

    def _change(self, **header: int | str) -> None:
        if header:
            self._header = replace(self._header, **header)  # type: ignore[arg-type]
        self._is_dirty = True
        self._has_work.set()

    async def _write_all(self) -> None:
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
        """Write what has changed; return whether the disk has taken it."""
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
        is_news = self.state.error is None
        self.state = replace(self.state, num_failures=self.state.num_failures + 1, error=reason)
        if is_news:
            log.warning("%s cannot be written: %s. The session goes on; it is tried again", self.path, reason)
            self._on_failure(reason)


async def _end_late(end: Callable[[], None], writing: "asyncio.Task[None]") -> None:
    await asyncio.wait([writing])
    await _in_thread(end)


async def _in_thread(function: Callable[[], T]) -> T:
    """Return what it returns. A caller that is cancelled waits for its end, since a thread cannot be stopped."""
    try:
        limiter = _limiter.get()
    except LookupError:
        _limiter.set(limiter := anyio.CapacityLimiter(MAX_THREADS))
    task = asyncio.create_task(anyio.to_thread.run_sync(function, limiter=limiter), name="streamrag log")
    await wait_regardless([task])
    return task.result()
