"""The answers of crawl workers, validated by the process that gets them, and the content that they cache on disk."""

import functools
from dataclasses import dataclass, field
from importlib.metadata import version

from pydantic import TypeAdapter

from streamrag.core.text import TextPassage
from streamrag.sources.documents.reader import Content
from streamrag.support.versions import __version__


@dataclass(frozen=True, slots=True)
class CleanedPage:
    """A worker's answer for a page: what is relevant to the query."""

    url: str  # URL after a browser's redirects
    title: str
    num_passages: int  # with irrelevant ones
    passages: list[TextPassage]  # relevant ones, in page order
    links: list[str]  # URLs, the most relevant first
    is_cut: bool  # whether the page was too long to be read whole
    forwards: list[str] = field(default_factory=list)  # URLs to which the page sends its reader on


@dataclass(frozen=True, slots=True)
class SitemapUrls:
    """A worker's answer for a sitemap: its URLs that are relevant to the query, the most relevant first."""

    pages: list[str]
    sitemaps: list[str]
    is_cut: bool  # whether there may be more
    no_sitemap: str = ""  # what the file is instead of a sitemap, or empty


CONTENT = TypeAdapter(Content)
PAGE_ANSWER = TypeAdapter(CleanedPage)
SITEMAP_ANSWER = TypeAdapter(SitemapUrls)


@functools.cache
def content_version() -> str:
    """Return the versions that content depends on; cached content of other versions is not used."""
    packages = " ".join(f"{name} {version(name)}" for name in ("crawl4ai", "trafilatura", "pypdf"))
    return f"cleaned 6 streamrag {__version__} {packages}"
