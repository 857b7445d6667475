"""The handler of crawl workers: extracts from the bytes of a page what is relevant to a query.

    page ──read──▶ title, Markdown ──split_markdown──▶ passages ──select──▶ relevant ones
              └──▶ links ──rank_links──▶ the most relevant first

Pages may be hostile: the kernel ends a worker that exceeds its CPU limit (`job_limits`), whatever it does. Only worker
processes import this module, which imports crawl4ai before the first page comes.
"""

import functools
import hashlib
from contextlib import suppress
from dataclasses import asdict
from typing import Any

import snowballstemmer  # type: ignore[import-untyped,unused-ignore]

import streamrag.sources.documents.html  # noqa: F401 (takes two seconds)
from streamrag.core.text import split_markdown
from streamrag.sources.documents.prune import refresh_target
from streamrag.sources.documents.reader import Content, ReadingLimits, read
from streamrag.sources.http.disk_store import DiskStore
from streamrag.sources.pages.browser import Browser
from streamrag.sources.pages.page_content import CONTENT, CleanedPage, content_version
from streamrag.sources.pages.relevant_passages import rank_links, relevant_stems, select
from streamrag.sources.pages.sitemap import read_sitemap
from streamrag.sources.workers.limits import data_bytes, job_limits

MAX_PASSAGES = 8000  # passages of a page; each is ranked with all of its headings, which may be much longer than itself
MAX_LEFT_BYTES = 256 << 20  # memory that pages may leak in a worker before it is replaced


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
        self._limits = ReadingLimits(max_page_cpu_s)
        self._max_page_memory_bytes = max_page_memory_bytes
        self._first_bytes = data_bytes()

    def is_worn(self) -> bool:
        """Whether pages have leaked too much memory, such as names in libxml2's dictionary, which it never frees."""
        return (data_bytes() or 0) > (self._first_bytes or 0) + MAX_LEFT_BYTES

    def __call__(self, job: dict[str, Any], body: bytes) -> dict[str, Any]:
        """Return the fields of a `CleanedPage`, with passages for `query` of the page at `url`, of this `kind` and
        `charset`, within `max_chars`; for a sitemap (kind "xml") those of a `SitemapUrls`."""
        with job_limits(self._limits.max_cpu_s, self._max_page_memory_bytes):
            answer = read_sitemap(job, body, self._stem) if job["kind"] == "xml" else self._answer(job, body)
            return asdict(answer)

    def _answer(self, job: dict[str, Any], body: bytes) -> CleanedPage:
        """Return what is relevant to the query on the page in `body`, in the cache, or in the browser."""
        url, kind = job["url"], job["kind"]
        if kind == "browser":
            assert self._browser
            url, html = self._browser.fetch(url)
            content = read(html.encode(errors="replace"), "html", self._limits, charset="utf-8", url=url)
        else:
            content = self._load_or_read(url, kind, job["charset"], body)
        passages = split_markdown(content.text)
        is_cut = bool(content.left_out) or len(passages) > MAX_PASSAGES
        del passages[MAX_PASSAGES:]
        query, stem = job["query"], relevant_stems(job["query"], self._stem)
        best = select(passages, query, title=content.title, max_chars=job["max_chars"], stem=stem)
        links = rank_links(content.links, query, stem)
        forwards = [*filter(None, [refresh_target(job.get("refresh", ""), url)]), *content.forwards]
        return CleanedPage(url, content.title, len(passages), best, links, is_cut, forwards)

    def _load_or_read(self, url: str, kind: str, charset: str, body: bytes) -> Content:
        """Return the content of a page from the cache, or read it and cache it unless it is a truncated PDF."""
        if self._store is None:
            return read(body, kind, self._limits, charset=charset, url=url)
        key = f"{content_version()} {kind} {charset} {hashlib.sha256(body).hexdigest()} {url}"
        with suppress(ValueError):  # missing or invalid
            return CONTENT.validate_json(self._store.get(key) or b"")
        content = read(body, kind, self._limits, charset=charset, url=url)
        if not content.left_out or kind != "pdf":  # a PDF may be truncated because the machine was busy
            self._store.put(key, CONTENT.dump_json(content))
        return content
