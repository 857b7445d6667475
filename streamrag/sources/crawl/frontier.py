"""The frontier of a crawl: the pages that it visits, and those that wait for a place."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.http.page_errors import UnusablePageError
from streamrag.sources.http.urls import normalize_url

MAX_COSTLY_PAGES = 2  # pages of one host that may take too much before it is given up for the rest of the crawl
MAX_WAITING = 1000  # links that wait for a place, should a page turn out not to be asked for
MAX_DISALLOWED = 100  # pages that robots.txt forbids and that do not count towards `max_pages`


class Target(NamedTuple):
    """An address to visit."""

    url: str
    depth: int
    """Links from a start URL; 0 for those themselves."""
    is_sitemaps: bool = False
    """Whether it is no page, but all sitemaps of the host (`url` is its address without a path)."""

    @property
    def host(self) -> str:
        """The host, and its port if that is unusual."""
        return urlsplit(self.url).netloc


class Frontier:
    """The pages of one crawl, within `max_pages` places, its depth and its hosts."""

    def __init__(self, options: CrawlOptions) -> None:
        self._options = options
        self._visited: set[str] = set()
        self._waiting: deque[Target] = deque()
        self._start_hosts: set[str] = set()
        self._num_launched: Counter[str] = Counter()  # pages, by host
        self._num_disallowed = 0
        self.num_costly: Counter[str] = Counter()
        """Pages that took too much, by host."""
        self.num_sitemaps = 0
        """Hosts whose sitemaps are being read: meanwhile half of the places are kept for what they say."""

    @property
    def num_places(self) -> int:
        """Number of pages that may still be launched."""
        return self._options.max_pages - self._num_launched.total()

    @property
    def num_waiting(self) -> int:
        """Number of links that wait, and that there are places for."""
        return min(len(self._waiting), self.num_places)

    def refusal(self, url: str) -> str:
        """Return why a start URL has no place; empty if it has one."""
        limits = self._options
        if not self.num_places:
            return f"max_pages={limits.max_pages} is less than there are start URLs"
        if self._has_enough(url):
            return f"max_pages_per_host={limits.max_pages_per_host} is less than there are start URLs of its host"
        return ""

    def launch(self, target: Target) -> None:
        """Give a place to a page."""
        self._visited.add(target.url)
        self._num_launched[target.host] += 1
        if target.depth == 0:
            self._start_hosts.add(target.host)

    def choose(self, links: Iterable[str], depth: int) -> Iterator[Target]:
        """Yield the links for which there is a place; launch each before the next. The others wait for one."""
        for url in links:
            if depth > self._options.max_depth or len(self._waiting) == MAX_WAITING:
                return
            # A worker reads hostile pages: what it answers is checked like what a page says.
            if self.is_wanted(url) and url not in self._visited and normalize_url(url) == url:
                if self._has_place():
                    yield Target(url, depth)
                else:
                    self._visited.add(url)
                    self._waiting.append(Target(url, depth))

    def choose_first(self, links: Iterable[str], depth: int) -> Iterator[Target]:
        """Yield as `choose` does, and have these links wait before those that wait already."""
        waiting, self._waiting = self._waiting, deque()
        try:
            yield from self.choose(links, depth)
        finally:
            self._waiting.extend(waiting)

    def choose_waiting(self) -> Iterator[Target]:
        """Yield the links that wait and for which there is a place now; launch each before the next."""
        while self._waiting and self._has_place():
            waiting = self._waiting.popleft()
            if self.is_wanted(waiting.url):
                yield waiting

    def free_place(self, target: Target) -> None:
        """Take back the place of a page that was not asked for after all."""
        if self._num_disallowed < MAX_DISALLOWED:
            self._num_disallowed += 1
            self._num_launched[target.host] -= 1

    def check_redirect(self, target: Target, url: str) -> None:
        """Accept where `target` redirects to.

        :raises UnusablePageError: it is visited already, or outside of the crawl.
        """
        host = urlsplit(url).netloc
        if url in self._visited:
            raise UnusablePageError(f"it redirects to {url}, which is visited already")
        if target.depth == 0:  # to www.example.com, say: that is then the site
            self._start_hosts.add(host)
        elif self._options.same_host and host not in self._start_hosts:
            raise UnusablePageError(f"it redirects to another host: {url}")
        self._visited.add(url)

    def is_wanted(self, url: str) -> bool:
        """Whether pages of its host are visited."""
        host = urlsplit(url).netloc
        is_inside = host in self._start_hosts or not self._options.same_host
        return is_inside and self.num_costly[host] < MAX_COSTLY_PAGES and not self._has_enough(url)

    def _has_enough(self, url: str) -> bool:
        limit = self._options.max_pages_per_host
        return limit is not None and self._num_launched[urlsplit(url).netloc] >= limit

    def _has_place(self) -> bool:
        return self.num_places > (self._options.max_pages // 2 if self.num_sitemaps else 0)
