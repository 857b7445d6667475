"""A watch over the engine, which starts a dead one again: each time after a longer wait, and not for ever."""

import asyncio
import logging
import time
from collections import deque
from typing import Protocol, runtime_checkable

from streamrag.core import Backend, Progress, Startable
from streamrag.errors import BackendError, EngineDeadError
from streamrag.support.messages import message_of

CHECK_S = 0.5
"""Seconds between two health checks."""

FIRST_WAIT_S = 1.0
MOST_WAIT_S = 60.0
"""Wait before the second restart, which doubles before each further one, and the longest. The first comes at once."""

log = logging.getLogger("streamrag.serve")


@runtime_checkable
class HasHealth(Protocol):
    """A backend that knows whether it still works."""

    def check_health(self) -> None:
        """Check that the backend works.

        :raises EngineDeadError: it does not.
        """


class Restarts:
    """A budget of restarts: at most `at_most` within `window_s` seconds. Starts that fail count too."""

    def __init__(self, at_most: int, window_s: float) -> None:
        self.at_most = at_most
        self._window_s = window_s
        self._begun_s: deque[float] = deque()

    @property
    def num_begun(self) -> int:
        """Number of restarts that count."""
        return len(self._begun_s)

    def begin(self, now_s: float) -> float | None:
        """Count another restart, and return the seconds to wait before it; None if there were too many."""
        while self._begun_s and self._begun_s[0] <= now_s - self._window_s:
            self._begun_s.popleft()
        if self.num_begun == self.at_most:
            return None
        self._begun_s.append(now_s)
        return 0.0 if self.num_begun == 1 else min(FIRST_WAIT_S * 2.0 ** (self.num_begun - 2), MOST_WAIT_S)


class Guarded(Protocol):
    """The queries that the engine works for."""

    @property
    def wants_engine(self) -> bool:
        """Whether a dead engine is worth starting again."""

    def engine_died(self, error: EngineDeadError) -> None:
        """React to the engine's death."""

    def engine_restarted(self) -> None:
        """React to a new start of the engine."""


class EngineWatch:
    """A watch over one engine, which starts it again as often as `restarts` allows."""

    def __init__(self, backend: Backend, restarts: Restarts, queries: Guarded) -> None:
        self.given_up = asyncio.Event()
        """Set when the engine has died and will not be started again."""
        self.num_restarts = 0
        """Number of times that it was started again."""
        self.restarting = ""
        """Description of the restart that is going on, for people."""
        self._backend = backend
        self._restarts = restarts
        self._queries = queries

    async def run(self, progress: Progress) -> None:
        """Watch the engine until it is given up, or this is cancelled."""
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
        """Return the error that the engine has died of, if it has."""
        try:
            if isinstance(self._backend, HasHealth):
                self._backend.check_health()
        except EngineDeadError as error:
            return error
        except BackendError:  # it is being started, or was closed
            pass
        except Exception as error:  # of somebody else's backend: what cannot tell is not taken to live
            log.exception("the engine's health check failed")
            return EngineDeadError(f"its health check failed: {message_of(error)}")
        return None

    async def _restart(self, error: Exception, progress: Progress) -> bool:
        while isinstance(self._backend, Startable) and self._queries.wants_engine:
            if (wait_s := self._restarts.begin(time.monotonic())) is None:
                break
            at_most = self._restarts.at_most
            self.restarting = f"the engine died; restart {self._restarts.num_begun} of at most {at_most}"
            log.error("%s, in %g s: %s", self.restarting, wait_s, error)
            try:
                await self._backend.aclose()
                await asyncio.sleep(wait_s)
                await self._backend.start(progress)
            except Exception as failure:  # whatever it is, there is no engine
                error = failure
            else:
                self.num_restarts += 1
                self.restarting = ""
                log.warning("the engine was started again")
                return True
        log.error("the engine died, and is not started again: %s", error)
        return False
