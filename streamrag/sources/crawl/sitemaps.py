"""The sitemaps of one host, as one crawl reads them."""

import asyncio
from collections.abc import Iterable

from streamrag.errors import UnreachableError, UnsafeUrlError
from streamrag.sources.crawl.page_reader import PageReader, SitemapAnswer
from streamrag.sources.http.page_errors import COSTLY_ERRORS, HttpStatusError, UnusablePageError
from streamrag.sources.http.politeness import is_put_off
from streamrag.sources.http.urls import normalize_url

MAX_SITEMAPS = 10  # sitemaps of one host that one crawl reads
MAX_COSTLY_SITEMAPS = 2
"""Sitemaps of one host that may take too much before no further one is begun. Its pages are fetched all the same."""

NUM_CONCURRENT = 2  # sitemaps of one host that are read at the same time: pages that links lead to come beside them


class HostSitemaps:
    """The sitemaps of the host at `origin`, and the pages that they name.

    They are those that its robots.txt names, or else `/sitemap.xml`. Those of other hosts are not read.
    """

    def __init__(self, origin: str, reader: PageReader) -> None:
        self._origin = origin
        self._reader = reader
        self._waiting = [f"{origin}/sitemap.xml"]
        self._known = set(self._waiting)
        self._are_named = False
        self._num_begun = 0
        self._num_costly = 0
        self.pages: dict[str, None] = {}
        """Addresses that have words of the query, in their order."""
        self.problems: dict[str, str] = {}
        """Reasons by the address of a sitemap."""
        self.num_unread = 0
        """Sitemaps of which more might be known if there were more time, or fewer limits that are not the user's."""

    async def read(self, until: float, late: str) -> None:
        """Read them until a time of the event loop's clock; `late` says what that is.

        :raises WorkerError: a worker died.
        """
        reading: dict[asyncio.Task[SitemapAnswer], str] = {}
        try:
            async with asyncio.timeout_at(until):
                named = self._here(map(normalize_url, await self._reader.named_sitemaps(self._origin)))
                if named:
                    self._waiting, self._known, self._are_named = named, set(named), True
                while True:
                    while len(reading) < NUM_CONCURRENT and (url := self._next()):
                        reading[asyncio.create_task(self._reader.read_sitemap(url), name=f"crawl {url}")] = url
                    if not reading:
                        break
                    done, _ = await asyncio.wait(reading, return_when=asyncio.FIRST_COMPLETED)
                    for task in done:
                        self._absorb(task, reading.pop(task))
        except TimeoutError:
            for url in reading.values():
                self._leave_out(url, f"it is not read: {late}")
        finally:
            for task in reading:
                task.cancel()
            await asyncio.gather(*reading, return_exceptions=True)
        if num_more := len(self._waiting):
            more = f", nor are {num_more - 1} more" if num_more > 1 else ""
            self._leave_out(self._waiting[0], f"it is not read{more}: {self._enough() or late}", num_more)

    def _here(self, urls: Iterable[str | None]) -> list[str]:
        return [url for url in urls if url and url.startswith(self._origin + "/")]

    def _next(self) -> str | None:
        if not self._waiting or self._enough():
            return None
        self._num_begun += 1
        return self._waiting.pop(0)

    def _enough(self) -> str:
        """Return why no further one is begun; empty if one may be."""
        if self._num_costly >= MAX_COSTLY_SITEMAPS:
            return f"{MAX_COSTLY_SITEMAPS} sitemaps of its host took too much"
        return f"{MAX_SITEMAPS} sitemaps of a host are" if self._num_begun >= MAX_SITEMAPS else ""

    def _absorb(self, task: "asyncio.Task[SitemapAnswer]", url: str) -> None:
        try:
            answer, max_body_bytes = task.result()
        except COSTLY_ERRORS as error:
            self._num_costly += 1
            self._leave_out(url, str(error))
        except (UnusablePageError, UnreachableError, UnsafeUrlError) as error:
            if is_put_off(error):
                self._leave_out(url, str(error))
            elif self._are_named or not (isinstance(error, HttpStatusError) and error.status == 404):
                self.problems[url] = str(error)
        else:
            self.pages |= dict.fromkeys(answer["pages"])
            # A worker reads hostile files: what it answers is checked like what they say.
            more = [each for each in self._here(answer["sitemaps"]) if normalize_url(each) == each]
            self._waiting += [each for each in more if each not in self._known]
            self._known.update(more)
            if max_body_bytes:
                self.problems[url] = f"it is larger than max_body_bytes={max_body_bytes}: only its beginning is read"
            elif answer["is_cut"]:
                self._leave_out(url, "it is damaged, or larger than what is looked at: only a part of it is read")

    def _leave_out(self, url: str, why: str, num_sitemaps: int = 1) -> None:
        """Note that not all of it is known, and that no limit of the user's is the cause."""
        self.problems[url] = why
        self.num_unread += num_sitemaps
