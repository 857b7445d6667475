"""Cleaning pages with crawl4ai and cutting them to what matters for a query: the inside of a crawl worker.

    HTML ──crawl4ai──▶ Markdown, title ──relevance──▶ what is relevant          and the links, the most promising first

Importing this takes two seconds, writes to CRAWL4_AI_BASE_DIRECTORY and reads a `.env` file: worker processes do it.
"""

import asyncio
import functools
import itertools
import math
import os
import re
import socket
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any
from urllib.parse import urljoin, urlsplit

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
from lxml import html as lxml_html
from rank_bm25 import BM25Okapi

from streamrag.errors import UnreachableError
from streamrag.sources.addresses import normalize_url
from streamrag.sources.fetch import UnusablePageError
from streamrag.sources.relevance import relevant_terms, select, split_markdown, terms

__all__ = ["PageCleaner", "bm25", "decode"]

MAX_LINKS = 500
MAX_LINKS_CHARS = 50_000
"""Together. Reading the answer must not hold up the caller's event loop."""

MAX_TITLE_CHARS = 300

NOT_CONTENT = """
    //script | //style | //template | //iframe | //svg | //comment() | //img | //picture | //nav
    | //footer | //aside[not(ancestor::main)]
    | //header[not(ancestor::main or ancestor::article)] | //button | //select | //textarea | //input | //dialog
    | //*[@role='navigation' or @role='search' or @role='banner' or @role='contentinfo' or @hidden
          or @aria-hidden='true' or contains(@class, 'headerlink')]
"""
"""Not `form`: whole sites stand in one."""

XML_DECLARATION = re.compile(r"^\s*<\?xml[^>]*>")
"""lxml refuses text that has one, since text has no encoding any more."""

NO_PAGE = re.compile(
    r"\.(7z|avi|bin|bz2|css|csv|deb|dmg|docx?|epub|exe|gif|gz|ico|iso|jar|jpe?g|js|json|mp[34]|msi|ods|odt|og[gv]|pdf|png"
    r"|pptx?|rar|rpm|rss|svg|tar|tgz|wav|web[mp]|whl|woff2?|xlsx?|xml|xz|zip)$",
    re.IGNORECASE,
)


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
    """crawl4ai's, after what is not content has been taken out, and the page's links have been noted.

    crawl4ai's `excluded_tags` and `exclude_all_images` lose the text that follows an excluded element, its links do
    not include those of excluded elements, and it takes the slash from the end of a link's path.
    """

    def __init__(self) -> None:
        super().__init__()
        self.links: dict[str, str] = {}
        """Address to text, those of the content first."""

    def scrap(self, url: str, html: str, **options: Any) -> Any:
        document = lxml_html.document_fromstring(XML_DECLARATION.sub("", html))
        bases = document.xpath("//base/@href")
        base = urljoin(url, bases[0]) if bases else url
        removed = []
        for element in document.xpath(NOT_CONTENT):
            removed += element.iter("a")
            if element.getparent() is not None:
                element.drop_tree()
        self.links = {}
        for anchor in (*document.iter("a"), *removed):
            address = normalize_url(anchor.get("href", "#"), base)
            if address and not NO_PAGE.search(urlsplit(address).path):
                self.links.setdefault(address, anchor.text_content()[:200])
        scraped = super().scrap(url, lxml_html.tostring(document, encoding="unicode"), **options)
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


class PageCleaner:
    """Answers the jobs of `WebSource`: see `__call__`.

    With `cdp_url`, pages are fetched by the browser there, in a context of their own that the user's sessions and tabs
    are no part of.
    """

    def __init__(self, *, scratch: str, user_agent: str, page_timeout_s: float, cdp_url: str | None) -> None:
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

    def __call__(self, job: dict[str, Any], body: bytes) -> dict[str, Any]:
        """`url`, `kind` ("html", "text" or "browser"), `charset`, `query`, `max_chars` to what the page has for it.

        The answer's `url` is where a browser was led to; `num_passages` counts the irrelevant ones too.
        """
        url, title, markdown = job["url"], "", ""
        self._scraper.links = {}
        if job["kind"] == "text":
            markdown = decode(body, job["charset"])
        else:
            self._given.html = decode(body, job["charset"])
            result = self._runner.run(self._crawler.arun(url, config=self._config))
            self._check(result)
            url = result.redirected_url or url
            markdown = result.markdown.raw_markdown
            title = " ".join((result.metadata.get("title") or "").split())[:MAX_TITLE_CHARS]
        passages = split_markdown(markdown)
        chosen = select(passages, job["query"], title=title, max_chars=job["max_chars"], score=bm25, stem=self._stem)
        return {
            "url": url,
            "title": title,
            "num_passages": len(passages),
            "passages": [[passage.headings, passage.blocks] for passage in chosen],
            "links": self._most_promising(job["query"]),
        }

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

    def _most_promising(self, query: str) -> list[str]:
        """The page's links, those first whose text or path has the most of the query's terms."""
        wanted = set(relevant_terms(query, self._stem))

        def num_matches(link: tuple[str, str]) -> int:
            address, text = link
            return len(wanted.intersection(terms(f"{text} {urlsplit(address).path}", self._stem)))

        links = [address for address, _ in sorted(self._scraper.links.items(), key=num_matches, reverse=True)]
        ends = itertools.accumulate(map(len, links))
        return [address for address, end in zip(links[:MAX_LINKS], ends, strict=False) if end <= MAX_LINKS_CHARS]
