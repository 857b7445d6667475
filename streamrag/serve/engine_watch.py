"""Whether the engine lives; if not, it is started again, each time after a longer wait, and not for ever."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol, runtime_checkable

from streamrag.core import Backend, Progress, Startable
from streamrag.errors import BackendError, EngineDeadError
from streamrag.support.messages import message_of

CHECK_S = 0.5
"""Between looks at whether it lives."""

FIRST_WAIT_S = 1.0
MOST_WAIT_S = 60.0
"""Waits before the second restart, doubled before each further one, and the longest; the first comes at once."""

log = logging.getLogger("streamrag.serve")


@runtime_checkable
class HasHealth(Protocol):
    """A backend that knows whether it still works."""

    def check_health(self) -> None:
        """:raises EngineDeadError: it does not."""


class Restarts:
    """How often an engine was started again of late, and when it may be the next time.

    at_most, window_s: so often within so many seconds.
    """

    def __init__(self, at_most: int, window_s: float) -> None:
        self.at_most = at_most
        self._window_s = window_s
        self._begun_s: deque[float] = deque()

    @property
    def num_begun(self) -> int:
        """Those that count."""
        return len(self._begun_s)

    def begin(self, now_s: float) -> float | None:
        """Seconds to wait until the next, which counts from now on; None if there were too many."""
        while self._begun_s and self._begun_s[0] <= now_s - self._window_s:
            self._begun_s.popleft()
        if self.num_begun == self.at_most:
            return None
        self._begun_s.append(now_s)
        return 0.0 if self.num_begun == 1 else min(FIRST_WAIT_S * 2.0 ** (self.num_begun - 2), MOST_WAIT_S)


class EngineWatch:
    """Watches one backend.

    on_death, on_life: called when it has died, and when it has been started again.
    is_wanted: whether it is worth starting again.
    restarts: how often; starts that fail count too.
    """

    def __init__(
        self,
        backend: Backend,
        restarts: Restarts,
        *,
        on_death: Callable[[EngineDeadError], None],
        on_life: Callable[[], None],
        is_wanted: Callable[[], bool],
    ) -> None:
        self.given_up = asyncio.Event()
        """Set when it has died and will not be started again."""
        self.num_restarts = 0
        """Times that it was started again."""
        self.restarting = ""
        """What is done about its death at the moment, for people."""
        self._backend = backend
        self._restarts = restarts
        self._on_death = on_death
        self._on_life = on_life
        self._is_wanted = is_wanted

    async def run(self, progress: Progress) -> None:
        """Until it is given up, or this is cancelled."""
        while isinstance(self._backend, HasHealth):
            await asyncio.sleep(CHECK_S)
            if (error := self.death()) is None:
                continue
            self._on_death(error)
            if not await self._restart(error, progress):
                self.given_up.set()
                return
            self._on_life()

    def death(self) -> EngineDeadError | None:
        """What it has died of, if it has."""
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
        while isinstance(self._backend, Startable) and self._is_wanted():
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
