"""The content of a page independent of the query, which workers cache on disk."""

import functools
from dataclasses import dataclass
from importlib.metadata import version

from pydantic import TypeAdapter

from streamrag.support.versions import __version__


@dataclass(frozen=True, slots=True)
class PageContent:
    """A page without navigation and the like."""

    url: str  # URL after redirects
    title: str
    text: str  # Markdown, or plain text
    links: dict[str, str]  # link texts by URL
    is_cut: bool  # whether the page was truncated


JSON = TypeAdapter(PageContent)


@functools.cache
def content_version() -> str:
    """Return the versions that content depends on; cached content of other versions is not used."""
    return f"cleaned 2 streamrag {__version__} crawl4ai {version('crawl4ai')} pypdf {version('pypdf')}"
