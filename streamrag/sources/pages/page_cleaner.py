"""The handler of crawl workers: extracts from the bytes of a page what is relevant to a query.

    HTML ──prune──▶ main content ──crawl4ai──▶ Markdown, title ──relevance──▶ relevant passages
               └────▶ links, the most relevant first

Pages may be hostile. crawl4ai gets small and well-formed HTML, because some of its regular expressions and loops take
time quadratic in raw pages; and the kernel ends a worker that exceeds its CPU limit (`job_limits`), whatever it does.

Importing this module takes two seconds, writes to CRAWL4_AI_BASE_DIRECTORY and reads a `.env` file, so only worker
processes import it.
"""

import functools
import hashlib
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import snowballstemmer  # type: ignore[import-untyped,unused-ignore]
from crawl4ai import CrawlerRunConfig, DefaultMarkdownGenerator, LXMLWebScrapingStrategy, NoTableExtraction
from rank_bm25 import BM25Okapi

from streamrag.core.text import is_blank, readable, split_markdown
from streamrag.sources.http.disk_store import DiskStore
from streamrag.sources.pages.browser import Browser
from streamrag.sources.pages.page_content import JSON, CleanedPage, PageContent, content_version
from streamrag.sources.pages.prune import MAX_CONTENT_CHARS, prune, refresh_target
from streamrag.sources.pages.relevant_passages import rank_links, relevant_stems, select
from streamrag.sources.pages.sitemap import read_sitemap
from streamrag.sources.workers.charsets import decode
from streamrag.sources.workers.limits import data_bytes, job_limits
from streamrag.sources.workers.pdf import read_pdf

MAX_PASSAGES = 8000  # passages of a page; each is ranked with all of its headings, which may be much longer than itself
MAX_LEFT_BYTES = 256 << 20  # memory that pages may leak in a worker before it is replaced
MAX_TITLE_CHARS = 300

SCRAPER = LXMLWebScrapingStrategy()
SCRAPER_OPTIONS = {**vars(CrawlerRunConfig(table_extraction=NoTableExtraction())), "url": ""}
GENERATOR = DefaultMarkdownGenerator(
    options={
        **dict.fromkeys(("ignore_links", "ignore_images", "ignore_emphasis"), True),
        "body_width": 0,
        "single_line_break": False,
    }
)
GENERATOR_ERRORS = ("Error converting HTML to markdown:", "Error in markdown generation:")
"""Beginnings of crawl4ai's output when it fails."""


class _Bm25(BM25Okapi):  # type: ignore[misc]
    """BM25 with Lucene's inverse document frequency, which is never negative.

    Okapi's is negative for a word of more than half of the documents; rank-bm25 replaces that by a quarter of the
    average, which on a small page is negative too, so that the best passages would come last.
    Source: https://lucene.apache.org/core/9_11_0/core/org/apache/lucene/search/similarities/BM25Similarity.html
    """

    def _calc_idf(self, nd: Mapping[str, int]) -> None:
        for word, num_documents in nd.items():
            self.idf[word] = math.log(1 + (self.corpus_size - num_documents + 0.5) / (num_documents + 0.5))


def bm25(documents: Sequence[Sequence[str]], query: Sequence[str]) -> list[float]:
    """Return the nonnegative BM25 score of each document for `query`, both as terms."""
    return [float(score) for score in _Bm25(documents).get_scores(query)] if any(documents) else [0.0] * len(documents)


class PageCleaner:
    """A handler for the jobs of `WebSource`. With `cdp_url`, the browser there fetches the pages."""

    def __init__(
        self,
        *,
        user_agent: str,
        page_timeout_s: float,
        max_page_cpu_s: float,
        max_page_memory_bytes: int,
        cdp_url: str | None,
        cache_folder: str | None = None,
    ) -> None:
        self._store = DiskStore(cache_folder) if cache_folder else None
        self._stem = functools.lru_cache(maxsize=1 << 16)(snowballstemmer.stemmer("english").stemWord)
        self._browser = Browser(cdp_url, user_agent=user_agent, page_timeout_s=page_timeout_s) if cdp_url else None
        self._max_page_cpu_s = max_page_cpu_s
        self._max_page_memory_bytes = max_page_memory_bytes
        self._first_bytes = data_bytes()

    def is_worn(self) -> bool:
        """Whether pages have leaked too much memory, such as names in libxml2's dictionary, which it never frees."""
        return (data_bytes() or 0) > (self._first_bytes or 0) + MAX_LEFT_BYTES

    def __call__(self, job: dict[str, Any], body: bytes) -> dict[str, Any]:
        """Return the fields of a `CleanedPage`, with passages for `query` of the page at `url`, of this `kind` and
        `charset`, within `max_chars`; for a sitemap (kind "xml") those of a `SitemapUrls`."""
        with job_limits(self._max_page_cpu_s, self._max_page_memory_bytes):
            answer = read_sitemap(job, body, self._stem) if job["kind"] == "xml" else self._answer(job, body)
            return asdict(answer)

    def _answer(self, job: dict[str, Any], body: bytes) -> CleanedPage:
        """Return what is relevant to the query on the page in `body`, in the cache, or in the browser."""
        content = self._load_or_read(job, body)
        passages, title = split_markdown(readable(content.text[:MAX_CONTENT_CHARS])), readable(content.title)
        is_cut = content.is_cut or len(content.text) > MAX_CONTENT_CHARS or len(passages) > MAX_PASSAGES
        del passages[MAX_PASSAGES:]
        query, stem = job["query"], relevant_stems(job["query"], self._stem)
        best = select(passages, query, title=title, max_chars=job["max_chars"], score=bm25, stem=stem)
        links = rank_links(content.links, query, stem)
        refreshed = refresh_target(job.get("refresh", ""), content.url)
        forwards = [*filter(None, [refreshed]), *content.forwards]
        return CleanedPage(content.url, title, len(passages), best, links, is_cut, forwards)

    def _load_or_read(self, job: dict[str, Any], body: bytes) -> PageContent:
        """Return the page's content from the cache, or read and cache it; not a browser's page or a truncated PDF."""
        if self._store is None or job["kind"] == "browser":
            return self._read(job, body)
        key = f"{content_version()} {job['kind']} {job['charset']} {hashlib.sha256(body).hexdigest()} {job['url']}"
        with suppress(ValueError):  # missing or invalid
            return JSON.validate_json(self._store.get(key) or b"")
        content = self._read(job, body)
        if not content.is_cut or job["kind"] == "html":  # a PDF may be truncated because the machine was busy
            self._store.put(key, JSON.dump_json(content))
        return content

    def _read(self, job: dict[str, Any], body: bytes) -> PageContent:
        """Return the content of a text, PDF or HTML body, or of the page that the browser fetches from the URL."""
        url, kind = job["url"], job["kind"]
        if kind == "text":
            return PageContent(url, "", decode(body, job["charset"])[: MAX_CONTENT_CHARS + 1], {}, False)
        if kind == "pdf":
            document = read_pdf(body, max_chars=MAX_CONTENT_CHARS, max_cpu_s=self._max_page_cpu_s)
            return PageContent(url, _clean_title(document.title), document.text, {}, bool(document.left_out))
        if kind == "browser":
            assert self._browser
            url, html = self._browser.fetch(url)
        else:
            html = decode(body, job["charset"])
        pruned = prune(url, html)
        title, text = _to_markdown(url, pruned.html)
        forwards = pruned.forwards + ([pruned.frame] if pruned.frame and is_blank(text) else [])
        return PageContent(url, title, text, pruned.links, pruned.is_cut, forwards)


def _to_markdown(url: str, html: str) -> tuple[str, str]:
    """Return the title and the Markdown of a pruned page. Raises ValueError if crawl4ai cannot parse it."""
    scraped = SCRAPER.scrap(html=html, **{**SCRAPER_OPTIONS, "url": url})
    if not scraped.success:
        raise ValueError("crawl4ai cannot parse it")
    text = GENERATOR.generate_markdown(scraped.cleaned_html, base_url=url, citations=False).raw_markdown
    if text.startswith(GENERATOR_ERRORS):
        raise ValueError(text)
    return _clean_title(scraped.metadata.get("title") or ""), text


def _clean_title(title: str) -> str:
    return " ".join(title.split())[:MAX_TITLE_CHARS]
