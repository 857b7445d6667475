"""Cleaning pages with crawl4ai and cutting them to what matters for a query: the inside of a crawl worker.

    HTML ──prune──▶ content only ──crawl4ai──▶ Markdown, title ──relevance──▶ what is relevant
               └────▶ the links, the most promising first

Pages are written by strangers. What crawl4ai is given is small and well-formed, because some of its regular expressions
and loops take time that is quadratic in what raw pages may hold; and the kernel ends a worker that computes for too
long over one page (`_cpu_limit`), whatever it is stuck in.

Importing this takes two seconds, writes to CRAWL4_AI_BASE_DIRECTORY and reads a `.env` file: worker processes do it.
"""

import asyncio
import codecs
import functools
import hashlib
import math
import os
import re
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

import snowballstemmer  # type: ignore[import-untyped,unused-ignore]
from crawl4ai import (
    AsyncWebCrawler,
    BrowserConfig,
    CacheMode,
    CrawlerRunConfig,
    DefaultMarkdownGenerator,
    LXMLWebScrapingStrategy,
    NoTableExtraction,
)
from crawl4ai.async_crawler_strategy import AsyncCrawlerStrategy
from crawl4ai.models import AsyncCrawlResponse
from rank_bm25 import BM25Okapi

from streamrag.choice import split_markdown
from streamrag.errors import UnreachableError
from streamrag.sources.http.disk_store import DiskStore
from streamrag.sources.http.fetched import UnusablePageError
from streamrag.sources.pages.cleaned import Cleaned, cleaned_by
from streamrag.sources.pages.documents import read_pdf
from streamrag.sources.pages.links import most_promising
from streamrag.sources.pages.prune import MAX_CONTENT_CHARS, Pruned, prune
from streamrag.sources.pages.relevant_passages import relevant_stems, select
from streamrag.sources.pages.sitemap import find_pages
from streamrag.sources.workers.memory_limit import data_bytes, limit_memory
from streamrag.sources.workers.worker_main import OUT_OF_MEMORY

MAX_TITLE_CHARS = 300

MAX_PASSAGES = 8000
"""Passages of a page. Each is ranked with all of its headings, which may be much longer than itself."""

MAX_LEFT_BYTES = 256 << 20
"""Bytes that pages may leave behind in a worker before it is replaced."""

NOT_OF_PAGES = {"idna", "punycode", "raw-unicode-escape", "unicode-escape", "utf-7"}
"""Python's codecs that are no charset of any page. Decoding punycode takes quadratic time."""

SETTLED = """js:() => {
    const now = performance.now(), size = document.body ? document.body.innerText.length : 0
    const last = window.streamrag ??= {size, begin: now, since: now}
    if (size !== last.size) { last.size = size; last.since = now }
    return now - last.begin > 3000 || (document.readyState === "complete" && size > 0 && now - last.since > 300)
}"""
"""Scripts have stopped writing text, or have had three seconds for it."""


def decode(body: bytes, charset: str) -> str:
    """The text of a page: in the charset that the server, a byte order mark or the page itself declares, or a guess."""
    marks = {b"\xef\xbb\xbf": "utf-8", b"\xff\xfe": "utf-16", b"\xfe\xff": "utf-16"}
    mark = next((charset for mark, charset in marks.items() if body.startswith(mark)), "")
    declared = re.search(rb"<meta[^>]+charset\s*=\s*[\"']?([\w-]+)", body[:4096], re.IGNORECASE)
    for name in filter(None, (mark, charset.lower(), declared[1].decode().lower() if declared else "")):
        # Browsers read Latin-1 as the Windows code page that extends it, and so people write it.
        codec = "windows-1252" if name in ("iso-8859-1", "latin-1", "latin1", "ascii", "us-ascii") else name
        with suppress(LookupError, UnicodeError):
            if codecs.lookup(codec).name not in NOT_OF_PAGES:
                return body.decode(codec, errors="replace").removeprefix("\ufeff")
    with suppress(UnicodeError):
        return body.decode()
    return body.decode("windows-1252", errors="replace")


class _Bm25(BM25Okapi):  # type: ignore[misc]
    """BM25 with Lucene's weights of words, which are never negative.

    Okapi's weight is negative for a word of more than half of the documents, and rank-bm25 puts a quarter of the
    average weight in its place, which on a small page is negative too: its best passages would come last.
    Source: https://lucene.apache.org/core/9_11_0/core/org/apache/lucene/search/similarities/BM25Similarity.html
    """

    def _calc_idf(self, nd: Mapping[str, int]) -> None:
        for word, num_documents in nd.items():
            self.idf[word] = math.log(1 + (self.corpus_size - num_documents + 0.5) / (num_documents + 0.5))


def bm25(documents: Sequence[Sequence[str]], query: Sequence[str]) -> list[float]:
    """One score for each document (its terms), at least 0; larger is better."""
    return [float(score) for score in _Bm25(documents).get_scores(query)] if any(documents) else [0.0] * len(documents)


class _GivenPage(AsyncCrawlerStrategy):  # type: ignore[misc]
    """Gives crawl4ai a page that was fetched already."""

    def __init__(self) -> None:
        self.html = ""

    async def __aenter__(self) -> "_GivenPage":
        return self

    async def __aexit__(self, *_: object) -> None:
        pass

    async def crawl(self, url: str, **_: object) -> AsyncCrawlResponse:
        # A "placeholder" is exempt from the check for bot walls, which takes every short page for one.
        return AsyncCrawlResponse(
            html=self.html, response_headers={}, status_code=200, redirected_url=url, placeholder_html=True
        )


class _Scraper(LXMLWebScrapingStrategy):  # type: ignore[misc]
    """crawl4ai's, of pages that are pruned, or are here because a browser has fetched them."""

    def __init__(self) -> None:
        super().__init__()
        self.pruned: Pruned | None = None
        """What is left of the page that is being read."""

    def scrap(self, url: str, html: str, **options: Any) -> Any:
        self.pruned = self.pruned or prune(url, html)
        scraped = super().scrap(url, self.pruned.html, **options)
        if not scraped.success:  # the text is then crawl4ai's error message
            raise ValueError("crawl4ai cannot parse it")
        return scraped


class _MarkdownGenerator(DefaultMarkdownGenerator):  # type: ignore[misc]
    """crawl4ai's, without its list of links, and without its error messages in place of text."""

    def __init__(self) -> None:
        flags = ("ignore_links", "ignore_images", "ignore_emphasis")
        super().__init__(options={**dict.fromkeys(flags, True), "body_width": 0, "single_line_break": False})

    def generate_markdown(self, *args: Any, **options: Any) -> Any:
        markdown = super().generate_markdown(*args, **{**options, "citations": False})
        if markdown.raw_markdown.startswith(("Error converting HTML to markdown:", "Error in markdown generation:")):
            raise ValueError(markdown.raw_markdown)
        return markdown


def _check_listens(cdp_url: str) -> None:
    """crawl4ai takes seconds to notice that nobody is there."""
    parts = urlsplit(cdp_url)
    port = parts.port or (443 if parts.scheme in ("https", "wss") else 80)
    try:
        socket.create_connection((parts.hostname, port), timeout=5).close()
    except OSError as error:
        raise UnreachableError(f"nothing listens at {cdp_url}: {error}") from None


@contextmanager
def _cpu_limit(limit_s: float) -> Iterator[None]:
    """Ends this process, by SIGPROF, when it has computed for longer: nothing that is written in C listens to less."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class PageCleaner:
    """Answers the jobs of `WebSource`: see `__call__`.

    With `cdp_url`, pages are fetched by the browser there, in a context of their own, apart from the user's sessions
    and tabs.
    """

    def __init__(
        self,
        *,
        scratch: str,
        user_agent: str,
        page_timeout_s: float,
        max_page_cpu_s: float,
        max_page_memory_bytes: int,
        cdp_url: str | None,
        cache_folder: str | None = None,
        max_cache_bytes: int = 0,
    ) -> None:
        self._store = DiskStore(cache_folder, max_cache_bytes) if cache_folder else None
        # crawl4ai opens a SQLite file there at every start: one for each worker, so that they do not wait for a lock.
        os.environ["CRAWL4_AI_BASE_DIRECTORY"] = tempfile.mkdtemp(dir=scratch)
        self._stem = functools.lru_cache(maxsize=1 << 16)(snowballstemmer.stemmer("english").stemWord)
        self._given = _GivenPage()
        self._scraper = _Scraper()
        self._config = CrawlerRunConfig(
            cache_mode=CacheMode.BYPASS,
            markdown_generator=_MarkdownGenerator(),
            page_timeout=int(page_timeout_s * 1000),
            scraping_strategy=self._scraper,
            table_extraction=NoTableExtraction(),
            verbose=False,
        )
        browser: dict[str, Any] = {}
        if cdp_url:
            self._config.wait_for = SETTLED
            browser = {"browser_mode": "custom", "cdp_url": cdp_url, "cdp_cleanup_on_close": True}
            browser["create_isolated_context"] = True  # else it takes over the user's sessions, and any open tab
            _check_listens(cdp_url)
        self._runner = asyncio.Runner()
        self._crawler = AsyncWebCrawler(
            crawler_strategy=None if cdp_url else self._given,
            config=BrowserConfig(user_agent=user_agent, verbose=False, **browser),
            base_directory=os.environ["CRAWL4_AI_BASE_DIRECTORY"],
        )
        self._runner.run(self._crawler.start())
        self._max_page_cpu_s = max_page_cpu_s
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores it has us ignore it too
        self._max_page_memory_bytes = max_page_memory_bytes
        self._first_bytes = data_bytes()

    def is_worn(self) -> bool:
        """Whether pages have left more behind than they may, such as their names in libxml2's dictionary, for good."""
        return (data_bytes() or 0) > (self._first_bytes or 0) + MAX_LEFT_BYTES

    def __call__(self, job: dict[str, Any], body: bytes) -> dict[str, Any]:
        """`url`, `kind` (a `fetched.Kind`), `charset`, `query`, `max_chars` to what the page has for it.

        The answer's `url` is where a browser was led to; `num_passages` counts the irrelevant ones too. A sitemap
        ("xml") has another answer: see `find_pages`.
        """
        try:
            limit_memory(self._max_page_memory_bytes)  # anew, because of what earlier pages have left behind
            with _cpu_limit(self._max_page_cpu_s):
                return find_pages(job, body, self._stem) if job["kind"] == "xml" else self._clean(job, body)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # what it still holds is not known: the next page gets a new worker

    def _clean(self, job: dict[str, Any], body: bytes) -> dict[str, Any]:
        cleaned = self._kept(job, body)
        passages = split_markdown(cleaned.text[:MAX_CONTENT_CHARS])
        is_cut = cleaned.is_cut or len(cleaned.text) > MAX_CONTENT_CHARS or len(passages) > MAX_PASSAGES
        del passages[MAX_PASSAGES:]
        stem = relevant_stems(job["query"], self._stem)
        chosen = select(passages, job["query"], title=cleaned.title, max_chars=job["max_chars"], score=bm25, stem=stem)
        return {
            "url": cleaned.url,
            "title": cleaned.title,
            "num_passages": len(passages),
            "passages": [[passage.headings, passage.blocks] for passage in chosen],
            "links": most_promising(cleaned.links, job["query"], stem),
            "is_cut": is_cut,
        }

    def _kept(self, job: dict[str, Any], body: bytes) -> Cleaned:
        """As `_read`, or what was kept of reading the very same."""
        if self._store is None or job["kind"] == "browser":
            return self._read(job, body)
        key = f"{cleaned_by()} {job['kind']} {job['charset']} {hashlib.sha256(body).hexdigest()} {job['url']}"
        kept = self._store.get(key)
        with suppress(ValueError):
            if kept is not None:
                return Cleaned.from_bytes(kept)
        cleaned = self._read(job, body)
        if not cleaned.is_cut or job["kind"] == "html":  # a PDF may be cut because the machine was busy
            self._store.put(key, cleaned.to_bytes())
        return cleaned

    def _read(self, job: dict[str, Any], body: bytes) -> Cleaned:
        """What a page says, whatever the query is."""
        url = job["url"]
        if job["kind"] == "text":
            return Cleaned(url, "", decode(body, job["charset"])[: MAX_CONTENT_CHARS + 1], {}, False)
        if job["kind"] == "pdf":
            document = read_pdf(body, max_chars=MAX_CONTENT_CHARS, max_cpu_s=self._max_page_cpu_s)
            return Cleaned(url, document.title[:MAX_TITLE_CHARS], document.text, {}, document.is_cut)
        self._scraper.pruned = None
        if job["kind"] == "html":
            self._scraper.pruned = prune(url, decode(body, job["charset"]))
            self._given.html = self._scraper.pruned.html
        result = self._runner.run(self._crawler.arun(url, config=self._config))
        self._check(result)
        pruned = self._scraper.pruned
        title = " ".join((result.metadata.get("title") or "").split())[:MAX_TITLE_CHARS]
        links, is_cut = (pruned.links, pruned.is_cut) if pruned else ({}, False)
        return Cleaned(result.redirected_url or url, title, result.markdown.raw_markdown, links, is_cut)

    def _check(self, result: Any) -> None:
        status, message = result.status_code or 200, result.error_message or ""
        if status >= 400:
            raise UnusablePageError(f"the server answers HTTP {status}")
        takes_it_for_a_wall = message.startswith("Blocked by anti-bot protection") and result.markdown
        if result.success or takes_it_for_a_wall:  # which it does with short pages
            return
        browser = getattr(getattr(self._crawler.crawler_strategy, "browser_manager", None), "browser", None)
        if browser and not browser.is_connected():
            sys.exit("the browser has gone away")  # ends this worker: the next one connects anew
        network = re.search(r"net::ERR_(NAME|CONNECTION|ADDRESS|INTERNET|CERT|SSL|TIMED_OUT|TUNNEL|PROXY)\w*", message)
        if network:
            raise UnreachableError(network[0])
        cause = re.search(r"net::\w+|Timeout \d+ms exceeded|(?<=Error: ).+", message)
        raise ValueError(cause[0][:200] if cause else message[:200])
