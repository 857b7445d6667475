"""The fetching of one URL for a crawl: check permission, fetch, and have a worker clean the page."""

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeAlias, TypeVar
from urllib.parse import urlsplit

from pydantic import TypeAdapter, ValidationError

from streamrag.errors import UnreachableError, UnsafeUrlError
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.documents.reader import UnreadableError
from streamrag.sources.http.fetch import Fetcher
from streamrag.sources.http.page import ContentRules, CostlyPageError, DisallowedError, Page, UnusablePageError
from streamrag.sources.http.page_cache import PageCache
from streamrag.sources.http.politeness import CrawlTurns, Hosts
from streamrag.sources.http.robots import Robots
from streamrag.sources.http.ssrf_guard import resolve
from streamrag.sources.http.urls import normalize_url
from streamrag.sources.pages.page_content import PAGE_ANSWER, SITEMAP_ANSWER, CleanedPage, SitemapUrls
from streamrag.sources.threads import Threads
from streamrag.sources.workers.pool import (
    Share,
    WorkerJobError,
    WorkerLimitError,
    WorkerPool,
    WorkerStartError,
    WorkerTimeoutError,
)
from streamrag.trace_context import trace_headers

SITEMAPS = ContentRules(None, "application/xml, text/xml, application/gzip", is_lenient=True)
"""Any media type: the content decides whether it is a sitemap."""

MAX_LOOKUPS = 4  # names that one crawl resolves concurrently

SitemapAnswer: TypeAlias = tuple[SitemapUrls, int | None]
"""A worker's answer, and `max_body_bytes` if the sitemap was truncated there."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SharedState:
    """State shared by the crawls of one source."""

    lookups: Threads
    hosts: Hosts
    robots: Robots
    cache: PageCache | None


@dataclass(eq=False)
class PageFetcher:
    """A fetcher with the connections of one crawl, and its share of the workers."""

    query: str
    options: CrawlOptions
    workers: WorkerPool
    ssl_context: ssl.SSLContext
    shared: SharedState
    deadline: float

    def __post_init__(self) -> None:
        options, shared = self.options, self.shared
        self._robots = shared.robots if options.obey_robots else None
        self._turns = CrawlTurns(shared.hosts, num_fetches=options.num_fetches, deadline=self.deadline)
        self._fetcher = Fetcher(
            page_timeout_s=options.page_timeout_s,
            connect_timeout_s=options.page_timeout_s / 2,
            max_body_bytes=options.max_body_bytes,
            max_crawl_bytes=options.max_crawl_bytes,
            allow_private=options.allow_private,
            user_agent=options.user_agent,
            ssl_context=self.ssl_context,
            resolve=partial(resolve, threads=Threads(MAX_LOOKUPS, "look up a name", within=shared.lookups)),
            turns=self._turns,
            cache=shared.cache,
            more_headers=trace_headers.get() if options.send_traceparent else None,
        )
        self._share = Share()

    async def aclose(self) -> None:
        await self._fetcher.aclose()

    async def fetch(self, url: str, check_redirect: Callable[[str], None]) -> CleanedPage:
        """Fetch `url` with HTTP, or the browser at `cdp_url`, and return a worker's answer for the page.

        Unless ignored, robots.txt must allow `url` and all targets of redirects; `check_redirect` may also reject one.

        :raises UnreachableError: the page cannot be reached.
        :raises UnsafeUrlError: the page is at an address that is not allowed.
        :raises UnusablePageError: the page may not be fetched, or cannot be used.
        :raises WorkerError: the worker died.
        """
        if self.options.cdp_url:
            return await self._browse(url, check_redirect)

        async def check(redirected_to: str) -> None:
            check_redirect(redirected_to)
            await self._check_robots_of_target(redirected_to)

        await self._check_robots(url)
        return await self._clean(PAGE_ANSWER, await self._fetcher.fetch(url, check))

    async def named_sitemaps(self, origin: str) -> Sequence[str]:
        """Return the URLs of sitemaps that robots.txt lists, none if it is ignored. Sets the host's crawl delay."""
        if not self._robots:
            return ()
        rules = await self._robots.rules(origin + "/", self._fetcher)
        self._turns.set_delay(origin, rules.delay_s)
        return rules.sitemaps

    async def fetch_sitemap(self, url: str) -> SitemapAnswer:
        """Return a worker's answer for a sitemap, and `max_body_bytes` if it ends there, else None. Raises as `fetch`.

        A redirect to another host is an UnusablePageError.
        """

        def check(redirected_to: str) -> None:
            if urlsplit(redirected_to).netloc != urlsplit(url).netloc:
                raise UnusablePageError(f"it redirects to another host: {redirected_to}")

        await self._check_robots(url)
        page = replace(await self._fetcher.fetch(url, check, SITEMAPS), kind="xml")
        return await self._clean(SITEMAP_ANSWER, page), self.options.max_body_bytes if page.is_cut else None

    async def _check_robots(self, url: str) -> None:
        """Set the host's crawl delay. Raises DisallowedError if robots.txt, unless ignored, disallows `url`."""
        if self._robots:
            rules = await self._robots.check(url, self._fetcher)
            self._turns.set_delay(url, rules.delay_s)

    async def _check_robots_of_target(self, url: str) -> None:
        """Raise UnusablePageError, not DisallowedError, if a redirect's target is disallowed: it keeps its place."""
        try:
            await self._check_robots(url)
        except DisallowedError as error:
            raise UnusablePageError(str(error)) from None

    async def _browse(self, start: str, check_redirect: Callable[[str], None]) -> CleanedPage:
        """Have a worker's browser read the page at its host's turn, check its last URL, and return the answer.

        Raises as `fetch` does; a redirect to an address that is not allowed is an UnusablePageError.
        """
        await self._fetcher.check_address(start)
        await self._check_robots(start)
        page = await self._turns.ask(start, partial(self._clean, PAGE_ANSWER, Page(start, "browser", "", b"")))
        url = normalize_url(page.url)
        if url is None:
            raise UnusablePageError(f"the browser was redirected to {page.url[:100]!r}")
        if url != start:
            check_redirect(url)
            try:
                await self._fetcher.check_address(url)
                await self._check_robots_of_target(url)
            except UnsafeUrlError as error:
                raise UnusablePageError(f"it redirects to {url}: {error}") from None
        return replace(page, url=url)

    async def _clean(self, answer: TypeAdapter[T], page: Page) -> T:
        """Have a worker clean the page, and return its valid answer.

        Exceeded time, memory or CPU is a CostlyPageError, an invalid answer an UnusablePageError, and another failed
        job an UnusablePageError or UnreachableError.
        """
        options = self.options
        job = {"url": page.url, "kind": page.kind, "charset": page.charset, "is_cut": page.is_cut}
        job |= {"refresh": page.refresh}
        job |= {"query": self.query, "max_chars": options.max_page_chars}
        # A browser may take page_timeout_s to fetch the page, before the worker reads it.
        timeout_s = options.page_timeout_s * (2 if page.kind == "browser" else 1)
        try:
            part = urlsplit(page.url).netloc
            fields = await self.workers.run(job, page.body, timeout_s=timeout_s, share=self._share, part=part)
            return answer.validate_python(fields)
        except ValidationError as error:
            raise UnusablePageError("it cannot be read: its worker's answer is invalid") from error
        except WorkerTimeoutError:
            raise CostlyPageError(f"reading it takes longer than {timeout_s:g} s") from None
        except WorkerLimitError as error:
            memory, cpu = options.max_page_memory_bytes, options.max_page_cpu_s
            limit = f"max_page_memory_bytes={memory}" if error.what == "memory" else f"max_page_cpu_s={cpu:g}"
            raise CostlyPageError(f"reading it takes more {error.what} than {limit}") from None
        except WorkerStartError:
            raise
        except WorkerJobError as error:
            if error.kind == UnreachableError.__name__:
                raise UnreachableError(f"{page.url} cannot be reached: {error.message}") from error
            if error.kind in (UnusablePageError.__name__, UnreadableError.__name__):
                raise UnusablePageError(error.message) from error
            raise UnusablePageError(f"it cannot be read: {error.message}") from error
