"""What one crawl does with one address: may it, fetch it, and have a worker clean it."""

import ssl
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any
from urllib.parse import urlsplit

from streamrag.errors import UnreachableError, UnsafeUrlError
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.http.addresses import normalize_url, resolve
from streamrag.sources.http.fetch import Fetcher
from streamrag.sources.http.fetched import (
    CostlyPageError,
    FetchLimits,
    HttpStatusError,
    Kind,
    Remembered,
    UnusablePageError,
    Wanted,
)
from streamrag.sources.http.politeness import CrawlTurns, Hosts
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

MAX_SITEMAPS = 10
"""Files that one crawl reads of one host's sitemaps."""

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
        """The `pages` that a host's sitemaps name and that have words of the query in their address, and `problems`.

        The sitemaps are those that its robots.txt names, or else `/sitemap.xml`. Those elsewhere are not read.
        """
        named: tuple[str, ...] = ()
        if self._robots:
            rules = await self._robots.rules(origin + "/", self._fetcher)
            self._turns.set_delay(urlsplit(origin).netloc, rules.delay_s)
            named = rules.sitemaps
        waiting = [url for each in named if (url := normalize_url(each)) and url.startswith(origin + "/")]
        if not waiting:
            waiting = [f"{origin}/sitemap.xml"]
        known = set(waiting)
        pages: dict[str, None] = {}
        problems: dict[str, str] = {}
        for _ in range(MAX_SITEMAPS):
            if not waiting:
                break
            url = waiting.pop(0)
            try:
                answer = await self._read_sitemap(url)
            except HttpStatusError as error:
                if named or error.status != 404:
                    problems[url] = str(error)
                continue
            except UnusablePageError as error:
                problems[url] = str(error)
                continue
            pages |= dict.fromkeys(answer["pages"])
            # A worker reads hostile files: what it answers is checked like what they say.
            more = (each for each in answer["sitemaps"] if normalize_url(each) == each)
            more_here = [each for each in more if each.startswith(origin + "/") and each not in known]
            waiting += more_here
            known.update(more_here)
        return {"pages": list(pages), "problems": problems}

    async def _read_sitemap(self, url: str) -> dict[str, Any]:
        def stay(redirected_to: str) -> None:
            if urlsplit(redirected_to).netloc != urlsplit(url).netloc:
                raise UnusablePageError(f"it redirects to another host: {redirected_to}")

        await self._check_robots(url)
        page = await self._fetcher.fetch(url, stay, SITEMAPS)
        return await self._clean(page.url, "xml", page.charset, page.body)

    async def _check_robots(self, url: str) -> None:
        if self._robots:
            rules = await self._robots.check(url, self._fetcher)
            self._turns.set_delay(urlsplit(url).netloc, rules.delay_s)

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

    async def _clean(self, url: str, kind: Kind, charset: str, body: bytes) -> dict[str, Any]:
        choice = {"query": self._query, "max_chars": self._options.max_page_chars}
        job = {"url": url, "kind": kind, "charset": charset, **choice}
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
