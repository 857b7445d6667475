"""Content of a page, whatever the query is: what a worker keeps on disk for the next one."""

import functools
from dataclasses import dataclass
from importlib.metadata import version

from pydantic import TypeAdapter

from streamrag.support.versions import __version__


@dataclass(frozen=True, slots=True)
class PageContent:
    """A page without navigation and the like."""

    url: str
    """Address that a browser was led to, or that the page was fetched from."""
    title: str
    text: str
    """Markdown, or plain text."""
    links: dict[str, str]
    """Texts of links by their addresses."""
    is_cut: bool
    """Whether the page is larger than what is read of it."""


JSON = TypeAdapter(PageContent)


@functools.cache
def content_version() -> str:
    """Return the versions that content depends on: content made by others is not used."""
    return f"cleaned 2 streamrag {__version__} crawl4ai {version('crawl4ai')} pypdf {version('pypdf')}"
