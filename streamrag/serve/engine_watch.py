"""A health check of the engine that restarts a dead one, with an exponential backoff and a restart budget."""

import asyncio
import logging
import time
from collections import deque
from contextlib import suppress
from typing import Protocol, runtime_checkable

import httpx

from streamrag.backends.openai.http import Server
from streamrag.core import Backend, Progress, Startable
from streamrag.errors import BackendError, EngineDeadError
from streamrag.serve.open_queries import OpenQueries
from streamrag.support.messages import message_of

CHECK_S = 0.5  # seconds between two health checks
READY_S = 3.0  # seconds for the model's server to answer, before the service counts as not ready
FIRST_BACKOFF_S = 1.0
MAX_BACKOFF_S = 60.0  # Shortest and longest backoff. The first restart has none; it doubles from the second restart on.

log = logging.getLogger("streamrag.serve")


@runtime_checkable
class HasHealth(Protocol):
    """A backend with a health check."""

    def check_health(self) -> None:
        """Check that the backend works. Raises EngineDeadError if the engine has died."""


class ServerCheck:
    """A check of the model's server, at most once in `CHECK_S`, however often load balancers ask."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = asyncio.Lock()
        self._checked_s = -CHECK_S
        self._answers = True

    async def answers(self) -> bool:
        """Return whether the server of an `OpenAIBackend` answered lately; True for other backends. Proxies send 502
        and the like for servers that are gone, but 501 comes from one that has no list of models."""
        async with self._lock:
            server = getattr(self._backend, "_server", None)
            if isinstance(server, Server) and time.monotonic() - self._checked_s >= CHECK_S:
                self._answers = False
                with suppress(httpx.HTTPError, RuntimeError, TimeoutError):  # RuntimeError: the client was closed
                    async with asyncio.timeout(READY_S):
                        response = await server._send("GET", "/models", None)
                        await response.aclose()
                    self._answers = response.status_code < 500 or response.status_code == 501
                self._checked_s = time.monotonic()
            return self._answers


class RestartBudget:
    """A budget of at most `at_most` restarts within `window_s` seconds. Failed restarts count too."""

    def __init__(self, at_most: int = 5, window_s: float = 3600.0) -> None:
        self.at_most = at_most
        self._window_s = window_s
        self._starts_s: deque[float] = deque()

    @property
    def num_begun(self) -> int:
        """Number of restarts within the window."""
        return len(self._starts_s)

    def begin(self, now_s: float) -> float | None:
        """Count another restart, and return its backoff in seconds, or None if the budget is spent.

        The first one within the window has none; then it doubles from `FIRST_BACKOFF_S` to `MAX_BACKOFF_S`.
        """
        while self._starts_s and self._starts_s[0] <= now_s - self._window_s:
            self._starts_s.popleft()
        if self.num_begun == self.at_most:
            return None
        self._starts_s.append(now_s)
        return 0.0 if self.num_begun == 1 else min(FIRST_BACKOFF_S * 2.0 ** (self.num_begun - 2), MAX_BACKOFF_S)


class EngineWatch:
    """A watch over one engine, which restarts it within `budget` and informs the open queries."""

    def __init__(self, backend: Backend, budget: RestartBudget, queries: OpenQueries) -> None:
        self.given_up = asyncio.Event()  # set when the engine has died and will not be restarted
        self.num_restarts = 0
        self.restarting = ""  # description of the restart in progress, or empty
        self._backend = backend
        self._budget = budget
        self._queries = queries

    async def run(self, progress: Progress) -> None:
        """Check the engine every `CHECK_S`. When it is dead, admit no queries, abort those that need it, and restart
        it; if that fails, set `given_up` and return. Without a check, return at once."""
        while isinstance(self._backend, HasHealth):
            await asyncio.sleep(CHECK_S)
            if (error := self.death()) is None:
                continue
            self._queries.engine_died(error)
            if not await self._restart(error, progress):
                self.given_up.set()
                return
            self._queries.engine_restarted()

    def death(self) -> EngineDeadError | None:
        """Return the error that the engine, or its health check, died of; None while it lives, starts or is closed."""
        try:
            if isinstance(self._backend, HasHealth):
                self._backend.check_health()
        except EngineDeadError as error:
            return error
        except BackendError:  # the engine is starting or closed
            pass
        except Exception as error:  # a third-party backend whose check is broken counts as dead
            log.exception("the engine's health check failed")
            return EngineDeadError(f"its health check failed: {message_of(error)}")
        return None

    async def _restart(self, error: Exception, progress: Progress) -> bool:
        """Close and start the engine, after backoffs, until that works; return whether it did.

        Gives up if the budget is spent, the service drains, or the backend cannot be started. Logs all errors.
        """
        while isinstance(self._backend, Startable) and self._queries.wants_engine:
            if (wait_s := self._budget.begin(time.monotonic())) is None:
                break
            self.restarting = f"the engine died; restart {self._budget.num_begun} of at most {self._budget.at_most}"
            log.error("%s, in %g s: %s", self.restarting, wait_s, error)
            try:
                await self._backend.aclose()
                await asyncio.sleep(wait_s)
                await self._backend.start(progress)
            except Exception as failure:  # any error means that there is no engine
                error = failure
            else:
                self.num_restarts += 1
                self.restarting = ""
                log.warning("the engine was restarted")
                return True
        self.restarting = ""
        log.error("the engine died and will not be restarted: %s", error)
        return False
