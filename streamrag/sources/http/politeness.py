"""Politeness to hosts: few requests at a time, as seldom as a host wants, and not again at once.

    a page ─▶ its host's places in this crawl ─▶ when its host may be asked ─▶ the crawl's fetches
                                                   (crawl delay, Retry-After)        │
                               a request ◀── its host's places, among all crawls ◀───┘

While a page waits for a time, it takes nothing that pages of other hosts could use. If another crawl has asked when a
page has its places, that page waits for the next time.

A `Hosts` is for a source's life, so that queries together ask no more of a host than one may.
"""

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar
from urllib.parse import urlsplit

from streamrag.sources.http.page_errors import HttpStatusError, PutOffError

if TYPE_CHECKING:
    from tenacity import AsyncRetrying, RetryCallState

T = TypeVar("T")

MAX_ATTEMPTS = 3  # requests for one address
BUSY = {429, 503}  # answers that mean: not now
MAX_HOLD_S = 3600.0  # the longest that one answer's `Retry-After` keeps all crawls from its host
FIRST_WAIT_S, MAX_WAIT_S = 0.5, 8.0  # between two requests for an address, where the server names no time
MAX_HOSTS = 1000  # hosts that are remembered while no crawl asks them


class Host:
    """The limits of one host."""

    def __init__(self, num_places: int) -> None:
        self.delays_s: dict[str, float] = {}
        """Seconds from one request to the next, as its robots.txt for each scheme asks for: the longest holds."""
        self.num_users = 0
        self.free_at = 0.0
        """Time at which it may be asked next, by the event loop's clock."""
        self._next = asyncio.Lock()
        self._places = asyncio.Semaphore(num_places)

    def hold(self, seconds: float) -> None:
        """Ask it nothing for so long."""
        self.free_at = max(self.free_at, asyncio.get_running_loop().time() + min(seconds, MAX_HOLD_S))

    async def until_free(self, deadline: float) -> None:
        """Wait for the time at which it may be asked, one after the other.

        :raises PutOffError: that is behind `deadline`.
        """
        loop = asyncio.get_running_loop()
        async with self._next:
            while (wait_s := self.free_at - loop.time()) > 0:
                if loop.time() + wait_s >= deadline:
                    raise PutOffError(f"its host wants to be left alone for {wait_s:.1f} s, and the crawl ends before")
                await asyncio.sleep(wait_s)

    @asynccontextmanager
    async def place(self) -> AsyncIterator[bool]:
        """Take one of its places, and give whether it may be asked now: others may have asked meanwhile."""
        loop = asyncio.get_running_loop()
        async with self._places:
            is_free = self.free_at <= loop.time()
            if is_free:
                self.free_at = loop.time() + max(self.delays_s.values(), default=0.0)
            yield is_free


class Hosts:
    """The hosts that the crawls of one source ask. Belongs to one event loop."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._hosts: OrderedDict[str, Host] = OrderedDict()

    @asynccontextmanager
    async def using(self, name: str) -> AsyncIterator[Host]:
        """Give the host of this name, which is not forgotten meanwhile."""
        host = self._hosts.setdefault(name, Host(self.num_places))
        self._hosts.move_to_end(name)
        self._forget()
        host.num_users += 1
        try:
            yield host
        finally:
            host.num_users -= 1

    def _forget(self) -> None:
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
        self._own: dict[str, asyncio.Semaphore] = {}
        self._delays_s: dict[str, dict[str, float]] = {}  # by host and scheme
        self._deadline = deadline

    def set_delay(self, url: str, delay_s: float) -> None:
        """Ask the host of `url` no more often. While this crawl waits for it, it waits with one page only.

        A host has a robots.txt for http and one for https, and it is one machine that they speak for.
        """
        parts = urlsplit(url)
        delays_s = self._delays_s.setdefault(parts.netloc, {})
        if delay_s and not any(delays_s.values()):
            self._own[parts.netloc] = asyncio.Semaphore(1)
        delays_s[parts.scheme] = delay_s

    async def ask(self, url: str, send: Callable[[], Awaitable[T]]) -> T:
        """Return what `send` returns, when it is the turn of `url`; again later while the host is too busy.

        :raises PutOffError: the host wants to be asked when the crawl is over.
        """
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

            return await self._retrying(host)(attempt)

    def _retrying(self, host: Host) -> "AsyncRetrying":
        import tenacity  # no part of a plain installation

        return tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(is_busy),
            after=lambda state: host.hold(_retry_after_s(state)),
            stop=self._is_over,
            wait=tenacity.wait_random_exponential(FIRST_WAIT_S, max=MAX_WAIT_S),
            reraise=True,
        )

    def _is_over(self, state: "RetryCallState") -> bool:
        """Whether it was the last attempt, or the next one would come too late."""
        next_at = asyncio.get_running_loop().time() + max(state.upcoming_sleep, _retry_after_s(state))
        return state.attempt_number >= MAX_ATTEMPTS or next_at >= self._deadline


def _retry_after_s(state: "RetryCallState") -> float:
    error = state.outcome.exception() if state.outcome else None
    return (error.retry_after_s or 0.0) if isinstance(error, HttpStatusError) else 0.0


def is_busy(error: BaseException) -> bool:
    """Whether a host may answer if it is asked later."""
    return isinstance(error, HttpStatusError) and error.status in BUSY


def is_put_off(error: BaseException) -> bool:
    """Whether a page was not fetched because its host wants to be asked later."""
    return isinstance(error, PutOffError) or is_busy(error)
