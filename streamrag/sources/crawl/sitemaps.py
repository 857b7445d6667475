"""The sitemaps of one host, as one crawl reads them."""

import asyncio
from collections.abc import Iterable

from streamrag.errors import UnreachableError, UnsafeUrlError
from streamrag.sources.crawl.page_fetcher import PageFetcher, SitemapAnswer
from streamrag.sources.http.page import COSTLY_ERRORS, HttpStatusError, UnusablePageError
from streamrag.sources.http.politeness import is_put_off
from streamrag.sources.http.urls import normalize_url

MAX_SITEMAPS = 10  # sitemaps of one host that one crawl reads
MAX_COSTLY_SITEMAPS = 2  # costly sitemaps of one host before no other is read; its pages are still fetched
NUM_CONCURRENT = 2  # concurrent reads of one host's sitemaps, beside pages that links lead to


class HostSitemaps:
    """The sitemaps of the host at `origin`, and the pages that they list.

    The host's robots.txt names the sitemaps; otherwise `/sitemap.xml` is tried. Sitemaps on other hosts are not read.
    """

    def __init__(self, origin: str, pages: PageFetcher) -> None:
        self._origin = origin
        self._pages = pages
        self._waiting = [f"{origin}/sitemap.xml"]
        self._known = set(self._waiting)
        self._are_named = False
        self._num_begun = 0
        self._num_costly = 0
        self.pages: dict[str, None] = {}  # URLs that contain words of the query, in their order
        self.problems: dict[str, str] = {}  # reasons why sitemaps were not read, by URL
        self.num_unread = 0  # number of sitemaps not fully read because of time or limits other than the user's

    async def read(self, until: float, late: str) -> None:
        """Fill `pages`, `problems` and `num_unread` from up to `MAX_SITEMAPS` sitemaps, until a time of the event loop.

        late: the problem of sitemaps that are not read in time. Only errors of robots.txt and of workers are raised.
        """
        reads: dict[asyncio.Task[SitemapAnswer], str] = {}
        try:
            async with asyncio.timeout_at(until):
                found = await self._pages.named_sitemaps(self._origin)
                named = self._on_this_host(normalize_url(url, self._origin) for url in found)
                if named:
                    self._waiting, self._known, self._are_named = named, set(named), True
                while True:
                    while len(reads) < NUM_CONCURRENT and self._waiting and not self._stop_reason():
                        self._num_begun += 1
                        url = self._waiting.pop(0)
                        reads[asyncio.create_task(self._pages.fetch_sitemap(url), name=f"crawl {url}")] = url
                    if not reads:
                        break
                    done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        self._absorb(task, reads.pop(task))
        except TimeoutError:
            for url in reads.values():
                self._add_unread(url, f"it is not read: {late}")
        finally:
            for task in reads:
                task.cancel()
            await asyncio.gather(*reads, return_exceptions=True)
        if num_more := len(self._waiting):
            more = f", nor are {num_more - 1} more" if num_more > 1 else ""
            self._add_unread(self._waiting[0], f"it is not read{more}: {self._stop_reason() or late}", num_more)

    def _on_this_host(self, urls: Iterable[str | None]) -> list[str]:
        return [url for url in urls if url and url.startswith(self._origin + "/")]

    def _stop_reason(self) -> str:
        """Return the limit that forbids reading another sitemap, or an empty text."""
        if self._num_costly >= MAX_COSTLY_SITEMAPS:
            return f"{MAX_COSTLY_SITEMAPS} sitemaps of its host exceeded their limits"
        return f"{MAX_SITEMAPS} sitemaps of a host are" if self._num_begun >= MAX_SITEMAPS else ""

    def _absorb(self, task: "asyncio.Task[SitemapAnswer]", url: str) -> None:
        """Add a finished read's pages and sitemaps, or its problem (no unnamed sitemap's 404); raise other errors."""
        try:
            answer, max_body_bytes = task.result()
        except COSTLY_ERRORS as error:
            self._num_costly += 1
            self._add_unread(url, str(error))
        except (UnusablePageError, UnreachableError, UnsafeUrlError) as error:
            if is_put_off(error):
                self._add_unread(url, str(error))
            elif self._are_named or not (isinstance(error, HttpStatusError) and error.status == 404):
                self.problems[url] = str(error)
        else:
            self.pages |= dict.fromkeys(answer.pages)
            # Workers read hostile files, so their answers are checked like the files themselves.
            more = [each for each in self._on_this_host(answer.sitemaps) if normalize_url(each) == each]
            self._waiting += [each for each in more if each not in self._known]
            self._known.update(more)
            if answer.no_sitemap:
                self.problems[url] = f"it is {answer.no_sitemap}, not a sitemap"
            elif max_body_bytes:
                self.problems[url] = f"it is larger than max_body_bytes={max_body_bytes}: only its beginning is read"
            elif answer.is_cut:
                self._add_unread(url, "it is damaged or too large: only a part of it is read")

    def _add_unread(self, url: str, reason: str, num_sitemaps: int = 1) -> None:
        self.problems[url] = reason
        self.num_unread += num_sitemaps
