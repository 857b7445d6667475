"""One query's crawl: which pages are fetched, cleaned and followed, and what becomes of each.

    launched ──fetch, here──▶ fetched ──clean, in a worker──▶ finished ──absorb──▶ Append or Skipped; its links launched

Breadth first without a barrier: a page's links are launched when it is finished, whatever the others do. Every page is
a task from the start, at most `max_pages` of them, so nothing needs a queue with a limit.

What is left out because time, or what a page may take, ran out is a gap in what was looked at: `cut_short` says so.
What ends at a bound of the user's own (`max_depth`, `max_pages`, `max_body_bytes`), or is not there, is none.
"""

import asyncio
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, SourceEvent
from streamrag.errors import UnreachableError, UnsafeUrlError, WorkerError
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.crawl.page_reader import PageReader
from streamrag.sources.http.addresses import normalize_url
from streamrag.sources.http.fetched import CostlyPageError, NoConnectionError, UnusablePageError
from streamrag.sources.http.politeness import PutOffError, is_busy
from streamrag.sources.http.robots import DisallowedError
from streamrag.sources.pages.near_duplicates import NearDuplicates
from streamrag.sources.relevance import Passage, assemble
from streamrag.support.tasks import wait_regardless

MAX_COSTLY_PAGES = 2
"""Pages of one host that may take too much before it is given up for the rest of the crawl."""

MAX_SITEMAP_HOSTS = 5
"""Hosts whose sitemaps one crawl reads."""

MAX_WAITING = 1000
"""Links that wait for a place, should a page turn out not to be asked for."""

MAX_DISALLOWED = 100
"""Pages that robots.txt forbids and that do not count towards `max_pages`."""

MAX_REASON_CHARS = 500
"""Characters that are shown of an unexpected error."""


@dataclass(frozen=True, slots=True)
class _Target:
    url: str
    depth: int
    """Links from a start URL; 0 for those themselves."""
    is_sitemaps: bool = False
    """Whether it is no page, but all sitemaps of the host (`url` is its address without a path)."""


class Crawl:
    """One crawl. Once `absorb` has raised, only `aclose` may be called."""

    def __init__(self, options: CrawlOptions, reader: PageReader, deadline: float) -> None:
        self._options = options
        self._reader = reader
        self._deadline = deadline
        self._pages: dict[asyncio.Task[dict[str, Any]], _Target] = {}
        self._finished: asyncio.Queue[asyncio.Task[dict[str, Any]]] = asyncio.Queue()
        self._waiting: deque[_Target] = deque()  # links that `max_pages` leaves no place for
        self._visited: set[str] = set()
        self._hosts: set[str] = set()
        self._num_launched = 0
        self._num_of_host: Counter[str] = Counter()  # pages that are launched
        self._num_disallowed = 0
        self._unusable: dict[str, UnreachableError | UnsafeUrlError | None] = {}  # the start URLs, in their order
        self._may_be_unsafe = False
        self._seen: set[bytes] = set()
        self._near = NearDuplicates()
        self._num_costly: Counter[str] = Counter()  # pages, by host
        self._num_put_off = 0
        self._num_sitemaps = 0  # hosts whose sitemaps are being read
        self._unread_sitemaps: Counter[str] = Counter()  # by their host's address
        self._num_read_in_part = 0
        self._is_late = False

    def begin(self, urls: Iterable[str], *, may_be_unsafe: bool = False) -> Iterator[Skipped]:
        """Launch the start URLs. If they `may_be_unsafe`, others chose them, and unsafe ones are skipped."""
        self._may_be_unsafe = may_be_unsafe
        for url in urls:
            if self._num_launched == self._options.max_pages:
                yield Skipped(url, f"max_pages={self._options.max_pages} is less than there are start URLs")
                continue
            if self._has_enough(url):
                limit = self._options.max_pages_per_host
                yield Skipped(url, f"max_pages_per_host={limit} is less than there are start URLs of its host")
                continue
            self._unusable[url] = None
            self._hosts.add(urlsplit(url).netloc)
            self._launch(_Target(url, 0))
        if self._options.sitemaps and self._options.max_depth:
            origins = dict.fromkeys("{0.scheme}://{0.netloc}".format(urlsplit(url)) for url in self._unusable)
            for origin in list(origins)[:MAX_SITEMAP_HOSTS]:
                self._num_sitemaps += 1
                self._begin_task(_Target(origin, 0, is_sitemaps=True))

    async def next_finished(self) -> "asyncio.Task[dict[str, Any]] | None":
        """The next page in the order in which they are finished; None when there is none, or the time is over."""
        if not self._pages:
            return None
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._finished.get()
        except TimeoutError:
            return None

    def absorb(self, task: "asyncio.Task[dict[str, Any]]") -> Iterator[SourceEvent]:
        """What became of a finished page. Launches its links.

        :raises UnsafeUrlError: it is a start URL that is not allowed.
        :raises WorkerError: a worker died.
        """
        target = self._pages.pop(task)
        if target.is_sitemaps:
            yield from self._absorb_sitemaps(task, target)
        else:
            yield self._absorb_page(task, target)

    def _absorb_sitemaps(self, task: "asyncio.Task[dict[str, Any]]", target: _Target) -> Iterator[Skipped]:
        self._num_sitemaps -= 1
        waiting, self._waiting = self._waiting, deque()
        try:
            found = {} if task.cancelled() else task.result()
        except WorkerError:
            raise
        except Exception as error:  # a start page says what is wrong with its host
            found = {"problems": {target.url: f"its sitemaps cannot be read: {error}"[:MAX_REASON_CHARS]}}
        self._follow(found.get("pages", ()), 1)
        self._waiting.extend(waiting)
        self._launch_waiting()
        self._unread_sitemaps[target.url] += found.get("num_unread", 0)
        for url, problem in found.get("problems", {}).items():
            yield Skipped(url, problem)

    def _absorb_page(self, task: "asyncio.Task[dict[str, Any]]", target: _Target) -> SourceEvent:
        if task.cancelled():
            return Skipped(target.url, f"its host is given up: {MAX_COSTLY_PAGES} of its pages took too much")
        try:
            page = task.result()
        except (UnsafeUrlError, UnreachableError) as error:
            if target.depth == 0:
                if isinstance(error, UnsafeUrlError) and not self._may_be_unsafe:
                    raise
                self._unusable[target.url] = error
            return Skipped(target.url, str(error))
        except UnusablePageError as error:
            self._num_put_off += isinstance(error, PutOffError) or is_busy(error)
            if isinstance(error, DisallowedError):
                self._replace(target)
            return Skipped(target.url, str(error))
        except WorkerError:
            raise
        except Exception as error:  # whatever one page, which a stranger wrote, brings about, the others are still good
            return Skipped(target.url, f"it cannot be fetched: {type(error).__name__}: {error}"[:MAX_REASON_CHARS])
        self._num_read_in_part += bool(page["is_cut"])
        self._follow(page["links"], target.depth + 1)
        if not page["passages"]:
            return Skipped(page["url"], "nothing on it matches the query" if page["num_passages"] else "it has no text")
        passages = (Passage(tuple(headings), tuple(blocks)) for headings, blocks in page["passages"])
        text = assemble(passages, self._seen, self._near.has)
        self._near.end_page()
        if not text:
            return Skipped(page["url"], "what matches the query on it was on earlier pages")
        return Append(Chunk(text, page["url"], page["title"]), Hint(num_chunks=self._num_to_come()))

    def end(self) -> Iterator[Skipped]:
        """What is given up because the time is over.

        :raises UnreachableError: no start URL could be reached.
        """
        for target in self._pages.values():
            yield Skipped(target.url, f"not finished when crawl_timeout_s={self._options.crawl_timeout_s:g} were over")
        errors = [error for error in self._unusable.values() if error]
        if errors and len(errors) == len(self._unusable):
            if len(errors) == 1:
                raise errors[0]
            are_unsafe = all(isinstance(error, UnsafeUrlError) for error in errors)
            kind = UnsafeUrlError if are_unsafe else UnreachableError
            raise kind(f"none of the {len(errors)} start URLs can be reached; {errors[0]}") from errors[0]

    def cut_short(self) -> CutShort | None:
        """Why something that was not found may exist all the same. The words are ours: a model may be told."""
        # Where all places are taken, more addresses would not have brought more pages.
        has_place = self._num_launched < self._options.max_pages
        num_unread = sum(number for url, number in self._unread_sitemaps.items() if has_place and self._is_wanted(url))
        num_given_up = sum(num_costly >= MAX_COSTLY_PAGES for num_costly in self._num_costly.values())
        causes = {
            f"crawl_timeout_s={self._options.crawl_timeout_s:g} were over before all pages were finished": self._pages
            or self._is_late,
            f"{_count(self._num_costly.total(), 'page')} took more time or memory than a page may": self._num_costly,
            f"{_count(num_given_up, 'host')} given up because of that": num_given_up,
            f"{_count(self._num_put_off, 'page')} not fetched, because servers asked to wait": self._num_put_off,
            f"{_count(self._num_read_in_part, 'page')} too large to be read to the end": self._num_read_in_part,
            f"{_count(num_unread, 'sitemap')} not read, or not to the end": num_unread,
        }
        reasons = [cause for cause, holds in causes.items() if holds]
        return CutShort("; ".join(reasons)) if reasons else None

    async def aclose(self) -> None:
        """Stop all that is under way, and close all connections."""
        for task in self._pages:
            task.cancel()
        await wait_regardless([asyncio.create_task(self._close(), name="crawl close")])

    async def _close(self) -> None:
        await asyncio.gather(*self._pages, return_exceptions=True)
        await self._reader.aclose()

    def _num_to_come(self) -> int:
        """Pages that are under way, or wait only for sitemaps."""
        num_places = self._options.max_pages - self._num_launched
        return len(self._pages) - self._num_sitemaps + min(len(self._waiting), num_places)

    def _launch(self, target: _Target) -> None:
        self._visited.add(target.url)
        self._num_launched += 1
        self._num_of_host[urlsplit(target.url).netloc] += 1
        self._begin_task(target)

    def _begin_task(self, target: _Target) -> None:
        task = asyncio.create_task(self._visit(target), name=f"crawl {target.url}")
        self._pages[task] = target
        task.add_done_callback(self._finished.put_nowait)

    def _follow(self, links: Iterable[str], depth: int) -> None:
        if depth > self._options.max_depth:
            return
        for url in links:
            if len(self._waiting) == MAX_WAITING:
                return
            # A worker reads hostile pages: what it answers is checked like what a page says.
            if self._is_wanted(url) and url not in self._visited and normalize_url(url) == url:
                if not self._has_place():
                    self._visited.add(url)
                    self._waiting.append(_Target(url, depth))
                elif asyncio.get_running_loop().time() >= self._deadline:
                    self._is_late = True
                    return
                else:
                    self._launch(_Target(url, depth))

    def _has_place(self) -> bool:
        """Whether another page may be launched: half of the places are kept for what sitemaps say."""
        num_kept = self._options.max_pages // 2 if self._num_sitemaps else 0
        return self._num_launched < self._options.max_pages - num_kept

    def _launch_waiting(self) -> None:
        while self._waiting and self._has_place():
            waiting = self._waiting.popleft()
            if self._is_wanted(waiting.url):
                self._launch(waiting)

    def _is_wanted(self, url: str) -> bool:
        host = urlsplit(url).netloc
        is_at_home = host in self._hosts or not self._options.same_host
        return is_at_home and self._num_costly[host] < MAX_COSTLY_PAGES and not self._has_enough(url)

    def _has_enough(self, url: str) -> bool:
        limit = self._options.max_pages_per_host
        return limit is not None and self._num_of_host[urlsplit(url).netloc] >= limit

    def _replace(self, target: _Target) -> None:
        """A page was not asked for after all: the next link that waits comes in its place."""
        if self._num_disallowed == MAX_DISALLOWED:
            return
        self._num_disallowed += 1
        self._num_launched -= 1
        self._num_of_host[urlsplit(target.url).netloc] -= 1
        self._launch_waiting()

    async def _visit(self, target: _Target) -> dict[str, Any]:
        """The worker's answer for one page."""

        def check_redirect(url: str) -> None:
            if url in self._visited:
                raise UnusablePageError(f"it redirects to {url}, which is visited already")
            if target.depth == 0:  # to www.example.com, say: that is then the site
                self._hosts.add(urlsplit(url).netloc)
            elif self._options.same_host and urlsplit(url).netloc not in self._hosts:
                raise UnusablePageError(f"it redirects to another host: {url}")
            self._visited.add(url)

        try:
            if target.is_sitemaps:
                return await self._reader.find_pages(target.url)
            return await self._reader.read(target.url, check_redirect)
        except (CostlyPageError, NoConnectionError):
            self._blame(urlsplit(target.url).netloc)
            raise

    def _blame(self, host: str) -> None:
        """Note that a page of `host` took too much. After the second, nothing of it is worth waiting for."""
        self._num_costly[host] += 1
        if self._num_costly[host] == MAX_COSTLY_PAGES:
            for task, target in self._pages.items():
                if urlsplit(target.url).netloc == host and task is not asyncio.current_task():
                    task.cancel()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
