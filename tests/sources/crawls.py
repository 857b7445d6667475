"""Crawls of a `Website`: a query, pages that are relevant to it, and what became of which page."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from typing import Any

from website import Website

from streamrag.core import Append, CutShort, Skipped, SourceEvent
from streamrag.sources.crawl.options import CrawlOptions
from streamrag.sources.crawl.web import WebSource

QUERY = "How do penguins swim?"


NewSource = Callable[..., WebSource]


def maker(started: WebSource, site: Website) -> NewSource:
    """Makes sources that start at `site`, if nothing else is said, with the workers of `started`."""

    def new(urls: Any = None, **options: Any) -> WebSource:
        crawl_options = CrawlOptions(**{"allow_private": True, **options})
        source = WebSource([site.url()] if urls is None else urls, crawl_options)
        source._workers, source._ssl_context = started._workers, started._ssl_context
        return source

    return new


def text(subject: str, *links: str) -> str:
    """A relevant page."""
    anchors = "".join(f'<p><a href="{link}">{link}</a></p>' for link in links)
    return f"<title>{subject}</title><h1>{subject}</h1><p>{subject} penguins swim in their very own way.</p>{anchors}"


async def crawl(source: WebSource, query: str = QUERY) -> list[SourceEvent]:
    async with asyncio.timeout(120), aclosing(source.stream(query)) as events:
        return [event async for event in events]


def paths(events: Sequence[SourceEvent], kind: type = Append) -> list[str]:
    """Paths of the pages that ended as this kind of event."""
    urls = [event.chunk.uri if isinstance(event, Append) else event.uri for event in events if type(event) is kind]
    return ["/" + url.split("/", 3)[3] for url in urls]


def cut_short(events: Sequence[SourceEvent]) -> list[str]:
    return [event.reason for event in events if isinstance(event, CutShort)]


def reasons(events: Sequence[SourceEvent]) -> dict[str, str]:
    skipped = [event for event in events if isinstance(event, Skipped)]
    return dict(zip(paths(skipped, Skipped), [event.reason for event in skipped], strict=True))
