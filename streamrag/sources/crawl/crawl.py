"""A crawl for one query: the pages that are fetched, cleaned and followed, and what becomes of each.

    launched ──fetch, here──▶ fetched ──clean, in a worker──▶ finished ──absorb──▶ Append or Skipped; its links launched

Breadth first without a barrier: a page's links are launched when it is finished, whatever the others do. Every page is
a task from the start, at most `max_pages` of them, so nothing needs a queue with a limit.

What is left out because time, or what a page may take, ran out is a gap in what was looked at: `cut_short` says so.
What ends at a bound of the user's own (`max_depth`, `max_pages`, `max_body_bytes`), or is not there, is none.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias
from urllib.parse import urlsplit

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, SourceEvent
from streamrag.errors import UnreachableError, UnsafeUrlError, WorkerError
from streamrag.query.relevance import Passage
from streamrag.sources.crawl.frontier import MAX_COSTLY_PAGES, Frontier, Target
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.crawl.page_reader import PageReader
from streamrag.sources.crawl.sitemaps import HostSitemaps
from streamrag.sources.http.page_errors import COSTLY_ERRORS, DisallowedError, UnusablePageError
from streamrag.sources.http.politeness import is_put_off
from streamrag.sources.pages.near_duplicates import NearDuplicates
from streamrag.sources.pages.relevant_passages import assemble
from streamrag.support.tasks import wait_regardless

MAX_SITEMAP_HOSTS = 5  # hosts whose sitemaps one crawl reads
MAX_REASON_CHARS = 500  # of an unexpected error

SITEMAPS_SHARE_OF_TIME = 1 / 3
"""Share of the crawl's time for sitemaps: then links have the places that were kept for what sitemaps say."""

_Visit: TypeAlias = asyncio.Task[Any]
"""A task that gives a worker's answer, or a `HostSitemaps`."""


class Crawl:
    """A crawl for one query. Once `absorb` has raised, only `aclose` may be called."""

    def __init__(self, options: CrawlOptions, reader: PageReader, deadline: float) -> None:
        self._options = options
        self._reader = reader
        self._deadline = deadline
        self._frontier = Frontier(options)
        self._visits: dict[_Visit, Target] = {}  # those that are not absorbed
        self._finished: asyncio.Queue[_Visit] = asyncio.Queue()
        self._may_be_unsafe = False
        self._start_errors: dict[str, UnreachableError | UnsafeUrlError | None] = {}  # by start URL, in their order
        self._num_put_off = 0
        self._num_read_in_part = 0
        self._unread_sitemaps: Counter[str] = Counter()  # by their host's address
        self._is_late = False
        self._blocks: set[bytes] = set()  # what earlier pages had
        self._near_duplicates = NearDuplicates()

    def begin(self, urls: Iterable[str], *, may_be_unsafe: bool = False) -> Iterator[Skipped]:
        """Launch the start URLs. If they `may_be_unsafe`, a function gave them, and unsafe ones are skipped."""
        self._may_be_unsafe = may_be_unsafe
        for url in urls:
            if refusal := self._frontier.refusal(url):
                yield Skipped(url, refusal)
            else:
                self._start_errors[url] = None
                self._launch(Target(url, 0))
        if self._options.sitemaps and self._options.max_depth:
            origins = dict.fromkeys("{0.scheme}://{0.netloc}".format(urlsplit(url)) for url in self._start_errors)
            for origin in list(origins)[:MAX_SITEMAP_HOSTS]:
                self._frontier.num_sitemaps += 1
                self._begin_visit(Target(origin, 0, is_sitemaps=True))

    async def next_finished(self) -> _Visit | None:
        """Wait for the next visit in the order in which they end; None when there is none, or the time is over."""
        if not self._visits:
            return None
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._finished.get()
        except TimeoutError:
            return None

    def absorb(self, visit: _Visit) -> Iterator[SourceEvent]:
        """Yield what became of a page, and launch its links.

        :raises UnsafeUrlError: it is a start URL that is not allowed.
        :raises WorkerError: a worker died.
        """
        target = self._visits.pop(visit)
        if target.is_sitemaps:
            yield from self._absorb_sitemaps(visit, target)
        else:
            yield self._absorb_page(visit, target)

    def _absorb_sitemaps(self, visit: _Visit, target: Target) -> Iterator[Skipped]:
        self._frontier.num_sitemaps -= 1
        problems: dict[str, str] = {}
        try:
            if not visit.cancelled():
                sitemaps: HostSitemaps = visit.result()
                problems = sitemaps.problems
                self._unread_sitemaps[target.url] += sitemaps.num_unread
                self._follow(self._frontier.choose_first(sitemaps.pages, 1))
        except WorkerError:
            raise
        except Exception as error:  # a start page says what is wrong with its host
            problems = {target.url: f"its sitemaps cannot be read: {error}"[:MAX_REASON_CHARS]}
        self._follow(self._frontier.choose_waiting())
        for url, problem in problems.items():
            yield Skipped(url, problem)

    def _absorb_page(self, visit: _Visit, target: Target) -> SourceEvent:
        if visit.cancelled():
            return Skipped(target.url, f"its host is given up: {MAX_COSTLY_PAGES} of its pages took too much")
        try:
            page = visit.result()
        except WorkerError:
            raise
        except (UnsafeUrlError, UnreachableError) as error:
            if target.depth == 0:
                if isinstance(error, UnsafeUrlError) and not self._may_be_unsafe:
                    raise
                self._start_errors[target.url] = error
            return Skipped(target.url, str(error))
        except UnusablePageError as error:
            self._num_put_off += is_put_off(error)
            if isinstance(error, DisallowedError):
                self._frontier.free_place(target)
                self._follow(self._frontier.choose_waiting())
            return Skipped(target.url, str(error))
        except Exception as error:  # whatever one page, which may be hostile, brings about, the others are still good
            return Skipped(target.url, f"it cannot be fetched: {type(error).__name__}: {error}"[:MAX_REASON_CHARS])
        self._num_read_in_part += bool(page["is_cut"])
        self._follow(self._frontier.choose(page["links"], target.depth + 1))
        return self._event(page)

    def _event(self, page: dict[str, Any]) -> SourceEvent:
        if not page["passages"]:
            return Skipped(page["url"], "nothing on it matches the query" if page["num_passages"] else "it has no text")
        passages = (Passage(tuple(headings), tuple(blocks)) for headings, blocks in page["passages"])
        text = assemble(passages, self._blocks, self._near_duplicates.has)
        self._near_duplicates.end_page()
        if not text:
            return Skipped(page["url"], "what matches the query on it was on earlier pages")
        num_to_come = len(self._visits) - self._frontier.num_sitemaps + self._frontier.num_waiting
        return Append(Chunk(text, page["url"], page["title"]), Hint(num_chunks=num_to_come))

    def end(self) -> Iterator[Skipped]:
        """Yield what is given up because the time is over.

        :raises UnreachableError: no start URL could be reached.
        """
        for target in self._visits.values():
            yield Skipped(target.url, f"not finished when crawl_timeout_s={self._options.crawl_timeout_s:g} were over")
        errors = [error for error in self._start_errors.values() if error]
        if errors and len(errors) == len(self._start_errors):
            if len(errors) == 1:
                raise errors[0]
            are_unsafe = all(isinstance(error, UnsafeUrlError) for error in errors)
            kind = UnsafeUrlError if are_unsafe else UnreachableError
            raise kind(f"none of the {len(errors)} start URLs can be reached; {errors[0]}") from errors[0]

    def cut_short(self) -> CutShort | None:
        """Return why something that was not found may exist all the same. The words are ours: a model may be told."""
        # Where all places are taken, more addresses would not have brought more pages.
        is_wanted = self._frontier.is_wanted if self._frontier.num_places else lambda url: False
        num_unread = sum(number for url, number in self._unread_sitemaps.items() if is_wanted(url))
        num_costly = self._frontier.num_costly.total()
        num_given_up = sum(number >= MAX_COSTLY_PAGES for number in self._frontier.num_costly.values())
        time_over = f"crawl_timeout_s={self._options.crawl_timeout_s:g} were over before all pages were finished"
        causes = [
            (self._visits or self._is_late, time_over),
            (num_costly, f"{_count(num_costly, 'page')} took more time or memory than a page may"),
            (num_given_up, f"{_count(num_given_up, 'host')} given up because of that"),
            (self._num_put_off, f"{_count(self._num_put_off, 'page')} not fetched, because servers asked to wait"),
            (self._num_read_in_part, f"{_count(self._num_read_in_part, 'page')} too large to be read to the end"),
            (num_unread, f"{_count(num_unread, 'sitemap')} not read, or not to the end"),
        ]
        reasons = [cause for holds, cause in causes if holds]
        return CutShort("; ".join(reasons)) if reasons else None

    async def aclose(self) -> None:
        """Stop all that is under way, and close all connections."""
        for visit in self._visits:
            visit.cancel()
        await wait_regardless([asyncio.create_task(self._close(), name="crawl close")])

    async def _close(self) -> None:
        await asyncio.gather(*self._visits, return_exceptions=True)
        await self._reader.aclose()

    def _follow(self, targets: Iterator[Target]) -> None:
        for target in targets:
            if asyncio.get_running_loop().time() >= self._deadline:
                self._is_late = True
                return
            self._launch(target)

    def _launch(self, target: Target) -> None:
        self._frontier.launch(target)
        self._begin_visit(target)

    def _begin_visit(self, target: Target) -> None:
        visit = asyncio.create_task(self._visit(target), name=f"crawl {target.url}")
        self._visits[visit] = target
        visit.add_done_callback(self._finished.put_nowait)

    async def _visit(self, target: Target) -> Any:
        try:
            if target.is_sitemaps:
                return await self._read_sitemaps(target.url)
            return await self._reader.read(target.url, partial(self._frontier.check_redirect, target))
        except COSTLY_ERRORS:
            self._blame(target.host)
            raise

    async def _read_sitemaps(self, origin: str) -> HostSitemaps:
        crawl_timeout_s = self._options.crawl_timeout_s
        sitemaps = HostSitemaps(origin, self._reader)
        until = self._deadline - (1 - SITEMAPS_SHARE_OF_TIME) * crawl_timeout_s
        await sitemaps.read(until, f"a third of crawl_timeout_s={crawl_timeout_s:g} is over")
        return sitemaps

    def _blame(self, host: str) -> None:
        """Note that a page of `host` took too much. After the second, nothing of it is worth waiting for."""
        self._frontier.num_costly[host] += 1
        if self._frontier.num_costly[host] == MAX_COSTLY_PAGES:
            for visit, target in self._visits.items():
                if target.host == host and visit is not asyncio.current_task():
                    visit.cancel()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
