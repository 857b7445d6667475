"""The frontier of a crawl: the pages to visit, and the links that wait for a place."""

from collections import Counter, deque
from collections.abc import Iterable, Iterator
from typing import NamedTuple
from urllib.parse import urlsplit

from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.http.page import UnusablePageError
from streamrag.sources.http.urls import normalize_url

MAX_COSTLY_PAGES = 2  # costly pages of one host before the crawl abandons the host
MAX_FORWARDS = 5  # pages, one after another, that send their reader on
MAX_WAITING = 1000  # links that wait for a place, which a disallowed page may free
MAX_DISALLOWED = 100  # pages disallowed by robots.txt that do not count towards `max_pages`


class Target(NamedTuple):
    url: str
    depth: int  # number of links from a start URL, which has 0
    is_sitemaps: bool = False  # whether the target is not a page, but the sitemaps of the host with the origin `url`
    num_forwards: int = 0  # number of pages that sent their reader on to this one, one after another

    @property
    def host(self) -> str:
        """Host of the URL, and its port if the URL has one."""
        return urlsplit(self.url).netloc


class Frontier:
    """The pages of one crawl, within its `max_pages` places, its depth and its hosts."""

    def __init__(self, options: CrawlOptions) -> None:
        self._options = options
        self._visited: set[str] = set()
        self._waiting: deque[Target] = deque()
        self._start_hosts: set[str] = set()
        self._num_launched: Counter[str] = Counter()  # pages, by host
        self._num_disallowed = 0
        self.num_costly: Counter[str] = Counter()  # number of costly pages, by host
        self.num_sitemaps = 0
        """Number of hosts whose sitemaps are being read. Meanwhile, half of the places are reserved for their pages."""

    @property
    def num_places(self) -> int:
        """Number of pages that may still be launched."""
        return self._options.max_pages - self._num_launched.total()

    @property
    def num_waiting(self) -> int:
        """Number of waiting links for which there will be a place."""
        return min(len(self._waiting), self.num_places)

    def refusal(self, url: str) -> str:
        """Return why a start URL gets no place, or an empty text if it gets one."""
        limits = self._options
        if not self.num_places:
            return f"max_pages={limits.max_pages} is less than the number of start URLs"
        if self._has_enough(url):
            return f"max_pages_per_host={limits.max_pages_per_host} is less than the number of start URLs of its host"
        return ""

    def launch(self, target: Target) -> None:
        """Mark a page as visited, and count it against the places; or count a host whose sitemaps are being read.

        The host of a start page becomes a host of the crawl.
        """
        if target.is_sitemaps:
            self.num_sitemaps += 1
            return
        self._visited.add(target.url)
        self._num_launched[target.host] += 1
        if target.depth == 0:
            self._start_hosts.add(target.host)

    def choose(self, links: Iterable[str], depth: int) -> Iterator[Target]:
        """Yield the new and wanted links that have a place; queue those without one, and mark the queued as visited.

        The caller must `launch` each link before the next: `launch` marks the link as visited, and takes its place.
        Yield nothing beyond `max_depth`, and stop once `MAX_WAITING` links wait.
        """
        for url in links:
            if depth > self._options.max_depth or len(self._waiting) == MAX_WAITING:
                return
            # Workers read hostile pages, so their answers are checked like the pages themselves.
            if self.is_wanted(url) and url not in self._visited and normalize_url(url) == url:
                if self._has_place():
                    yield Target(url, depth)
                else:
                    self._visited.add(url)
                    self._waiting.append(Target(url, depth))

    def choose_forwards(self, target: Target, urls: Iterable[str]) -> Iterator[Target]:
        """Yield the pages to which `target` sends its reader, as `choose` does, but like redirects.

        They have the depth of `target`, and a start page may lead to a new host.
        """
        for url in urls if target.num_forwards < MAX_FORWARDS else ():
            if target.depth == 0 and normalize_url(url) == url:
                self._start_hosts.add(urlsplit(url).netloc)
            for forward in self.choose([url], target.depth):
                yield forward._replace(num_forwards=target.num_forwards + 1)

    def choose_first(self, links: Iterable[str], depth: int) -> Iterator[Target]:
        """Like `choose`, but queue links without a place in front of those that are already waiting."""
        waiting, self._waiting = self._waiting, deque()
        try:
            yield from self.choose(links, depth)
        finally:
            self._waiting.extend(waiting)

    def choose_waiting(self) -> Iterator[Target]:
        """Yield the waiting links that have a place now, to be launched one by one; drop those no longer wanted."""
        while self._waiting and self._has_place():
            waiting = self._waiting.popleft()
            if self.is_wanted(waiting.url):
                yield waiting

    def free_place(self, target: Target) -> None:
        """Free the place of a disallowed page, for the first `MAX_DISALLOWED` of them."""
        if self._num_disallowed < MAX_DISALLOWED:
            self._num_disallowed += 1
            self._num_launched[target.host] -= 1

    def check_redirect(self, target: Target, url: str) -> None:
        """Check a redirect from `target` to `url`, and mark `url` as visited. A start page may lead to a new host.

        :raises UnusablePageError: `url` is visited already, or its host is outside of the crawl.
        """
        host = urlsplit(url).netloc
        if url in self._visited:
            raise UnusablePageError(f"it redirects to {url}, which is visited already")
        if target.depth == 0:  # such as from example.com to www.example.com, which is then the site to crawl
            self._start_hosts.add(host)
        elif self._options.same_host and host not in self._start_hosts:
            raise UnusablePageError(f"it redirects to another host: {url}")
        self._visited.add(url)

    def is_wanted(self, url: str) -> bool:
        """Whether further pages of this URL's host may be visited: it is in the crawl, not abandoned, and not full."""
        host = urlsplit(url).netloc
        is_inside = host in self._start_hosts or not self._options.same_host
        return is_inside and self.num_costly[host] < MAX_COSTLY_PAGES and not self._has_enough(url)

    def _has_enough(self, url: str) -> bool:
        limit = self._options.max_pages_per_host
        return limit is not None and self._num_launched[urlsplit(url).netloc] >= limit

    def _has_place(self) -> bool:
        """Whether a link may be launched. Half of the places are reserved while sitemaps are read."""
        return self.num_places > (self._options.max_pages // 2 if self.num_sitemaps else 0)
