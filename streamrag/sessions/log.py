"""A session's text on disk: written behind its back, so that a restarted process resumes it."""

import asyncio
import logging
import os
from collections import OrderedDict
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
from streamrag.sessions.buffer import Numbered, num_characters
from streamrag.sessions.log_file import LogFile
from streamrag.sessions.log_lines import (
    MAX_CHARACTERS,
    Dropped,
    Entry,
    Frozen,
    Header,
    KeptWatch,
    Logged,
    Reserved,
    Unwatched,
    num_characters_of,
)
from streamrag.sessions.state import LogState
from streamrag.support.messages import message_of, short
from streamrag.support.tasks import LET_GO_S, Broadcast, wait_regardless

RETRY_S = 5.0
"""After the disk refused to take it."""

MAX_QUEUED = 4096
MAX_QUEUED_CHARACTERS = 4_000_000
"""What waits for the disk. When there is more, the log is written anew from what the session holds."""

EVENTS_AHEAD = 1024
"""Numbers of events that are reserved at a time, and when half of them are left: none is given twice, also by a process
that is killed."""

MAX_THREADS = 4
"""That wait for disks, in one event loop."""

T = TypeVar("T")

log = logging.getLogger("streamrag.sessions")

_limiter = anyio.lowlevel.RunVar[anyio.CapacityLimiter]("streamrag session logs")


class SessionLog:
    """One session's log. Appending never waits: a task writes what has come meanwhile, and waits for the disk.

    owner: kept in the log, for whoever asks whose it is.
    on_failure: called with the reason when the disk does not take it, the first time in a row.
    max_watches: watches that are read from the file at most; all, if that is None.
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
        self._owner = owner
        self._on_failure = on_failure
        self._max_watches = max_watches
        self._file = LogFile(Path(path))
        self._header: Header
        self._held: OrderedDict[int, Chunk] = OrderedDict()
        """All that the session holds: in its window, and not there yet."""
        self.watches: dict[str, KeptWatch] = {}
        self.num_events = 0
        """Told so far, and before: a new event's number is one more."""
        self._num_reserved = 0
        self._has_events = False
        self._queued: list[Entry] = []
        self._num_queued_characters = 0
        self._is_behind = True
        """Whether the file has to be written anew."""
        self._newest = 0
        self._is_closing = False
        self._task: asyncio.Task[None] | None = None
        self._has_work = asyncio.Event()
        self._hurry = asyncio.Event()
        """Set when somebody waits for it."""
        self._attempts = Broadcast()

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._file.path

    # --------------------------------------------------------------------------------------------- starting and ending

    async def open(self) -> Logged | None:
        """Take the file, and read it; None if it is new.

        :raises SessionLogError: it cannot be opened, another session has it, or it is damaged. Nothing was changed.
        """
        try:
            logged = await _in_thread(self._file.open)
        except asyncio.CancelledError:
            self._file.close()
            raise
        if logged is not None:
            self.state = LogState(is_resumed=True, is_torn=logged.is_torn)
            self._newest = logged.num_appended
            self.watches = dict(islice(logged.watches.items(), self._max_watches))
            if len(self.watches) < len(logged.watches):
                log.warning("%s: watches beyond the first %d are left out", self.path, len(self.watches))
            self.num_events = logged.num_events
            self._held.update((each.number, each.chunk) for each in logged.chunks)
            if logged.is_torn:
                log.warning("%s: its last line was not finished, and is left out", self.path)
        return logged

    def start(self, system: str, window_tokens: int, slide_share: float, logged: Logged | None) -> None:
        """Begin to write. Events may be told once `begun` has returned.

        :raises SessionLogError: the system text is too long for a log.
        """
        self.check_system(system)
        self._header = Header(system, window_tokens, slide_share, self._owner)
        if logged is not None:
            of_before = {name: getattr(logged.header, name) for name in ("owner", "num_slid")}
            frozen = None if logged.system == logged.header.system else logged.system
            self._header = replace(self._header, **of_before, num_dropped=logged.num_dropped, frozen=frozen)
        self._num_reserved = self.num_events + EVENTS_AHEAD
        self._is_closing = False
        self._task = asyncio.create_task(self._write_all(), name="streamrag session's log")
        self._has_work.set()

    async def begun(self) -> None:
        """Wait for the first attempt to write, which reserves numbers for events."""
        await self._attempts.wait()

    async def aclose(self, *, removes: bool = False) -> None:
        """Write what is left, and let others have the file; with `removes` it is gone. That is done later if
        the disk does not answer.

        :raises SessionLogInUseError: it is to go, was never opened, and another session has it.
        """
        end = self._file.remove if removes else self._file.close
        if self._task is not None:
            if self._has_events:
                self._reserve(self.num_events)
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
        """:raises SessionLogError: it is too long for a log."""
        if num_characters(chunk) > MAX_CHARACTERS:
            raise SessionLogError(f"a chunk has more than {MAX_CHARACTERS:,} characters, the most in a log: split it")

    @staticmethod
    def check_system(system: str) -> None:
        """:raises SessionLogError: it is too long for a log."""
        if len(system) > MAX_CHARACTERS:
            raise SessionLogError(f"a session with a log has a system text of at most {MAX_CHARACTERS:,} characters")

    def frozen(self, number: int, system: str) -> None:
        """The version of this number has another system text."""
        self._newest = number
        self._header = replace(self._header, frozen=system)
        self._queue(Frozen(number, system), len(system))

    def watched(self, watch: KeptWatch) -> None:
        """This question is watched.

        :raises SessionLogError: it is too long for a log.
        :raises ConfigurationError: its parameters cannot be written.
        """
        size = num_characters_of(watch)
        if size > MAX_CHARACTERS:
            raise SessionLogError(f"a watch has more than {MAX_CHARACTERS:,} characters, the most in a log: shorten it")
        self.watches[watch.watch] = watch
        self._queue(watch, size)

    def unwatched(self, name: str) -> None:
        """It is not any more."""
        del self.watches[name]
        self._queue(Unwatched(name), len(name))

    def next_event(self) -> int:
        """The number of a new event."""
        self.num_events += 1
        self._has_events = True
        if self.num_events + EVENTS_AHEAD // 2 > self._num_reserved:
            self._reserve(self.num_events + EVENTS_AHEAD)
        return self.num_events

    def _reserve(self, num_events: int) -> None:
        self._num_reserved = num_events
        self._queue(Reserved(num_events), 0)

    def append(self, numbered: Numbered) -> None:
        """It was appended. Never waits."""
        self._newest = numbered.number
        self._held[numbered.number] = numbered.chunk
        self._queue(numbered, num_characters(numbered.chunk))

    def dropped(self, number: int) -> None:
        """It was, before it came into the window."""
        self._held.pop(number, None)
        self._header = replace(self._header, num_dropped=self._header.num_dropped + 1)
        self._queue(Dropped(number), 0)

    def forget(self, number: int) -> None:
        """It takes no room in the window."""
        self._held.pop(number, None)

    def slid(self, oldest: int, num_slid: int) -> None:
        """The window begins with the chunk of this number now."""
        while self._held and next(iter(self._held)) < oldest:
            self._held.popitem(last=False)
        self._header = replace(self._header, num_slid=num_slid)

    async def flush(self) -> int:
        """Wait until all that was appended is on the disk, as far as the system knows; the version that is.

        :raises SessionLogError: the disk does not take it, or the log was closed. It is tried again later.
        """
        newest, num_failures = self._newest, self.state.num_failures
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
        """The session was last used then, on the wall clock, though nothing was appended: the file's time tells."""
        await _in_thread(partial(self._file.touch, at_s))

    # --------------------------------------------------------------------------------------------------------- writing

    def _queue(self, entry: Entry, num_characters: int) -> None:
        self._has_work.set()
        if self._is_behind:
            return
        self._queued.append(entry)
        self._num_queued_characters += num_characters
        if len(self._queued) > MAX_QUEUED or self._num_queued_characters > MAX_QUEUED_CHARACTERS:
            self._be_behind()

    def _be_behind(self) -> None:
        self._is_behind = True
        self._queued, self._num_queued_characters = [], 0

    async def _write_all(self) -> None:
        while True:
            await self._has_work.wait()
            self._has_work.clear()
            self._hurry.clear()
            has_failed = not await self._write()
            self._attempts.wake()
            if self._is_closing and (has_failed or not (self._queued or self._is_behind)):
                return
            if has_failed:
                with suppress(TimeoutError):
                    async with asyncio.timeout(RETRY_S):
                        await self._hurry.wait()
                self._has_work.set()

    async def _write(self) -> bool:
        """Whether the disk has taken all that was there."""
        newest, queued = self._newest, self._queued
        self._queued, self._num_queued_characters = [], 0
        if not queued and not self._is_behind:
            return True
        if self._is_behind or self._file.has_grown:
            header = replace(self._header, num_appended=newest, num_events=self._num_reserved)
            held = [Numbered(number, chunk) for number, chunk in self._held.items()]
            work = partial(self._file.write_anew, header, [*self.watches.values(), *held])
        else:
            work = partial(self._file.append, queued)
        self._is_behind = False
        try:
            await _in_thread(work)
        except (OSError, SessionLogError) as error:
            self._be_behind()
            self._failed((isinstance(error, OSError) and error.strerror) or message_of(error))
            return False
        self.state = replace(self.state, flushed=newest, error=None)
        return True

    def _failed(self, reason: str) -> None:
        is_news = self.state.error is None
        self.state = replace(self.state, num_failures=self.state.num_failures + 1, error=reason)
        if is_news:
            log.warning("%s cannot be written: %s. The session goes on; it is tried again", self.path, reason)
            self._on_failure(reason)


async def _end_late(end: Callable[[], None], writing: "asyncio.Task[None]") -> None:
    await asyncio.wait([writing])
    await _in_thread(end)


async def _in_thread(function: Callable[[], T]) -> T:
    """What it returns or raises; whoever is cancelled waits for its end, since a thread cannot be stopped."""
    try:
        limiter = _limiter.get()
    except LookupError:
        _limiter.set(limiter := anyio.CapacityLimiter(MAX_THREADS))
    task = asyncio.create_task(anyio.to_thread.run_sync(function, limiter=limiter), name="streamrag log")
    await wait_regardless([task])
    return task.result()


def session_log(given: "SessionLog | str | os.PathLike[str] | None") -> SessionLog | None:
    """The log that was asked for.

    :raises ConfigurationError: it is no path.
    """
    if given is None or isinstance(given, SessionLog):
        return given
    try:
        return SessionLog(given)
    except (TypeError, ValueError):
        raise ConfigurationError(f"log={short(given)} must be the path of a file") from None
