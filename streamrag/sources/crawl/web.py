"""Web pages as a source: crawled, cleaned and reduced to their passages relevant to the query."""

import asyncio
import os
import ssl
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack
from dataclasses import replace

import anyio
import httpcore
from pydantic import InstanceOf

from streamrag.core import Progress, SourceEvent
from streamrag.core.lifecycle import started_once
from streamrag.errors import ConfigurationError, UnreachableError, require_modules
from streamrag.sources.crawl.crawl import Crawl
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.crawl.page_fetcher import PageFetcher, SharedState
from streamrag.sources.crawl.start_urls import StartUrlList, StartUrls
from streamrag.sources.documents.reader import crawl4ai_env
from streamrag.sources.http.disk_store import DiskStore
from streamrag.sources.http.page_cache import PageCache
from streamrag.sources.http.politeness import Hosts
from streamrag.sources.http.robots import Robots
from streamrag.sources.threads import Threads
from streamrag.sources.workers.pool import WorkerPool, WorkerStartError
from streamrag.support.tasks import run_shielded
from streamrag.support.temp_dirs import ScratchFolder, remove_left_behind
from streamrag.support.validation import validated

NUM_FETCHES_PER_HOST = 4  # concurrent requests to one host, for all queries; a crawler's usual courtesy
MAX_LOOKUPS = 32  # names that all crawls together resolve concurrently; an unanswered one holds a thread for 30 s
MAX_ROBOTS = 4  # robots.txt files that are parsed concurrently
PACKAGES = ("crawl4ai", "hishel", "protego", "pypdf", "rensa", "tenacity", "trafilatura", "webencodings")
SCRATCH = "crawl"

CLEANER = "streamrag.sources.pages.page_worker:PageCleaner"
CLEANER_OPTIONS = ["user_agent", "page_timeout_s", "max_page_cpu_s", "max_page_memory_bytes", "cdp_url", "cache_folder"]


class WebSource:
    """A source that crawls from start URLs, breadth first, and yields the relevant part of each page as it arrives.

    Pages are fetched in this process and cleaned by crawl4ai in worker processes, which queries share fairly. Each page
    becomes an `Append`, or a `Skipped` with the reason. A host is abandoned after two pages that exceed their time or
    memory. A crawl that omitted pages because time or a page's resource limits ran out ends with a `CutShort`.

    A disallowed start URL in a list is an error. If a function returned it, it is skipped, and an error is raised only
    if no start URL remains.

    urls: start URLs, or a function from the query to them. If it returns none, nothing was found, which is no error.
    options: the bounds and manners of the crawl.

    :raises ConfigurationError: an invalid value.
    :raises UnsafeUrlError: a start URL that is neither http nor https.
    """

    name = "WebSource"
    """The name in errors and for schedulers; give sources that behave differently different names."""

    @validated
    def __init__(self, urls: StartUrls, options: InstanceOf[CrawlOptions] | None = None) -> None:
        options = options or CrawlOptions()
        if options.cache_folder is not None:
            options = replace(options, cache_folder=os.path.abspath(options.cache_folder))
        self._urls = StartUrlList(urls)
        self._options = options
        self._workers: WorkerPool | None = None
        self._ssl_context: ssl.SSLContext | None = None
        self._resources = AsyncExitStack()
        self._shared = self._new_state()

    def _new_state(self) -> SharedState:
        """Return new state for one start: threads for lookups, limits of hosts, robots.txt rules, any page cache."""
        options = self._options
        cache = None
        if options.cache_folder:
            store = DiskStore(options.cache_folder)
            cache = PageCache(store, allow_private=options.allow_private, user_agent=options.user_agent)
        lookups = Threads(MAX_LOOKUPS, "look up a name")
        robots = Robots(options.user_agent, Threads(MAX_ROBOTS, "robots.txt"))
        return SharedState(lookups, Hosts(NUM_FETCHES_PER_HOST), robots, cache)

    @started_once
    async def start(self, progress: Progress) -> None:
        """Start the worker processes, and wait until they are ready. On failure, close everything again.

        :raises AlreadyStartedError: the source is started.
        :raises MissingDependencyError: crawl4ai is not installed.
        :raises ConfigurationError: `cache_folder` cannot be written to.
        :raises UnreachableError: no browser responds at `cdp_url`.
        :raises WorkerError: a worker cannot start.
        """
        require_modules("crawl", *PACKAGES)
        self._shared = self._new_state()
        progress(f"starting {self._options.num_workers} crawl workers")
        try:
            self._ssl_context = await asyncio.to_thread(self._prepare)
            scratch = ScratchFolder(SCRATCH)
            self._resources.push_async_callback(asyncio.to_thread, scratch.remove)
            options = {name: getattr(self._options, name) for name in CLEANER_OPTIONS}
            size = self._options.num_workers
            self._workers = WorkerPool(CLEANER, options, size=size, name="crawl worker", env=crawl4ai_env(scratch.path))
            self._resources.push_async_callback(self._workers.aclose)
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

    def _prepare(self) -> ssl.SSLContext:
        """Import packages, open the cache folder, remove abandoned scratch folders; return the SSL context. Blocks."""
        import hishel  # noqa: F401
        import protego  # noqa: F401
        import rensa  # noqa: F401
        import tenacity  # noqa: F401

        anyio.run(anyio.sleep, 0)  # imports anyio's backend
        if self._options.cache_folder:
            DiskStore(self._options.cache_folder).open()
        remove_left_behind(SCRATCH)
        return httpcore.default_ssl_context()

    async def aclose(self) -> None:
        """Stop the worker processes. Running crawls end with an error. Does nothing if not started."""
        resources, self._resources = self._resources, AsyncExitStack()
        self._workers, self.is_started = None, False
        await run_shielded(resources.aclose(), "web source close")

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """Crawl for `query`; yield an Append or a Skipped for each page as it arrives, and any CutShort at the end.

        `Hint.num_chunks` counts the pages to come. Close the generator (`contextlib.aclosing`) to stop the crawl early.

        :raises ConfigurationError: the source is not started.
        :raises UnreachableError: no start URL can be reached.
        :raises UnsafeUrlError: a start URL is at an address that is not allowed; see `allow_private`.
        :raises WorkerError: a worker died.
        :raises SourceError: the function for the start URLs failed.
        """
        if not self._workers or not self._ssl_context:
            raise ConfigurationError("WebSource is not started: use it in a Pipeline, or await its start() first")
        deadline = asyncio.get_running_loop().time() + self._options.crawl_timeout_s
        pages = PageFetcher(query, self._options, self._workers, self._ssl_context, self._shared, deadline)
        crawl = Crawl(self._options, pages, deadline)
        try:
            urls, unusable = await self._urls.find(query, self._options.crawl_timeout_s)
            for skipped in (*unusable, *crawl.begin(urls, may_be_unsafe=self._urls.may_be_unsafe)):
                yield skipped
            while visit := await crawl.next_finished():
                for event in crawl.absorb(visit):
                    yield event
            for skipped in crawl.end():
                yield skipped
            if cut_short := crawl.cut_short():
                yield cut_short
        finally:
            await crawl.aclose()
