"""Web pages as a source: crawled, cleaned and cut to what a query needs, in the order in which they arrive."""

import asyncio
import importlib.util
import inspect
import re
import shutil
import ssl
import tempfile
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from typing import TypeAlias

import anyio
import httpcore

import streamrag
from streamrag.core import Progress, SourceEvent
from streamrag.errors import (
    ConfigurationError,
    MissingDependencyError,
    SourceError,
    StreamRagError,
    UnreachableError,
)
from streamrag.sources.addresses import parse_start_url
from streamrag.sources.crawl import Crawl, CrawlOptions
from streamrag.sources.workers import WorkerPool, WorkerStartError
from streamrag.tasks import wait_regardless

__all__ = ["StartUrls", "WebSource"]

StartUrls: TypeAlias = Iterable[str] | Callable[[str], Iterable[str] | Awaitable[Iterable[str]]]
"""Addresses, or a function from the query to them, such as a web search. It runs in a thread unless it is async."""

INSTALL = "pip install 'streamrag[crawl]'"


class WebSource:
    """Crawls from start URLs, breadth first, and yields the relevant part of each page as it arrives.

    Pages are fetched in this process and cleaned by crawl4ai in worker processes. Every page ends as an `Append` or as
    a `Skipped` that says why.

    urls: where to start.
    max_depth: links to follow from a start URL; 0 for only the start URLs.
    same_host: follow only links within the hosts (and ports) of the start URLs, and of where those redirect to.
    max_pages: pages to ask for in one crawl, usable or not.
    num_fetches: pages of one crawl that are fetched at the same time.
    num_workers: processes that clean pages, for all queries.
    page_timeout_s: how long fetching a page may take, and then how long cleaning it may.
    crawl_timeout_s: when a crawl ends with what it has.
    max_body_bytes: pages that are larger after decompression are skipped.
    max_page_chars: of the relevant part of a page.
    allow_private: fetch from loopback, private and other special addresses too.
    user_agent: how requests identify themselves.
    cdp_url: a running browser's address (`http://127.0.0.1:9222`), which then fetches the pages and runs their scripts.
        The addresses of links and start URLs are checked before it is asked. Where it is redirected to is checked
        afterwards, and what it loads for a page is not: use a browser that cannot reach what it must not.

    :raises ConfigurationError: a value that cannot work.
    :raises UnsafeUrlError: a start URL that is neither http nor https.
    """

    name = "WebSource"
    """What errors and schedulers call it; give two that behave differently two names."""

    def __init__(
        self,
        urls: StartUrls,
        *,
        max_depth: int = 2,
        same_host: bool = True,
        max_pages: int = 20,
        num_fetches: int = 6,
        num_workers: int = 2,
        page_timeout_s: float = 10.0,
        crawl_timeout_s: float = 30.0,
        max_body_bytes: int = 4 << 20,
        max_page_chars: int = 8000,
        allow_private: bool = False,
        user_agent: str | None = None,
        cdp_url: str | None = None,
    ) -> None:
        self._urls = urls if callable(urls) else _parse(urls)
        if not self._urls:
            raise ConfigurationError("WebSource: there is no start URL")
        self._options = CrawlOptions(
            max_depth=max_depth,
            same_host=same_host,
            max_pages=max_pages,
            num_fetches=num_fetches,
            page_timeout_s=page_timeout_s,
            crawl_timeout_s=crawl_timeout_s,
            max_body_bytes=max_body_bytes,
            max_page_chars=max_page_chars,
            allow_private=allow_private,
            user_agent=user_agent or f"streamrag/{streamrag.__version__}",
            cdp_url=cdp_url,
        )
        self._num_workers = num_workers
        self._check_options()
        self._workers: WorkerPool | None = None
        self._ssl_context: ssl.SSLContext | None = None
        self._scratch: str | None = None

    def _check_options(self) -> None:
        options = self._options
        least: Mapping[str, tuple[object, int]] = {
            "max_depth": (options.max_depth, 0),
            "max_pages": (options.max_pages, 1),
            "num_fetches": (options.num_fetches, 1),
            "num_workers": (self._num_workers, 1),
            "max_body_bytes": (options.max_body_bytes, 1),
            "max_page_chars": (options.max_page_chars, 1),
        }
        for name, (value, minimum) in least.items():
            if type(value) is not int or value < minimum:
                raise ConfigurationError(f"WebSource: {name}={value!r} must be a whole number, at least {minimum}")
        for name, seconds in {
            "page_timeout_s": options.page_timeout_s,
            "crawl_timeout_s": options.crawl_timeout_s,
        }.items():
            if type(seconds) not in (int, float) or not 0 < seconds < float("inf"):
                raise ConfigurationError(f"WebSource: {name}={seconds!r} must be a number of seconds over 0")
        if not re.fullmatch(r"[ -~]+", options.user_agent):
            raise ConfigurationError(f"WebSource: user_agent={options.user_agent!r} must be printable ASCII")
        if options.cdp_url is not None and not re.match(r"(http|ws)s?://[^/]", options.cdp_url):
            raise ConfigurationError(
                f"WebSource: cdp_url={options.cdp_url!r} must be the address of a browser's remote debugging port, "
                "such as http://127.0.0.1:9222"
            )

    async def start(self, progress: Progress) -> None:
        """Start the workers.

        :raises MissingDependencyError: crawl4ai is not installed.
        :raises UnreachableError: no browser answers at `cdp_url`.
        :raises WorkerError: a worker cannot start.
        """
        if self._workers:
            return
        for package in ("crawl4ai", "rank_bm25"):
            if importlib.util.find_spec(package) is None:
                raise MissingDependencyError(package, INSTALL)
        progress(f"starting {self._num_workers} crawl workers")
        try:
            self._ssl_context = await asyncio.to_thread(httpcore.default_ssl_context)
            await asyncio.to_thread(anyio.run, anyio.sleep, 0)  # imports its backend: 25 ms that would stall a query
            self._scratch = await asyncio.to_thread(tempfile.mkdtemp, prefix="streamrag-crawl-")
            self._workers = self._new_pool(self._scratch)
            await self._workers.start()
        except BaseException as error:
            await self.aclose()
            if self._options.cdp_url and isinstance(error, WorkerStartError):
                raise UnreachableError(
                    f"no browser answers at cdp_url={self._options.cdp_url!r}; start one with "
                    f"--remote-debugging-port, or leave cdp_url out ({error.message.splitlines()[0]})"
                ) from error
            raise
        progress("crawl workers are ready")

    def _new_pool(self, scratch: str) -> WorkerPool:
        options = {
            "scratch": scratch,
            "user_agent": self._options.user_agent,
            "page_timeout_s": self._options.page_timeout_s,
            "cdp_url": self._options.cdp_url,
        }
        env = {
            "CRAWL4_AI_BASE_DIRECTORY": scratch,  # else it writes to ~/.crawl4ai
            "CRAWL4AI_NO_CLOUD_NOTICE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it downloads a price list
        }
        handler = "streamrag.sources.clean:PageCleaner"
        return WorkerPool(handler, options, size=self._num_workers, name="crawl worker", env=env)

    async def aclose(self) -> None:
        """Stop the workers. Crawls that are under way end with an error. Does nothing when not started."""
        workers, self._workers = self._workers, None
        scratch, self._scratch = self._scratch, None
        await wait_regardless([asyncio.create_task(_release(workers, scratch), name="web source close")])

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """The pages of a crawl for `query`, as they arrive. `Hint.num_chunks` counts the pages under way.

        Close it (`contextlib.aclosing`) if it is not read to its end: that stops what is under way.

        :raises ConfigurationError: the source is not started.
        :raises UnreachableError: no start URL can be reached.
        :raises UnsafeUrlError: a start URL is at an address that is not allowed; see `allow_private`.
        :raises WorkerError: a worker died.
        :raises SourceError: the function that gives the start URLs failed.
        """
        if not self._workers or not self._ssl_context:
            raise ConfigurationError("WebSource is not started: use it in a Pipeline, or await its start() first")
        crawl = Crawl(query, self._options, self._workers, self._ssl_context)
        try:
            for skipped in crawl.begin(await self._start_urls(query, crawl.deadline)):
                yield skipped
            while page := await crawl.next_finished():
                yield crawl.absorb(page)
            for skipped in crawl.end():
                yield skipped
        finally:
            await crawl.aclose()

    async def _start_urls(self, query: str, deadline: float) -> Iterable[str]:
        if not callable(self._urls):
            return self._urls
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                is_async = inspect.iscoroutinefunction(self._urls)
                found = self._urls(query) if is_async else await asyncio.to_thread(self._urls, query)
                return _parse(await found if inspect.isawaitable(found) else found)
        except StreamRagError:
            raise
        except Exception as error:
            what = f"took longer than {self._options.crawl_timeout_s:g} s" if timeout.expired() else f"raised {error!r}"
            raise SourceError(f"the function that gives WebSource its start URLs {what}") from error


def _parse(urls: object) -> Iterable[str]:
    if isinstance(urls, str | bytes) or not isinstance(urls, Iterable):
        raise ConfigurationError(f"WebSource: start URLs are a list, as in [{urls!r}]")
    return list(dict.fromkeys(parse_start_url(url) for url in urls))


async def _release(workers: WorkerPool | None, scratch: str | None) -> None:
    if workers:
        await workers.aclose()
    if scratch:
        await asyncio.to_thread(shutil.rmtree, scratch, ignore_errors=True)
