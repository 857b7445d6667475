"""What one crawl does with one address: may it, fetch it, and have a worker clean it."""

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from streamrag.errors import UnreachableError, UnsafeUrlError
from streamrag.propagation import trace_headers
from streamrag.sources.crawl.host_sitemaps import HostSitemaps
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.http.addresses import normalize_url, resolve
from streamrag.sources.http.fetch import Fetcher
from streamrag.sources.http.fetched import (
    CostlyPageError,
    FetchLimits,
    HttpStatusError,
    Kind,
    NoConnectionError,
    Remembered,
    UnusablePageError,
    Wanted,
)
from streamrag.sources.http.politeness import CrawlTurns, Hosts, PutOffError, is_busy
from streamrag.sources.http.robots import DisallowedError, Robots
from streamrag.sources.threads import Threads
from streamrag.sources.workers.pool import (
    Share,
    WorkerJobError,
    WorkerLimitError,
    WorkerPool,
    WorkerStartError,
    WorkerTimeoutError,
)

SITEMAPS = Wanted(
    dict.fromkeys(
        (
            "application/xml",
            "text/xml",
            "application/rss+xml",
            "application/gzip",
            "application/x-gzip",
            "application/octet-stream",
            "text/plain",
        ),
        "xml",
    ),
    "application/xml, text/xml, application/gzip",
    "a sitemap",
    is_lenient=True,
)

SITEMAPS_AT_ONCE = 2
"""Of one host: pages that links lead to come beside them."""

SITEMAPS_SHARE_OF_TIME = 1 / 3
"""Of the crawl's time: then links have the places that were kept for what sitemaps say."""

MAX_LOOKUPS = 4
"""Names that one crawl looks up at the same time."""


@dataclass(frozen=True, slots=True)
class Shared:
    """What the crawls of one source have together."""

    lookups: Threads
    hosts: Hosts
    robots: Robots
    remembered: Remembered


class PageReader:
    """The connections of one crawl, and its share of the workers."""

    def __init__(
        self,
        query: str,
        options: CrawlOptions,
        workers: WorkerPool,
        ssl_context: ssl.SSLContext,
        shared: Shared,
        deadline: float,
    ) -> None:
        self._query = query
        self._options = options
        self._workers = workers
        self._robots = shared.robots if options.obey_robots else None
        self._sitemaps_until = deadline - (1 - SITEMAPS_SHARE_OF_TIME) * options.crawl_timeout_s
        self._turns = CrawlTurns(shared.hosts, num_fetches=options.num_fetches, deadline=deadline)
        limits = FetchLimits(
            page_timeout_s=options.page_timeout_s,
            connect_timeout_s=options.page_timeout_s / 2,
            max_body_bytes=options.max_body_bytes,
            max_crawl_bytes=options.max_crawl_bytes,
            allow_private=options.allow_private,
        )
        self._fetcher = Fetcher(
            limits,
            user_agent=options.user_agent,
            ssl_context=ssl_context,
            resolve=partial(resolve, threads=Threads(MAX_LOOKUPS, "look up a name", within=shared.lookups)),
            turns=self._turns,
            remembered=shared.remembered,
            more_headers=trace_headers.get() if options.send_traceparent else None,
        )
        self._share = Share()

    async def aclose(self) -> None:
        await self._fetcher.aclose()

    async def read(self, url: str, check_redirect: Callable[[str], None]) -> dict[str, Any]:
        """The worker's answer for the page.

        :raises UnreachableError: it cannot be reached.
        :raises UnsafeUrlError: it is at an address that is not allowed.
        :raises UnusablePageError: it may not be fetched, or cannot be used.
        :raises WorkerError: the worker died.
        """

        async def check(redirected_to: str) -> None:
            check_redirect(redirected_to)
            await self._check_target(redirected_to)

        if self._options.cdp_url:
            await self._fetcher.check_address(url)
        await self._check_robots(url)
        if self._options.cdp_url:
            return await self._browse(url, check_redirect)
        page = await self._fetcher.fetch(url, check)
        return await self._clean(page.url, page.kind, page.charset, page.body)

    async def find_pages(self, origin: str) -> dict[str, Any]:
        """The `pages` that a host's sitemaps name and that have words of the query in their address; `problems`, by the
        address of a sitemap; and `num_unread`: sitemaps of which more might be known if there were more time, or fewer
        limits that are not the user's.

        The sitemaps are those that its robots.txt names, or else `/sitemap.xml`. Those elsewhere are not read. They
        have a third of the crawl's time, and none is begun after the second that takes too much.
        """
        late = f"a third of crawl_timeout_s={self._options.crawl_timeout_s:g} is over"
        found = HostSitemaps(origin)
        reading: dict[asyncio.Task[tuple[dict[str, Any], bool]], str] = {}
        try:
            async with asyncio.timeout_at(self._sitemaps_until):
                if self._robots:
                    rules = await self._robots.rules(origin + "/", self._fetcher)
                    self._turns.set_delay(origin, rules.delay_s)
                    found.name(rules.sitemaps)
                while True:
                    while len(reading) < SITEMAPS_AT_ONCE and (url := found.next()):
                        reading[asyncio.create_task(self._read_sitemap(url), name=f"crawl {url}")] = url
                    if not reading:
                        break
                    done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        self._note(task, reading.pop(task), found)
        except TimeoutError:
            for url in reading.values():
                found.leave_out(url, f"it is not read: {late}")
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        if found.waiting:
            num_more = len(found.waiting) - 1
            more = f", nor are {num_more} more" if num_more else ""
            found.leave_out(found.waiting[0], f"it is not read{more}: {found.is_enough() or late}")
            found.num_unread += num_more
        return {"pages": list(found.pages), "problems": found.problems, "num_unread": found.num_unread}

    def _note(self, task: "asyncio.Task[tuple[dict[str, Any], bool]]", url: str, found: HostSitemaps) -> None:
        """What became of a sitemap.

        :raises WorkerError: the worker died.
        """
        try:
            answer, is_beginning = task.result()
        except (CostlyPageError, NoConnectionError) as error:
            found.num_costly += 1
            found.leave_out(url, str(error))
        except (UnusablePageError, UnreachableError, UnsafeUrlError) as error:
            if isinstance(error, PutOffError) or is_busy(error):
                found.leave_out(url, str(error))
            elif found.are_named or not (isinstance(error, HttpStatusError) and error.status == 404):
                found.problems[url] = str(error)
        else:
            found.add(answer)
            if is_beginning:
                limit = f"max_body_bytes={self._options.max_body_bytes}"
                found.problems[url] = f"it is larger than {limit}: only its beginning is read"
            elif answer["is_cut"]:
                found.leave_out(url, "it is damaged, or larger than what is looked at: only a part of it is read")

    async def _read_sitemap(self, url: str) -> tuple[dict[str, Any], bool]:
        """The worker's answer, and whether it had only what `max_body_bytes` allows."""

        def stay(redirected_to: str) -> None:
            if urlsplit(redirected_to).netloc != urlsplit(url).netloc:
                raise UnusablePageError(f"it redirects to another host: {redirected_to}")

        await self._check_robots(url)
        page = await self._fetcher.fetch(url, stay, SITEMAPS)
        return await self._clean(page.url, "xml", page.charset, page.body, is_cut=page.is_cut), page.is_cut

    async def _check_robots(self, url: str) -> None:
        if self._robots:
            rules = await self._robots.check(url, self._fetcher)
            self._turns.set_delay(url, rules.delay_s)

    async def _check_target(self, url: str) -> None:
        """As `_check_robots`, of a redirect's target: a page was asked for, whatever becomes of it."""
        try:
            await self._check_robots(url)
        except DisallowedError as error:
            raise UnusablePageError(str(error)) from None

    async def _browse(self, start: str, check_redirect: Callable[[str], None]) -> dict[str, Any]:
        """Let the browser fetch the page. Where it goes from there is only known afterwards."""
        answer = await self._turns.ask(start, partial(self._clean, start, "browser", "", b""))
        url = normalize_url(answer["url"])
        if url is None:
            raise UnusablePageError(f"the browser was led to {answer['url'][:100]!r}")
        if url != start:
            check_redirect(url)
            try:
                await self._fetcher.check_address(url)
                await self._check_target(url)
            except UnsafeUrlError as error:
                raise UnusablePageError(f"it redirects to {url}: {error}") from None
        return {**answer, "url": url}

    async def _clean(self, url: str, kind: Kind, charset: str, body: bytes, *, is_cut: bool = False) -> dict[str, Any]:
        choice = {"query": self._query, "max_chars": self._options.max_page_chars}
        job = {"url": url, "kind": kind, "charset": charset, "is_cut": is_cut, **choice}
        # A browser's own deadline is page_timeout_s, and it has to be read after that.
        timeout_s = self._options.page_timeout_s * (2 if kind == "browser" else 1)
        try:
            part = urlsplit(url).netloc
            return await self._workers.run(job, body, timeout_s=timeout_s, share=self._share, part=part)
        except WorkerTimeoutError:
            raise CostlyPageError(f"reading it takes longer than {timeout_s:g} s") from None
        except WorkerLimitError as error:
            limit = (
                f"max_page_memory_bytes={self._options.max_page_memory_bytes}"
                if error.what == "memory"
                else f"max_page_cpu_s={self._options.max_page_cpu_s:g}"
            )
            raise CostlyPageError(f"reading it takes more {error.what} than {limit}") from None
        except WorkerStartError:
            raise
        except WorkerJobError as error:
            if error.kind == UnreachableError.__name__:
                raise UnreachableError(f"{url} cannot be reached: {error.message}") from error
            if error.kind == UnusablePageError.__name__:
                raise UnusablePageError(error.message) from error
            raise UnusablePageError(f"it cannot be read: {error.message}") from error
