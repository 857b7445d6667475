"""Web pages as a source: crawled, cleaned and cut to what a query needs, in the order in which they arrive."""

import asyncio
import importlib.util
import os
import ssl
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import TypeAlias

import anyio
import httpcore

from streamrag.core import Progress, Skipped, SourceEvent
from streamrag.errors import (
    ConfigurationError,
    MissingDependencyError,
    SourceError,
    StreamRagError,
    UnreachableError,
    UnsafeUrlError,
)
from streamrag.sources.callers import call_for_list
from streamrag.sources.crawl.crawl import Crawl
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.crawl.page_reader import PageReader, Shared
from streamrag.sources.http.addresses import MAX_URL_CHARS, parse_start_url
from streamrag.sources.http.disk_store import DiskStore
from streamrag.sources.http.fetched import Remembered
from streamrag.sources.http.page_cache import PageCache
from streamrag.sources.http.politeness import Hosts
from streamrag.sources.http.robots import Robots
from streamrag.sources.threads import Threads
from streamrag.sources.workers.pool import WorkerPool, WorkerStartError
from streamrag.starting import started_once
from streamrag.support.messages import short
from streamrag.support.tasks import wait_regardless
from streamrag.support.temp_dirs import ScratchFolder, remove_left_behind
from streamrag.versions import __version__

StartUrls: TypeAlias = Iterable[str] | Callable[[str], Iterable[str] | Awaitable[Iterable[str]]]
"""Addresses, or a function from the query to them, such as a web search. It runs in a thread unless it is async."""

MAX_LOOKUPS = 32
"""Names that all crawls together look up at the same time. One without an answer holds a thread for 30 s."""

MAX_CALLS = 32
"""Calls of the function that gives start URLs, at the same time."""

MAX_ROBOTS = 4
"""Files robots.txt that are parsed at the same time."""

PACKAGES = ("crawl4ai", "rank_bm25", "hishel", "protego", "pypdf", "rensa", "tenacity")
PACKAGES_HERE = ("hishel", "protego", "rensa", "tenacity")
"""Those of them that are used in this process."""

INSTALL = "pip install 'streamrag[crawl]'"
SCRATCH = "crawl"


class WebSource:
    """Crawls from start URLs, breadth first, and yields the relevant part of each page as it arrives.

    Pages are fetched in this process and cleaned by crawl4ai in worker processes, which queries share fairly. Every
    page ends as an `Append` or as a `Skipped` that says why. A host of which two pages take too much is given up. A
    crawl that left something out because time or a page's limits ran out ends with a `CutShort`.

    A start URL that is not allowed is an error if it is in a list; if a function gave it, it is skipped, and an error
    only if none is left.

    urls: where to start.
    max_depth: links to follow from a start URL; 0 for only the start URLs.
    same_host: follow only links within the hosts (and ports) of the start URLs, and of where those redirect to.
    max_pages: pages to ask for in one crawl, usable or not.
    max_pages_per_host: how many of them from one host (and port).
    num_fetches: pages of one crawl that are fetched at the same time.
    num_fetches_per_host: requests to one host at the same time, for all queries.
    num_workers: processes that clean pages, for all queries.
    page_timeout_s: how long fetching a page may take, and then how long cleaning it may.
    crawl_timeout_s: when a crawl ends with what it has.
    max_body_bytes: pages that are larger, before or after decompression, are skipped.
    max_crawl_bytes: bytes of all bodies of one crawl together, as they come over the network.
    max_page_chars: the most characters of the relevant part of a page.
    max_page_cpu_s: computing time for cleaning a page. A large page takes about a second, and one that is made to be
        slow is cut before it takes more than two or three; over the limit, its worker is replaced.
    max_page_memory_bytes: what cleaning a page may take beyond the 0.2 GB that a worker has (on Linux).
    allow_private: fetch from loopback, private and other special addresses too.
    obey_robots: fetch only what a host's robots.txt allows `user_agent`, and wait between pages as long as it asks
        for. If a server fails to give it, nothing of that host is fetched. False asks for no robots.txt: what it says
        is then not known, and it is you who must have leave to fetch these pages at this rate.
    sitemaps: look for pages in the sitemaps of the start URLs' hosts too. Those whose address has words of the query
        are fetched before links for which there is no place yet; half of `max_pages` is kept free until then.
    send_traceparent: tell the sites that are crawled which trace the query belongs to, where it is traced: for sites of
        your own, which trace too. A browser tells nobody.
    user_agent: how requests identify themselves, here and in the question what robots.txt allows.
    cdp_url: a running browser's address (`http://127.0.0.1:9222`), which then fetches the pages and runs their scripts.
        The addresses of links and start URLs are checked before it is asked. Where it is redirected to is checked
        afterwards, and what it loads for a page is not: use a browser that cannot reach what it must not.
    cache_folder: where pages are kept as HTTP's rules allow, and what cleaning made of them, for later queries and
        programs. Without it nothing is kept. What a browser fetched is not.
    max_cache_bytes: how much is kept; what was used least recently goes first.

    :raises ConfigurationError: a value that cannot work.
    :raises UnsafeUrlError: a start URL that is neither http nor https.
    """

    name = "WebSource"
    """Its name for errors and schedulers; give two sources that behave differently two names."""

    def __init__(
        self,
        urls: StartUrls,
        *,
        max_depth: int = 2,
        same_host: bool = True,
        max_pages: int = 20,
        max_pages_per_host: int | None = None,
        num_fetches: int = 6,
        num_fetches_per_host: int = 4,
        num_workers: int = 2,
        page_timeout_s: float = 10.0,
        crawl_timeout_s: float = 30.0,
        max_body_bytes: int = 4 << 20,
        max_crawl_bytes: int = 64 << 20,
        max_page_chars: int = 8000,
        max_page_cpu_s: float = 4.0,
        max_page_memory_bytes: int = 512 << 20,
        allow_private: bool = False,
        obey_robots: bool = True,
        sitemaps: bool = False,
        send_traceparent: bool = False,
        user_agent: str | None = None,
        cdp_url: str | None = None,
        cache_folder: str | Path | None = None,
        max_cache_bytes: int = 256 << 20,
    ) -> None:
        self._urls = urls if callable(urls) else _parse(urls)
        if not self._urls:
            raise ConfigurationError("WebSource: there is no start URL")
        self._options = CrawlOptions(
            max_depth=max_depth,
            same_host=same_host,
            max_pages=max_pages,
            max_pages_per_host=max_pages_per_host,
            num_fetches=num_fetches,
            num_fetches_per_host=num_fetches_per_host,
            num_workers=num_workers,
            page_timeout_s=page_timeout_s,
            crawl_timeout_s=crawl_timeout_s,
            max_body_bytes=max_body_bytes,
            max_crawl_bytes=max_crawl_bytes,
            max_page_chars=max_page_chars,
            max_page_cpu_s=max_page_cpu_s,
            max_page_memory_bytes=max_page_memory_bytes,
            allow_private=allow_private,
            obey_robots=obey_robots,
            sitemaps=sitemaps,
            send_traceparent=send_traceparent,
            user_agent=user_agent or f"streamrag/{__version__}",
            cdp_url=cdp_url,
            cache_folder=None if cache_folder is None else os.path.abspath(cache_folder),
            max_cache_bytes=max_cache_bytes,
        )
        self._workers: WorkerPool | None = None
        self._ssl_context: ssl.SSLContext | None = None
        self._scratch: ScratchFolder | None = None
        self._begin()

    def _begin(self) -> None:
        """What belongs to one event loop, and is forgotten when the source is closed."""
        self._calls = Threads(MAX_CALLS, "start URLs")
        lookups = Threads(MAX_LOOKUPS, "look up a name")
        robots = Robots(self._options.user_agent, Threads(MAX_ROBOTS, "robots.txt"))
        remembered = Remembered()
        if self._options.cache_folder:
            store = DiskStore(self._options.cache_folder, self._options.max_cache_bytes)
            allow_private, user_agent = self._options.allow_private, self._options.user_agent
            remembered = PageCache(store, allow_private=allow_private, user_agent=user_agent)
        self._shared = Shared(lookups, Hosts(self._options.num_fetches_per_host), robots, remembered)

    @started_once
    async def start(self, progress: Progress) -> None:
        """Start the workers.

        :raises MissingDependencyError: crawl4ai is not installed.
        :raises ConfigurationError: `cache_folder` cannot be written to.
        :raises UnreachableError: no browser answers at `cdp_url`.
        :raises WorkerError: a worker cannot start.
        """
        for package in PACKAGES:
            if importlib.util.find_spec(package) is None:
                raise MissingDependencyError(package, INSTALL)
        self._begin()
        progress(f"starting {self._options.num_workers} crawl workers")
        try:
            for package in PACKAGES_HERE:
                await asyncio.to_thread(importlib.import_module, package)  # a tenth of a second
            if self._options.cache_folder:
                store = DiskStore(self._options.cache_folder, self._options.max_cache_bytes)
                await asyncio.to_thread(store.open)
            self._ssl_context = await asyncio.to_thread(httpcore.default_ssl_context)
            await asyncio.to_thread(anyio.run, anyio.sleep, 0)  # imports its backend: 25 ms that would stall a query
            await asyncio.to_thread(remove_left_behind, SCRATCH)
            self._scratch = ScratchFolder(SCRATCH)
            self._workers = self._new_pool(str(self._scratch.path))
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
            "max_page_cpu_s": self._options.max_page_cpu_s,
            "max_page_memory_bytes": self._options.max_page_memory_bytes,
            "cdp_url": self._options.cdp_url,
            "cache_folder": self._options.cache_folder,
            "max_cache_bytes": self._options.max_cache_bytes,
        }
        env = {
            "CRAWL4_AI_BASE_DIRECTORY": scratch,  # else it writes to ~/.crawl4ai
            "CRAWL4AI_NO_CLOUD_NOTICE": "1",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # else it downloads a price list
        }
        handler = "streamrag.sources.pages.clean:PageCleaner"
        return WorkerPool(handler, options, size=self._options.num_workers, name="crawl worker", env=env)

    async def aclose(self) -> None:
        """Stop the workers. Crawls that are under way end with an error. Does nothing when not started."""
        workers, self._workers = self._workers, None
        scratch, self._scratch, self.is_started = self._scratch, None, False
        await wait_regardless([asyncio.create_task(_release(workers, scratch), name="web source close")])

    async def stream(self, query: str) -> AsyncGenerator[SourceEvent, None]:
        """The pages of a crawl for `query`, as they arrive. `Hint.num_chunks` counts the pages under way and queued.

        Close it (`contextlib.aclosing`) if it is not read to its end: that stops what is under way.

        :raises ConfigurationError: the source is not started.
        :raises UnreachableError: no start URL can be reached.
        :raises UnsafeUrlError: a start URL is at an address that is not allowed; see `allow_private`.
        :raises WorkerError: a worker died.
        :raises SourceError: the function that gives the start URLs failed.
        """
        if not self._workers or not self._ssl_context:
            raise ConfigurationError("WebSource is not started: use it in a Pipeline, or await its start() first")
        deadline = asyncio.get_running_loop().time() + self._options.crawl_timeout_s
        reader = PageReader(query, self._options, self._workers, self._ssl_context, self._shared, deadline)
        crawl = Crawl(self._options, reader, deadline)
        try:
            urls, unusable = await self._start_urls(query, deadline)
            for skipped in (*unusable, *crawl.begin(urls, may_be_unsafe=callable(self._urls))):
                yield skipped
            while page := await crawl.next_finished():
                for event in crawl.absorb(page):
                    yield event
            for skipped in crawl.end():
                yield skipped
            if cut_short := crawl.cut_short():
                yield cut_short
        finally:
            await crawl.aclose()

    async def _start_urls(self, query: str, deadline: float) -> "tuple[Iterable[str], list[Skipped]]":
        """Where to start, and what the function gave that cannot be a start."""
        if not callable(self._urls):
            return self._urls, []
        try:
            async with asyncio.timeout_at(deadline) as timeout:
                found = await call_for_list(self._urls, query, _checked, self._calls)
        except StreamRagError:
            raise
        except Exception as error:
            what = (
                f"took longer than {self._options.crawl_timeout_s:g} s"
                if timeout.expired()
                else f"raised {short(error)}"
            )
            raise SourceError(f"the function that gives WebSource its start URLs {what}") from error
        return _usable(found)


def _checked(urls: object) -> Iterable[object]:
    if isinstance(urls, str | bytes) or not isinstance(urls, Iterable):
        raise ConfigurationError(f"WebSource: start URLs are a list, as in [{urls!r}]")
    return urls


def _parse(urls: object) -> Iterable[str]:
    return list(dict.fromkeys(parse_start_url(url) for url in _checked(urls)))


def _usable(urls: list[object]) -> tuple[list[str], list[Skipped]]:
    """The `urls` at which a page may be, and why the others are left out.

    :raises SourceError: none is left; an UnsafeUrlError if that is what they are.
    """
    usable: dict[str, None] = {}
    unusable: list[Skipped] = []
    errors: list[StreamRagError] = []
    for url in urls:
        try:
            usable[parse_start_url(url)] = None
        except (ConfigurationError, UnsafeUrlError) as error:
            errors.append(error)
            source = str(url)[:MAX_URL_CHARS].encode(errors="replace").decode()  # without lone surrogates
            unusable.append(Skipped(source, str(error)[: 2 * MAX_URL_CHARS]))
    if errors and not usable:
        kind = UnsafeUrlError if all(isinstance(error, UnsafeUrlError) for error in errors) else SourceError
        raise kind(f"none of the start URLs that WebSource's function gave can be used; {errors[0]}") from errors[0]
    return list(usable), unusable


async def _release(workers: WorkerPool | None, scratch: ScratchFolder | None) -> None:
    if workers:
        await workers.aclose()
    if scratch:
        await asyncio.to_thread(scratch.remove)
