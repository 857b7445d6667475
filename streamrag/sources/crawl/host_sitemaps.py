"""Which sitemaps of one host are read in a crawl, and what they say together."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from streamrag.sources.http.addresses import normalize_url

MAX_SITEMAPS = 10
"""Files that one crawl reads of one host's sitemaps."""

MAX_COSTLY_SITEMAPS = 2
"""Sitemaps of one host that may take too much before no further one is begun. Its pages are fetched all the same."""


@dataclass(slots=True)
class HostSitemaps:
    """What is known of one host's sitemaps."""

    origin: str
    waiting: list[str] = field(init=False)
    known: set[str] = field(init=False)
    are_named: bool = False
    """Whether robots.txt says where they are."""
    num_begun: int = 0
    num_costly: int = 0
    num_unread: int = 0
    pages: dict[str, None] = field(default_factory=dict)
    problems: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.waiting = [f"{self.origin}/sitemap.xml"]
        self.known = set(self.waiting)

    def name(self, urls: Iterable[str]) -> None:
        """They are at these addresses, if any of them is here."""
        here = [url for each in urls if (url := normalize_url(each)) and url.startswith(self.origin + "/")]
        if here:
            self.waiting, self.known, self.are_named = here, set(here), True

    def next(self) -> str | None:
        """The next to be read, if there is one and enough is not reached."""
        if not self.waiting or self.is_enough():
            return None
        self.num_begun += 1
        return self.waiting.pop(0)

    def is_enough(self) -> str:
        """Why no further one is begun; empty if one may be."""
        if self.num_costly >= MAX_COSTLY_SITEMAPS:
            return f"{MAX_COSTLY_SITEMAPS} sitemaps of its host took too much"
        return f"{MAX_SITEMAPS} sitemaps of a host are" if self.num_begun >= MAX_SITEMAPS else ""

    def add(self, answer: dict[str, Any]) -> None:
        """A worker reads hostile files: what it answers is checked like what they say."""
        self.pages |= dict.fromkeys(answer["pages"])
        more = (each for each in answer["sitemaps"] if normalize_url(each) == each and each not in self.known)
        more_here = [each for each in more if each.startswith(self.origin + "/")]
        self.waiting += more_here
        self.known.update(more_here)

    def leave_out(self, url: str, why: str) -> None:
        """Not all of it is known, and that is no bound of the user's."""
        self.problems[url] = why
        self.num_unread += 1
