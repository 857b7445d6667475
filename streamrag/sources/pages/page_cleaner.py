"""The handler of crawl workers: from the bytes of a page to what matters for a query.

    HTML ──prune──▶ content only ──crawl4ai──▶ Markdown, title ──relevance──▶ what is relevant
               └────▶ the links, the most promising first

Pages may be hostile. What crawl4ai is given is small and well-formed, because some of its regular expressions and loops
take time that is quadratic in what raw pages may hold; and the kernel ends a worker that computes for too long over one
page (`_cpu_limit`), whatever it is stuck in.

Importing this takes two seconds, writes to CRAWL4_AI_BASE_DIRECTORY and reads a `.env` file: worker processes do it.
"""

import functools
import hashlib
import math
import os
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import snowballstemmer  # type: ignore[import-untyped,unused-ignore]
from rank_bm25 import BM25Okapi

from streamrag.query.relevance import split_markdown
from streamrag.sources.http.disk_store import DiskStore
from streamrag.sources.pages.browser import Browser
from streamrag.sources.pages.charsets import decode
from streamrag.sources.pages.links import rank_links
from streamrag.sources.pages.markdown import clean_title, to_markdown
from streamrag.sources.pages.page_content import JSON, PageContent, content_version
from streamrag.sources.pages.pdf import read_pdf
from streamrag.sources.pages.prune import MAX_CONTENT_CHARS, prune
from streamrag.sources.pages.relevant_passages import relevant_stems, select
from streamrag.sources.pages.sitemap import read_sitemap
from streamrag.sources.workers.memory_limit import data_bytes, limit_memory
from streamrag.sources.workers.worker_main import OUT_OF_MEMORY

MAX_PASSAGES = 8000  # passages of a page. Each is ranked with all of its headings, which may be much longer than itself
MAX_LEFT_BYTES = 256 << 20  # bytes that pages may leave behind in a worker before it is replaced


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
    """Return a score for each document (its terms), at least 0; larger is better."""
    return [float(score) for score in _Bm25(documents).get_scores(query)] if any(documents) else [0.0] * len(documents)


@contextmanager
def _cpu_limit(limit_s: float) -> Iterator[None]:
    """End this process by SIGPROF when it has computed for longer: nothing written in C listens to less."""
    signal.setitimer(signal.ITIMER_PROF, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


class PageCleaner:
    """A handler of the jobs of `WebSource`; with `cdp_url`, the browser there fetches the pages."""

    def __init__(
        self,
        *,
        user_agent: str,
        page_timeout_s: float,
        max_page_cpu_s: float,
        max_page_memory_bytes: int,
        cdp_url: str | None,
        cache_folder: str | None = None,
        max_cache_bytes: int = 0,
    ) -> None:
        self._store = DiskStore(cache_folder, max_cache_bytes) if cache_folder else None
        self._stem = functools.lru_cache(maxsize=1 << 16)(snowballstemmer.stemmer("english").stemWord)
        self._browser = Browser(cdp_url, user_agent=user_agent, page_timeout_s=page_timeout_s) if cdp_url else None
        self._max_page_cpu_s = max_page_cpu_s
        self._max_page_memory_bytes = max_page_memory_bytes
        signal.signal(signal.SIGPROF, signal.SIG_DFL)  # a parent that ignores it has us ignore it too
        self._first_bytes = data_bytes()

    def is_worn(self) -> bool:
        """Whether pages have left more behind than they may, such as their names in libxml2's dictionary, for good."""
        return (data_bytes() or 0) > (self._first_bytes or 0) + MAX_LEFT_BYTES

    def __call__(self, job: dict[str, Any], body: bytes) -> dict[str, Any]:
        """Return what the page at `url`, of this `kind` and `charset`, has for the `query`, in `max_chars`.

        The answer's `url` is where a browser was led to; `num_passages` counts the irrelevant ones too. A sitemap
        ("xml") has another answer: see `read_sitemap`.
        """
        try:
            limit_memory(self._max_page_memory_bytes)  # anew, because of what earlier pages have left behind
            with _cpu_limit(self._max_page_cpu_s):
                return read_sitemap(job, body, self._stem) if job["kind"] == "xml" else self._answer(job, body)
        except MemoryError:
            os._exit(OUT_OF_MEMORY)  # what it still holds is not known: the next page gets a new worker

    def _answer(self, job: dict[str, Any], body: bytes) -> dict[str, Any]:
        content = self._load_or_read(job, body)
        passages = split_markdown(content.text[:MAX_CONTENT_CHARS])
        is_cut = content.is_cut or len(content.text) > MAX_CONTENT_CHARS or len(passages) > MAX_PASSAGES
        del passages[MAX_PASSAGES:]
        query, stem = job["query"], relevant_stems(job["query"], self._stem)
        best = select(passages, query, title=content.title, max_chars=job["max_chars"], score=bm25, stem=stem)
        return {
            "url": content.url,
            "title": content.title,
            "num_passages": len(passages),
            "passages": [[passage.headings, passage.blocks] for passage in best],
            "links": rank_links(content.links, query, stem),
            "is_cut": is_cut,
        }

    def _load_or_read(self, job: dict[str, Any], body: bytes) -> PageContent:
        if self._store is None or job["kind"] == "browser":
            return self._read(job, body)
        key = f"{content_version()} {job['kind']} {job['charset']} {hashlib.sha256(body).hexdigest()} {job['url']}"
        with suppress(ValueError):  # there is none, or it is no content
            return JSON.validate_json(self._store.get(key) or b"")
        content = self._read(job, body)
        if not content.is_cut or job["kind"] == "html":  # a PDF may be cut because the machine was busy
            self._store.put(key, JSON.dump_json(content))
        return content

    def _read(self, job: dict[str, Any], body: bytes) -> PageContent:
        url, kind = job["url"], job["kind"]
        if kind == "text":
            return PageContent(url, "", decode(body, job["charset"])[: MAX_CONTENT_CHARS + 1], {}, False)
        if kind == "pdf":
            document = read_pdf(body, max_chars=MAX_CONTENT_CHARS, max_cpu_s=self._max_page_cpu_s)
            return PageContent(url, clean_title(document.title), document.text, {}, document.is_cut)
        if kind == "browser":
            assert self._browser
            url, html = self._browser.fetch(url)
        else:
            html = decode(body, job["charset"])
        pruned = prune(url, html)
        title, text = to_markdown(url, pruned.html)
        return PageContent(url, title, text, pruned.links, pruned.is_cut)
