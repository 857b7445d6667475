"""A crawl for one query: fetches, cleans and follows pages, and turns each into an event.

    launched ──fetch, here──▶ fetched ──clean, in a worker──▶ finished ──absorb──▶ Append or Skipped; its links launched

Breadth first without a barrier: the links of a page are launched as soon as it is finished. Every page is a task from
the start; as there are at most `max_pages`, no bounded queue is needed.

`cut_short` reports pages that were omitted because time or a page's resource limits ran out. Reaching one of the user's
own bounds (`max_depth`, `max_pages`, `max_body_bytes`), or a missing page, does not count.
"""

import asyncio
from collections import Counter
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any, TypeAlias

from streamrag.core import Append, Chunk, CutShort, Hint, Skipped, SourceEvent
from streamrag.errors import UnreachableError, UnsafeUrlError, WorkerError
from streamrag.sources.crawl.frontier import MAX_COSTLY_PAGES, Frontier, Target
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.crawl.page_fetcher import PageFetcher
from streamrag.sources.crawl.sitemaps import HostSitemaps
from streamrag.sources.http.page import COSTLY_ERRORS, DisallowedError, UnusablePageError
from streamrag.sources.http.politeness import is_put_off
from streamrag.sources.http.urls import origin_of
from streamrag.sources.pages.near_duplicates import NearDuplicates
from streamrag.sources.pages.page_content import CleanedPage
from streamrag.sources.pages.relevant_passages import assemble
from streamrag.support.tasks import run_shielded

MAX_SITEMAP_HOSTS = 5  # hosts whose sitemaps one crawl reads
SITEMAPS_SHARE_OF_TIME = 1 / 3  # after which links may use the places reserved for pages from sitemaps
MAX_REASON_CHARS = 500  # characters of an unexpected error

_Visit: TypeAlias = asyncio.Task[Any]
"""A task that returns a `CleanedPage`, or a `HostSitemaps`."""


class Crawl:
    """A crawl for one query. After `absorb` has raised, only `aclose` may be called."""

    def __init__(self, options: CrawlOptions, pages: PageFetcher, deadline: float) -> None:
        self._options = options
        self._pages = pages
        self._deadline = deadline
        self._frontier = Frontier(options)
        self._visits: dict[_Visit, Target] = {}  # not yet absorbed
        self._finished: asyncio.Queue[_Visit] = asyncio.Queue()
        self._may_be_unsafe = False
        self._start_errors: dict[str, UnreachableError | UnsafeUrlError | None] = {}  # by start URL, in their order
        self._num_put_off = 0
        self._num_truncated = 0
        self._unread_sitemaps: Counter[str] = Counter()  # by the origin of their host
        self._is_late = False
        self._fingerprints: set[bytes] = set()  # of blocks of earlier pages
        self._near_duplicates = NearDuplicates()

    def begin(self, urls: Iterable[str], *, may_be_unsafe: bool = False) -> Iterator[Skipped]:
        """Launch visits to start URLs, and to their hosts' sitemaps if wanted; yield a Skipped for a URL without place.

        may_be_unsafe: whether `absorb` will skip a start URL that is not allowed, instead of raising for it.
        """
        self._may_be_unsafe = may_be_unsafe
        for url in urls:
            if refusal := self._frontier.refusal(url):
                yield Skipped(url, refusal)
            else:
                self._start_errors[url] = None
                self._launch(Target(url, 0))
        if self._options.sitemaps and self._options.max_depth:
            for origin in list(dict.fromkeys(map(origin_of, self._start_errors)))[:MAX_SITEMAP_HOSTS]:
                self._launch(Target(origin, 0, is_sitemaps=True))

    async def next_finished(self) -> _Visit | None:
        """Wait for a visit to finish, and return it; None if none is left, or none has finished by the deadline."""
        if not self._visits:
            return None
        try:
            async with asyncio.timeout_at(self._deadline):
                return await self._finished.get()
        except TimeoutError:
            return None

    def absorb(self, visit: _Visit) -> Iterator[SourceEvent]:
        """Yield a visited page's event, or a Skipped for each problem of a host's sitemaps; launch visits to the links.

        :raises UnsafeUrlError: a start URL is not allowed, and unsafe ones are not to be skipped.
        :raises WorkerError: a worker died.
        """
        target = self._visits.pop(visit)
        if target.is_sitemaps:
            yield from self._absorb_sitemaps(visit, target)
        else:
            yield self._absorb_page(visit, target)

    def _absorb_sitemaps(self, visit: _Visit, target: Target) -> Iterator[Skipped]:
        """Launch the pages that a host's sitemaps list, then the waiting links that have a place now.

        Yield a Skipped for each problem, or one for an error, except a WorkerError, which is raised. Count unread
        sitemaps for `cut_short`. A cancelled visit has no pages and problems.
        """
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
        except Exception as error:  # the start page reports what is wrong with its host
            problems = {target.url: f"its sitemaps cannot be read: {error}"[:MAX_REASON_CHARS]}
        self._follow(self._frontier.choose_waiting())
        for url, problem in problems.items():
            yield Skipped(url, problem)

    def _absorb_page(self, visit: _Visit, target: Target) -> SourceEvent:
        """Return the page's event, with a Hint of the pages to come, and launch its links. An error gives a Skipped, or
        is raised as `absorb` says.

        The error of an unreachable start URL is kept for `end`. A disallowed page frees its place for a waiting link.
        Pages that were put off or truncated are counted for `cut_short`.
        """
        if visit.cancelled():
            return Skipped(target.url, f"its host is abandoned: {MAX_COSTLY_PAGES} of its pages exceeded their limits")
        try:
            page: CleanedPage = visit.result()
        except WorkerError:
            raise
        except (UnsafeUrlError, UnreachableError) as error:
            if target.url in self._start_errors:
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
        except Exception as error:  # one page, which may be hostile, must not end the crawl
            return Skipped(target.url, f"it cannot be fetched: {type(error).__name__}: {error}"[:MAX_REASON_CHARS])
        self._num_truncated += page.is_cut
        event = self._read(page)
        if page.forwards and isinstance(event, Skipped):
            self._frontier.free_place(target)
            event = Skipped(page.url, f"{event.reason}; it leads on to {page.forwards[0]}")
        self._follow(self._frontier.choose_forwards(target, page.forwards))
        self._follow(self._frontier.choose(page.links, target.depth + 1))
        if isinstance(event, Skipped):
            return event
        num_to_come = len(self._visits) - self._frontier.num_sitemaps + self._frontier.num_waiting
        return Append(event, Hint(num_chunks=num_to_come))

    def _read(self, page: CleanedPage) -> Chunk | Skipped:
        """Return what no earlier page had; a Skipped if nothing is left.

        Remember the page's text for the pages that follow.
        """
        if not page.passages:
            return Skipped(page.url, "nothing on it matches the query" if page.num_passages else "it has no text")
        text = assemble(page.passages, self._fingerprints, self._near_duplicates.has)
        self._near_duplicates.end_page()
        if not text:
            return Skipped(page.url, "what matches the query on it was on earlier pages")
        return Chunk(text, page.url, page.title)

    def end(self) -> Iterator[Skipped]:
        """Yield a Skipped for each visit that is unfinished at the deadline.

        :raises UnreachableError: no start URL could be reached.
        :raises UnsafeUrlError: no start URL is at an allowed address.
        """
        for target in self._visits.values():
            yield Skipped(target.url, f"not finished within crawl_timeout_s={self._options.crawl_timeout_s:g}")
        errors = [error for error in self._start_errors.values() if error]
        if errors and len(errors) == len(self._start_errors):
            if len(errors) == 1:
                raise errors[0]
            are_unsafe = all(isinstance(error, UnsafeUrlError) for error in errors)
            kind = UnsafeUrlError if are_unsafe else UnreachableError
            raise kind(f"none of the {len(errors)} start URLs can be reached; {errors[0]}") from errors[0]

    def cut_short(self) -> CutShort | None:
        """Return a CutShort with all reasons why pages may be missing, in our own words; None if there is no reason.

        Reasons are time, costly or truncated pages, abandoned hosts, servers that asked to wait, and unread sitemaps if
        a place is left and more pages of their host are wanted. Reaching `max_pages` or `max_depth` is no reason.
        """
        # Without a free place, more URLs would not have brought more pages.
        is_wanted = self._frontier.is_wanted if self._frontier.num_places else lambda url: False
        num_unread = sum(number for url, number in self._unread_sitemaps.items() if is_wanted(url))
        num_costly = self._frontier.num_costly.total()
        num_given_up = sum(number >= MAX_COSTLY_PAGES for number in self._frontier.num_costly.values())
        time_over = f"crawl_timeout_s={self._options.crawl_timeout_s:g} ended before all pages were finished"
        causes = [
            (self._visits or self._is_late, time_over),
            (num_costly, f"{_count(num_costly, 'page')} exceeded the time or memory of a page"),
            (num_given_up, f"{_count(num_given_up, 'host')} abandoned because of that"),
            (self._num_put_off, f"{_count(self._num_put_off, 'page')} not fetched, because servers asked to wait"),
            (self._num_truncated, f"{_count(self._num_truncated, 'page')} too large to be read to the end"),
            (num_unread, f"{_count(num_unread, 'sitemap')} not read, or not to the end"),
        ]
        reasons = [reason for applies, reason in causes if applies]
        return CutShort("; ".join(reasons)) if reasons else None

    async def aclose(self) -> None:
        """Cancel all visits, wait until they have ended, and close all connections, even if the caller is cancelled."""
        for visit in self._visits:
            visit.cancel()
        await run_shielded(self._close(), "crawl close")

    async def _close(self) -> None:
        await asyncio.gather(*self._visits, return_exceptions=True)
        await self._pages.aclose()

    def _follow(self, targets: Iterator[Target]) -> None:
        """Launch a visit to each of `targets`; from the deadline on launch none, but record that one came too late."""
        for target in targets:
            if asyncio.get_running_loop().time() >= self._deadline:
                self._is_late = True
                return
            self._launch(target)

    def _launch(self, target: Target) -> None:
        """Give the target its place, and start its visit as a task, which enters the queue of finished ones."""
        self._frontier.launch(target)
        visit = asyncio.create_task(self._visit(target), name=f"crawl {target.url}")
        self._visits[visit] = target
        visit.add_done_callback(self._finished.put_nowait)

    async def _visit(self, target: Target) -> Any:
        """Return the `CleanedPage`, or the host's `HostSitemaps`, read within a third of the crawl's time.

        Errors are raised; costly ones also count against the host.
        """
        try:
            if not target.is_sitemaps:
                return await self._pages.fetch(target.url, partial(self._frontier.check_redirect, target))
            crawl_timeout_s = self._options.crawl_timeout_s
            sitemaps = HostSitemaps(target.url, self._pages)
            until = self._deadline - (1 - SITEMAPS_SHARE_OF_TIME) * crawl_timeout_s
            await sitemaps.read(until, f"a third of crawl_timeout_s={crawl_timeout_s:g} is over")
            return sitemaps
        except COSTLY_ERRORS:
            self._count_costly(target.host)
            raise

    def _count_costly(self, host: str) -> None:
        """Count a costly page of `host`; at the second one, cancel all other visits to the host."""
        self._frontier.num_costly[host] += 1
        if self._frontier.num_costly[host] == MAX_COSTLY_PAGES:
            for visit, target in self._visits.items():
                if target.host == host and visit is not asyncio.current_task():
                    visit.cancel()


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
