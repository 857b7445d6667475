"""The sessions of a service: opened, looked up, resumed after a restart, and closed when idle."""

import asyncio
import logging
import math
import os
import re
import stat
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

from streamrag.errors import ConfigurationError, SessionLogError, SessionLogInUseError, TooManySessionsError
from streamrag.serve.failures import NotAdmittedError, RequestError
from streamrag.serve.observe.observer import Refusal
from streamrag.serve.service import Service
from streamrag.serve.session_store.served_session import ServedSession
from streamrag.sessions import Session, SessionLimits
from streamrag.sessions.limits import SessionRegistry
from streamrag.sessions.log import SessionLog
from streamrag.sessions.log.contents import SessionHeader
from streamrag.sessions.log.file import LogFile, read_header
from streamrag.sessions.question_options import Question
from streamrag.support.tasks import cancel_and_wait, run_shielded

SWEEP_S = 5.0  # seconds between two sweeps, which close idle sessions and end readers whose key was revoked
TOUCH_SHARE = 0.05  # how far a log's time of last use may lag if the service is killed, as a share of the idle timeout
CLIENT_SHARE = 0.25  # of all sessions, and of the tokens in their windows, that one client may have
RETRY_S = 60.0  # retry-After for a refused session, in seconds: another session may have ended by then
NO_SESSION = "there is no such session; it may have been closed after being idle"

_LOG_NAME = re.compile(r"(sess_[0-9a-f]{32})\.sqlite")

log = logging.getLogger("streamrag.serve")


class SessionFolder:
    """A folder of session logs, created for its owner only. Raises ConfigurationError if it is unusable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"session_log_dir={path} cannot be created: {error.strerror or error}") from error
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigurationError(f"session_log_dir={path} cannot be written: make it writable, or choose another")

    def path_of(self, id: str) -> Path:
        """Return the path of this session's log."""
        return self._path / f"{id}.sqlite"

    def sessions(self) -> Iterator[tuple[str, SessionHeader, float]]:
        """Yield id, log header and seconds since the last use. Unreadable logs are logged, empty ones removed."""
        for path in sorted(self._path.iterdir()):
            match = _LOG_NAME.fullmatch(path.name)
            if match is None:
                continue
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    raise SessionLogError(f"{path} is not a regular file")
                if not status.st_size:  # the service was killed before its first write
                    with suppress(SessionLogInUseError):
                        LogFile(path).remove()
                    continue
                yield match[1], read_header(path), max(time.time() - status.st_mtime, 0.0)
            except (OSError, SessionLogError) as error:
                log.error("a session is not resumed: %s", error)


class SessionStore:
    """The sessions of a service, which are closed with it."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._sessions: dict[str, ServedSession] = {}
        limits = service.limits
        num_sessions, num_tokens = limits.max_sessions, limits.max_session_tokens
        of_client = [math.ceil(CLIENT_SHARE * number) for number in (num_sessions, num_tokens)]
        self._registry = SessionRegistry(SessionLimits(num_sessions, of_client[0], num_tokens, of_client[1]))
        self._sweeper: asyncio.Task[None] | None = None
        self._folder = None if service.session_log_dir is None else SessionFolder(service.session_log_dir)
        for id, header, idle_s in self._folder.sessions() if self._folder else ():
            options = {"window_tokens": header.window_tokens, "slide_share": header.slide_share}
            served = self._add(id, header.owner, header.window_tokens, options)
            # A grace period: clients could not use it while the service was down, and the wall clock may have changed.
            idle_s = min(idle_s, max(limits.session_idle_s - limits.session_unused_s, 0.0))
            served.used_s = served.touched_s = time.monotonic() - idle_s
            served.was_used = served.is_from_before = True
        service.closers.append(self.aclose)
        with suppress(RuntimeError):  # without an event loop, the first request starts the sweeper
            self._start_sweeper()

    async def open(self, client: str, **options: Any) -> ServedSession:
        """Open a session for a client, by default with a window of three quarters of the model's length.

        If it cannot be started, it is closed again, and the error raised.

        :raises NotAdmittedError: the service stops, or there are too many sessions, or tokens in their windows.
        """
        self._check_not_draining()
        self._start_sweeper()
        most = self._service.model.max_model_len  # the session itself rejects a longer window
        num_tokens = min(options["window_tokens"] or most * 3 // 4, most)
        try:  # `longest_window` bounds the windows of resumed logs, which may be corrupt
            self._registry.check(client, num_tokens, longest_window=most)
        except TooManySessionsError as error:
            raise NotAdmittedError(str(error), cast(Refusal, error.limit), RETRY_S) from None
        served = self._add(f"sess_{uuid.uuid4().hex}", client, num_tokens, options)  # counted before the first await
        try:
            async with served.starting:
                await self._start(served)
        except BaseException:
            await self.close(served)
            raise
        return served

    async def find(self, id: str, client: str, *, starts: bool = True) -> ServedSession:
        """Return the client's session, used now, and resumed after a restart if `starts`.

        Raises RequestError if there is none or its log is unusable; while the service stops, NotAdmittedError instead.
        """
        served = self._sessions.get(id)
        if served is None or served.client != client:
            self._check_not_draining()  # a restarted service may have it
            raise session_not_found(NO_SESSION)
        served.use()
        self._start_sweeper()
        if starts and not served.is_started:
            async with served.starting:
                if served.is_closed:
                    raise session_not_found(NO_SESSION)
                if not served.is_started:
                    self._check_not_draining()
                    await self._start(served)
        return served

    def _add(self, id: str, client: str, num_tokens: int, options: dict[str, Any]) -> ServedSession:
        """Make a session, with a log if there is a folder, and count it. It is not started."""
        session_log = None
        if self._folder is not None:
            session_log = SessionLog(
                self._folder.path_of(id),
                owner=client,
                on_failure=lambda why: served.note("log_failed", {"reason": why}),
                max_watches=self._service.limits.max_watches,
            )
        session = Session(self._service.backend, log=session_log, admit=partial(self._admit, client), **options)
        served = self._sessions[id] = ServedSession(id, client, session, session_log, time.monotonic())
        self._registry.put(id, client, num_tokens)
        return served

    async def _start(self, served: ServedSession) -> None:
        """Start a session and its reports, and count its real window.

        :raises RequestError: its log is missing, and the session forgotten, or the log is open elsewhere or unusable.
        """
        if served.log is not None and served.is_from_before and not await asyncio.to_thread(served.log.path.exists):
            self._forget(served)  # another service has closed it
            raise session_not_found(NO_SESSION)
        try:
            await served.session.start()
        except SessionLogInUseError as error:
            raise _in_use() from error
        except SessionLogError as error:  # its message names the file, which clients must not see
            if str(error) != served.log_error:
                served.log_error = str(error)
                log.error("the log of a session is unusable: %s", error)
            what = "the text of this session cannot be read or written; see the service's log"
            raise RequestError(what, status=500, code="session_log_failed") from error
        self._registry.put(served.id, served.client, served.session.state.window_tokens)
        served.begin()

    def _admit(self, client: str, question: Question) -> Callable[[], None]:
        """Admit a watched question as ahead of demand, and return a callback for its end. Raises NotAdmittedError."""
        admission, start_s = self._service.admission, time.monotonic()
        max_tokens, num_prompt_tokens = question.params.max_tokens, len(question.text)
        place = admission.enter(client, max_tokens=max_tokens, num_prompt_tokens=num_prompt_tokens, is_ahead=True)
        return lambda: admission.leave(place, stayed_s=time.monotonic() - start_s)

    def _check_not_draining(self) -> None:
        """Raise NotAdmittedError if the service is stopping."""
        if self._service.admission.is_draining:
            raise NotAdmittedError("the service is stopping", "draining", 5.0)

    async def close(self, served: ServedSession) -> None:
        """Close a session, started or not, and remove its log. Raises RequestError if another service has it."""
        if served.log is not None and not served.is_started:
            try:
                async with served.starting:
                    if not served.is_started:
                        await served.log.aclose(removes=True)
            except SessionLogInUseError as error:
                raise _in_use() from error
        await self._close(served, forgets=True)

    async def aclose(self) -> None:
        """Stop the sweeper, close all sessions, keep their logs, and write their times of last use to them."""
        if self._sweeper is not None:
            await cancel_and_wait([self._sweeper])
        sessions = list(self._sessions.values())
        await asyncio.gather(*(self._close(each, forgets=False) for each in sessions))
        await asyncio.gather(*(each.touch() for each in sessions))

    async def _close(self, served: ServedSession, *, forgets: bool) -> None:
        """Forget a session, and end it even if the caller is cancelled; with `forgets`, remove its log."""
        self._forget(served)
        await run_shielded(served.end(forgets=forgets), "streamrag session closes")

    def _forget(self, served: ServedSession) -> None:
        """Remove a session from the store and the limits, and mark it as closed. It still runs."""
        self._sessions.pop(served.id, None)
        self._registry.remove(served.id)
        served.is_closed = True

    def _start_sweeper(self) -> None:
        if self._sweeper is None and asyncio.get_running_loop():
            self._sweeper = asyncio.create_task(self._sweep(), name="streamrag sessions' expiry")

    async def _sweep(self) -> None:
        """Every `SWEEP_S`, close idle sessions (forget one that another service has opened), wake readers to check
        their keys, and write times of last use."""
        limits = self._service.limits
        while True:
            await asyncio.sleep(SWEEP_S)
            for served in list(self._sessions.values()):
                if served.is_idle(limits):
                    try:
                        await self.close(served)
                    except RequestError:  # another service has opened it
                        self._forget(served)
                    continue
                if served.num_readers or served.num_users:
                    served.news.wake()
                if served.used_s - served.touched_s > TOUCH_SHARE * limits.session_idle_s:
                    await served.touch()


def session_not_found(why: str) -> RequestError:
    """Return the error for an unknown or closed session."""
    return RequestError(why, status=404, code="session_not_found")


def _in_use() -> RequestError:
    return RequestError(
        "another service has opened this session: send the request there", status=409, code="session_in_use"
    )
