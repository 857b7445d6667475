"""Parsing of sitemaps, and selection of the pages whose URL has words of the query.

A sitemap lists pages or, as an index, other sitemaps, as XML or lines of text, often compressed; RSS and Atom feeds
count too. The content decides what a file is, because servers send sitemaps as any media type. Files may be hostile:
decompression, parsing and the answer are bounded, entities are not resolved, and nothing is loaded.

Source: https://www.sitemaps.org/protocol.html
"""

import io
import itertools
import re
import zlib
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin, urlsplit

from lxml import etree

from streamrag.core.text import Stem
from streamrag.sources.documents.charsets import decode, marked_encoding
from streamrag.sources.documents.prune import NO_PAGE
from streamrag.sources.http.urls import normalize_url
from streamrag.sources.pages.page_content import SitemapUrls
from streamrag.sources.pages.relevant_passages import rank_links, relevant_stems

MAX_SITEMAP_BYTES = 16 << 20  # decompressed bytes that are read
MAX_ADDRESSES = 50_000  # URLs in one sitemap; the protocol allows no more
MAX_ROOT_BYTES = 1 << 16  # bytes in which the root element is looked for
MAX_TITLE_CHARS = 200
MAX_SITEMAPS = 50  # sitemaps of one index; those whose URL has words of the query come first
MAX_MEMBERS = 16  # compressed files of which one may consist
GZIP = b"\x1f\x8b"
SPACE = b"\xef\xbb\xbf \t\r\n"
ENTITY = re.compile(rb"<!ENTITY", re.IGNORECASE)
DECLARATION = re.compile(rb"\s*<\?xml[^>]*>")
ROOT = re.compile(rb"(?>(?>\s+|<\?.*?>|<!--.*?-->|<![^-].*?>)*)<(?:[\w.-]+:)?([\w.-]+)", re.DOTALL)
"""The root element behind declarations and comments, matched without backtracking."""
ROOTS = {b"urlset", b"sitemapindex", b"rss", b"RDF", b"feed", b"url", b"sitemap", b"loc"}
"""Elements that begin a sitemap, also a damaged one, or a feed."""
LINE = re.compile(rb"[^\r\n]{1,4096}")
AMPERSAND = re.compile(rb"&(?!#?\w{1,30};)")
"""A sign that XML requires to be escaped, and that many addresses have."""
TAGS = ("{*}loc", "{*}item", "{*}entry")


def read_sitemap(job: dict[str, Any], body: bytes, stem: Stem) -> SitemapUrls:
    """Return the pages whose URL has words of the query, and up to `MAX_SITEMAPS` sitemaps, most words first.

    The job has a `url`, a `query`, and `is_cut` if `body` is truncated.
    """
    text, is_cut = _decompress(body)
    if marked_encoding(text):
        text = DECLARATION.sub(b"", decode(text).encode(), count=1)
    is_cut = is_cut or job.get("is_cut", False)
    if is_cut and not _is_xml(text):
        text = text[: text.rfind(b"\n") + 1]  # the last line may be truncated
    addresses = _addresses(text)
    pages: dict[str, str] = {}
    sitemaps: dict[str, str] = {}
    for address, is_page, title in itertools.islice(addresses, MAX_ADDRESSES):
        url = normalize_url(address, job["url"])
        if url and is_page and not NO_PAGE.search(urlsplit(url).path):
            pages[url] = title
        elif url and not is_page:
            sitemaps[url] = ""
    stem = relevant_stems(job["query"], stem)
    return SitemapUrls(
        rank_links(pages, job["query"], stem, min_matches=1),
        rank_links(sitemaps, job["query"], stem)[:MAX_SITEMAPS],
        is_cut or next(addresses, None) is not None,
        "" if pages or sitemaps else _other_content(text),
    )


def _other_content(text: bytes) -> str:
    """Return what a file without addresses is, if it is no sitemap; "" for an empty file."""
    if not _is_xml(text):
        return "text without addresses" if text.strip(SPACE) else ""
    root = ROOT.match(text[:MAX_ROOT_BYTES])
    name = root[1] if root else b""
    if name in ROOTS:
        return ""
    is_xml = DECLARATION.match(text) and name.lower() != b"html"
    return f"XML with <{name[:50].decode(errors='replace')}>" if is_xml else "text/html"


def _decompress(body: bytes) -> tuple[bytes, bool]:
    """Return the text, unzipped up to `MAX_SITEMAP_BYTES`, and whether it is incomplete; without what is damaged."""
    if not body.startswith(GZIP):
        return body, False
    text, is_whole = b"", False
    try:
        for _ in range(MAX_MEMBERS):
            decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
            text += decompressor.decompress(body, max(1, MAX_SITEMAP_BYTES - len(text)))  # 0 would be no limit
            body, is_whole = decompressor.unused_data, decompressor.eof
            if not body.startswith(GZIP):
                break
    except zlib.error:
        return text, True
    return text, not is_whole or body.startswith(GZIP)


def _is_xml(text: bytes) -> bool:
    return text.lstrip(SPACE).startswith(b"<")


def _addresses(text: bytes) -> Iterator[tuple[str, bool, str]]:
    """Yield each address of a line, `loc` or feed's entry, whether it is a page's, and the entry's title or "".

    Stop at the first error; yield nothing if entities occur.
    """
    text = text.lstrip(SPACE)  # XML allows nothing before its declaration
    if not _is_xml(text):
        for line in LINE.finditer(text):
            address = line[0].decode(errors="replace").strip()
            if address.lower().startswith(("http://", "https://")):
                yield address, True, ""
        return
    if ENTITY.search(text):  # a genuine sitemap declares no entities
        return
    options = dict.fromkeys(("recover", "remove_comments", "no_network"), True)
    options |= dict.fromkeys(("resolve_entities", "load_dtd"), False)
    elements = etree.iterparse(io.BytesIO(AMPERSAND.sub(b"&amp;", text)), tag=TAGS, **options)
    try:
        for _, element in elements:
            entry = element
            if _name(element) == "loc":
                entry = element.getparent()
                if _name(entry) != "image":
                    yield _unescaped(element.text), _name(entry) != "sitemap", ""
            else:
                title = "".join(text for title in element.iterchildren("{*}title") for text in title.itertext())
                yield _feed_link(element), True, title[:MAX_TITLE_CHARS]
            element.clear()
            while entry is not None and entry.getparent() is not None and entry.getprevious() is not None:
                del entry.getparent()[0]  # frees memory: drops the elements read so far
    except etree.XMLSyntaxError:  # keep the URLs before the error
        return


def _name(element: Any) -> str:
    """Return the name of an element without its namespace, or a prefix that is not declared; "" for None."""
    return "" if element is None else re.split("[}:]", element.tag)[-1]


def _unescaped(address: str | None) -> str:
    """Return an address without white space around it, and without escapes in CDATA, which stay there."""
    return (address or "").strip().replace("&amp;", "&")


def _feed_link(entry: Any) -> str:
    """Return the address of an RSS item, by its link or else its permanent name, or of an Atom entry; or ""."""
    for link in entry.iterchildren("{*}link"):
        if address := _unescaped(link.text):
            return address
        if link.get("rel", "alternate") == "alternate" and (address := link.get("href", "")):
            return str(urljoin(link.base or "", address))
    guid = entry.find("{*}guid")
    return "" if guid is None or guid.get("isPermaLink") == "false" else _unescaped(guid.text)
