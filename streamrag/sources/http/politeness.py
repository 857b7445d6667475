"""Rate limits per host: few concurrent requests, crawl delays, and backoff when a host is busy.

    a page ─▶ its host's places in this crawl ─▶ the host's next permitted time ─▶ the crawl's fetches
                                                   (crawl delay, Retry-After)        │
                               a request ◀── its host's places, among all crawls ◀───┘

While a page waits for a permitted time, it holds nothing that pages of other hosts could use. If another crawl has used
that time when the page gets its places, the page waits for the next one.

All queries of a source share one `Hosts`, so that together they stay within a host's limits.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from streamrag.sources.http.page import HttpStatusError, PutOffError

if TYPE_CHECKING:
    from tenacity import RetryCallState

T = TypeVar("T")

MAX_ATTEMPTS = 3  # requests for one URL
BUSY = {429, 503}  # statuses that ask for a later retry
MAX_HOLD_S = 3600.0  # the longest time that one `Retry-After` keeps all crawls from its host
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 8.0  # backoff between two requests for a URL, where the server gives no time
MAX_HOSTS = 1000  # hosts to remember while no crawl uses them


class Host:
    """The limits of one host: places for concurrent requests, and the time of the next permitted request."""

    def __init__(self, num_places: int) -> None:
        self.delays_s: dict[str, float] = {}
        """Seconds between two requests, from the robots.txt of each scheme; the longest applies."""
        self.num_users = 0
        self.free_at = 0.0  # the time of the next permitted request, by the event loop's clock
        self._next = asyncio.Lock()
        self._places = asyncio.Semaphore(num_places)

    def hold(self, seconds: float) -> None:
        """Permit no request for `seconds`, at most `MAX_HOLD_S`."""
        self.free_at = max(self.free_at, asyncio.get_running_loop().time() + min(seconds, MAX_HOLD_S))

    async def until_free(self, deadline: float) -> None:
        """Wait until a request is permitted, one caller at a time. If after `deadline`, raise PutOffError at once."""
        loop = asyncio.get_running_loop()
        async with self._next:
            while (wait_s := self.free_at - loop.time()) > 0:
                if loop.time() + wait_s >= deadline:
                    raise PutOffError(f"its host permits the next request in {wait_s:.1f} s, when the crawl is over")
                await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[bool]:
        """Wait for and hold a place of the host; give whether a request is permitted now. If so, its delay begins."""
        loop = asyncio.get_running_loop()
        async with self._places:
            is_free = self.free_at <= loop.time()
            if is_free:
                self.free_at = loop.time() + max(self.delays_s.values(), default=0.0)
            yield is_free


class Hosts:
    """The limits of all hosts, shared by the crawls of one source on one event loop."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._hosts: OrderedDict[str, Host] = OrderedDict()

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Host]:
        """Give the host `name`, remembered or new, which is not evicted during the block."""
        host = self._hosts.setdefault(name, Host(self.num_places))
        self._hosts.move_to_end(name)
        self._evict()
        host.num_users += 1
        try:
            yield host
        finally:
            host.num_users -= 1

    def _evict(self) -> None:
        """Forget hosts beyond `MAX_HOSTS`, the least recently used first, unless they are in use or must wait."""
        if len(self._hosts) > MAX_HOSTS:
            now = asyncio.get_running_loop().time()
            for name, host in list(self._hosts.items())[: len(self._hosts) - MAX_HOSTS]:
                if not host.num_users and host.free_at <= now:
                    del self._hosts[name]


class CrawlTurns:
    """The order of one crawl's requests."""

    def __init__(self, hosts: Hosts, *, num_fetches: int, deadline: float) -> None:
        self._hosts = hosts
        self._fetches = asyncio.Semaphore(num_fetches)
        self._own: dict[str, asyncio.Semaphore] = {}  # this crawl's places, by host
        self._delays_s: dict[str, dict[str, float]] = {}  # by host and scheme
        self._deadline = deadline

    def set_delay(self, url: str, delay_s: float) -> None:
        """Set the crawl delay of the host of `url`. With a delay, only one page of this crawl waits for the host.

        A host has a robots.txt for http and one for https, which apply to the same machine.
        """
        parts = urlsplit(url)
        delays_s = self._delays_s.setdefault(parts.netloc, {})
        if delay_s and not any(delays_s.values()):
            self._own[parts.netloc] = asyncio.Semaphore(1)
        delays_s[parts.scheme] = delay_s

    async def ask(self, url: str, send: Callable[[], Awaitable[T]]) -> T:
        """Call `send` at the turn of `url`, up to `MAX_ATTEMPTS` times while the host is busy; return the result.

        :raises PutOffError: the host's next permitted time is after the crawl's deadline.
        """
        import tenacity  # an optional dependency

        name = urlsplit(url).netloc
        async with self._hosts.using(name) as host:
            host.delays_s |= self._delays_s.get(name, {})

            async def attempt() -> T:
                async with self._own.setdefault(name, asyncio.Semaphore(self._hosts.num_places)):
                    while True:
                        await host.until_free(self._deadline)
                        async with self._fetches, host.place() as is_free:
                            if is_free:
                                return await send()

            retrying = tenacity.AsyncRetrying(
                retry=tenacity.retry_if_exception(is_busy),
                after=lambda state: host.hold(_retry_after_s(state)),
                stop=self._is_over,
                wait=tenacity.wait_random_exponential(FIRST_WAIT_S, max=MAX_WAIT_S),
                reraise=True,
            )
            return await retrying(attempt)

    def _is_over(self, state: "RetryCallState") -> bool:
        """Whether this was the last attempt, or the next one would be after the deadline."""
        next_at = asyncio.get_running_loop().time() + max(state.upcoming_sleep, _retry_after_s(state))
        return state.attempt_number >= MAX_ATTEMPTS or next_at >= self._deadline


def _retry_after_s(state: "RetryCallState") -> float:
    """Return the seconds that the server asked to wait; 0 if it did not."""
    error = state.outcome.exception() if state.outcome else None
    return (error.retry_after_s or 0.0) if isinstance(error, HttpStatusError) else 0.0


def is_busy(error: BaseException) -> bool:
    """Whether a later retry may succeed."""
    return isinstance(error, HttpStatusError) and error.status in BUSY


def is_put_off(error: BaseException) -> bool:
    """Whether a page was not fetched because its host asks for a later request."""
    return isinstance(error, PutOffError) or is_busy(error)
