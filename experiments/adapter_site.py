"""What the applications of `adapters.py` find: sections of streamrag's documentation, in memory and on a slow site.

The site is served by `examples/demo_site.py`, each page after a latency of its own. Which pages are asked for is
decided by BM25 at once, as by a search engine whose results are then fetched.
"""

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from rank_bm25 import BM25Okapi

from streamrag.support.tasks import cancel_and_wait

NUM_CHARS = (500, 1_800)
"""Sections with fewer are left out, of longer ones the first paragraphs are taken."""
_WORD = re.compile(r"\w+")


@dataclass(frozen=True)
class Page:
    name: str
    title: str
    text: str


def read_pages(docs: Path) -> list[Page]:
    """The sections of the Markdown files in `docs` that a person wrote."""
    pages = []
    for path in sorted(docs.glob("*.md")):
        if path.name == "api.md":
            continue
        for number, section in enumerate(re.split(r"^## ", path.read_text(), flags=re.MULTILINE)[1:]):
            title, _, body = section.partition("\n")
            text = _begin(body.strip())
            if len(text) >= NUM_CHARS[0]:
                pages.append(Page(f"{path.stem}-{number}.txt", title, text))
    return pages


def _begin(text: str) -> str:
    return text if len(text) <= NUM_CHARS[1] else text[: NUM_CHARS[1]].rpartition("\n\n")[0].strip()


def questions(pages: Sequence[Page], num_questions: int) -> list[str]:
    """One about each of the first titles."""
    titles = list(dict.fromkeys(page.title for page in pages))
    return [f"What does the documentation say about this: {titles[i % len(titles)]}?" for i in range(num_questions)]


class Search:
    """The pages that have most of a question's words."""

    def __init__(self, pages: Sequence[Page]) -> None:
        self._pages = pages
        self._bm25 = BM25Okapi([_words(f"{page.title} {page.text}") for page in pages])

    def best(self, question: str, num_pages: int) -> list[Page]:
        scores = self._bm25.get_scores(_words(question))
        return [self._pages[i] for i in sorted(range(len(self._pages)), key=lambda i: -scores[i])[:num_pages]]


class Site:
    """Pages that are found at once, and take time to come."""

    def __init__(self, client: httpx.AsyncClient, search: Search, num_pages: int) -> None:
        self._client = client
        self._search = search
        self._num_pages = num_pages
        self.ended_s = 0.0
        """When the last page of the last question had come, in seconds of `time.monotonic`."""

    async def load(self, question: str) -> AsyncGenerator[Page, None]:
        """The best pages, all fetched at once, in order of rank."""
        found = self._search.best(question, self._num_pages)
        fetches = [asyncio.create_task(self._client.get(page.name)) for page in found]
        try:
            for page, fetch in zip(found, fetches, strict=True):
                response = (await fetch).raise_for_status()
                if page is found[-1]:
                    self.ended_s = time.monotonic()
                yield Page(page.name, page.title, response.text)
        finally:
            await cancel_and_wait(fetches)


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())
