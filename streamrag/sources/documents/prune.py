"""Reduction of a page to its content, before crawl4ai converts it.

Takes time linear in the page's length, because pages may be hostile.
"""

import itertools
import re
from typing import Any
from urllib.parse import urlsplit

from lxml import etree
from lxml import html as lxml_html

from streamrag.core.text import is_blank
from streamrag.sources.documents.main_content import DROPPED, HEADINGS, keep_main_content
from streamrag.sources.documents.reader import TOO_LONG, Content, ReadingLimits
from streamrag.sources.http.urls import MAX_URL_CHARS, normalize_url

MAX_ANCHORS = 10_000
MAX_FORWARDS = 10  # frames of a page that are followed
MAX_REFRESH_S = 30  # a page that refreshes later is there to be read
REFRESH = re.compile(
    r"\s*(?=[\d.])(\d*+)[\d.]*+(?:\s*[;,]\s*|\s+)(?:url\s*=\s*)?([\"']?)(.+)", re.IGNORECASE | re.DOTALL
)
MAX_LINK_ELEMENTS = 20  # elements within a link that are read for its text, as links can be nested
NOT_CONTENT = {"script", "style", "template", "iframe", "svg", "img", "picture", "nav", "footer", "button", "select"}
NOT_CONTENT |= {"textarea", "input", "dialog", "noscript", "noframes", "link", "meta", "title"}
"""Not `form`, which on some sites contains the whole page."""

EMPTY = ".//*[self::dt or self::li or self::pre or self::h1 or self::h2 or self::h3][not(normalize-space())]"
"""Elements of which crawl4ai would write a sign for nothing."""

FENCED = "streamrag-fenced"
"""A listing with the signs between which crawl4ai would write it."""

INLINE_CODE = ".//code[not(ancestor::pre or .//pre)]//text()[contains(., '  ') or contains(., '\n')]"
"""Text in which white space is one space, as browsers show it; crawl4ai would keep it."""

NOT_CONTENT_ROLES = {"navigation", "search", "banner", "contentinfo"}

CONTENT_ATTRIBUTES = {"class", "id", "itemprop", "role", "style"}  # what extractors choose content by
READ_ATTRIBUTES = {"abbr": {"title"}, "ol": {"start"}}
MAX_ATTRIBUTE_CHARS = 300

NO_PAGE = re.compile(
    r"\.(7z|avi|bin|bz2|css|csv|deb|dmg|docx?|epub|exe|gif|gz|ico|iso|jar|jpe?g|js|json|mp[34]|msi|ods|odt|og[gv]|png"
    r"|pptx?|rar|rpm|rss|svg|tar|tgz|wav|web[mp]|whl|woff2?|xlsx?|xml|xz|zip)$",
    re.IGNORECASE,
)


def prune(url: str, html: str, limits: ReadingLimits) -> Content:
    """Return the main content of a page, as HTML, and the links to pages in the whole page.

    The HTML keeps no attributes but `READ_ATTRIBUTES`. Links in the content come first; links to files such as
    `.zip` are left out. crawl4ai's own `excluded_tags` lose the text after an excluded element, and its links lack
    trailing slashes and the links of excluded elements. Raises MemoryError if lxml cannot parse.
    """
    # As bytes: in a str, lxml first searches for an XML declaration, with a regular expression quadratic in spaces.
    parser = lxml_html.HTMLParser(encoding="utf-8")
    try:
        body = lxml_html.document_fromstring(html.encode(errors="replace"), parser=parser)
    except etree.XMLSyntaxError:  # lxml accepts any HTML, so it is out of memory
        raise MemoryError from None
    last_error = parser.error_log.last_error
    is_nested_too_deeply = last_error is not None and last_error.level == etree.ErrorLevels.FATAL
    for behind in list(body.itersiblings(etree.Element)):  # elements and text after </html>
        body.append(behind)
    is_cut = _truncate(body, limits.max_elements) or is_nested_too_deeply
    # First, so that text behind a comment is its parent's: server-rendered Vue and Svelte have comments around text.
    etree.strip_elements(body, etree.Comment, etree.ProcessingInstruction, with_tail=False)
    # One body of all: without its tag, libxml2 takes `main` and other elements of HTML 5 for a part of the head.
    etree.strip_tags(body, "html", "head", "body")
    document, body.tag = parser.makeelement("html"), "body"
    document.append(body)
    body.attrib.clear()
    base = next((href for base in document.iter("base") if (href := base.get("href"))), "")
    base = normalize_url(base, url) or url
    anchors = {anchor: (anchor.get("href", "#"), _link_text(anchor)) for anchor in document.iter("a", "area")}
    title, forwards, fallbacks = _title(document), *_forwards(document, base)
    _drop_not_content(document)
    links = _links(anchors, set(document.iter("a")), base)
    keep_main_content(document, title)
    _write_as_shown(document)
    etree.strip_attributes(document, *CONTENT_ATTRIBUTES)
    if fallbacks and is_blank("".join(document.itertext())):
        forwards += fallbacks
    title = title or next(("".join(heading.itertext()) for heading in document.iter(*HEADINGS)), "")
    content = lxml_html.tostring(document, encoding="unicode")
    left_out = TOO_LONG if is_cut or len(content) > limits.max_chars else ""
    return Content(title, content[: limits.max_chars], left_out, links, forwards)


def refresh_target(refresh: str, base: str) -> str:
    """Return the URL to which a refresh sends a page's reader within `MAX_REFRESH_S`; "" if there is none."""
    found = REFRESH.match(refresh[: 2 * MAX_URL_CHARS])
    if not found or int(found[1] or 0) > MAX_REFRESH_S:
        return ""
    address = found[3].partition(found[2])[0] if found[2] else found[3]
    url = normalize_url(address, base) if address.strip() else None
    return url if url and url != base else ""


def _title(document: Any) -> str:
    """Return the page's title, or the one that it gives to social networks, or ""."""
    own = (title.text or "" for title in document.iter("title") if not _is_in(title, "svg"))
    shared = document.xpath(".//meta[@property='og:title' or @name='twitter:title']/@content")
    return next((str(title) for title in (*own, *shared) if not is_blank(title)), "")


def _forwards(document: Any, base: str) -> tuple[list[str], list[str]]:
    """Return the URLs of `meta` refreshes and frames; and those that count on a page without text: of refreshes for
    readers without scripts, and of the only `iframe` for the others."""
    found: list[str | None] = []
    fallbacks: list[str | None] = []
    iframes: list[str] = []
    for element in document.iter("meta", "frame", "iframe"):
        address = element.get("src", "").strip()
        is_for_all = not _is_in(element, "noscript")
        if element.tag == "frame":
            found.append(normalize_url(address, base) if address else None)
        elif element.tag == "iframe":
            iframes += [address] if is_for_all else []
        elif element.get("http-equiv", "").strip().lower() == "refresh":
            (found if is_for_all else fallbacks).append(refresh_target(element.get("content", ""), base))
    if len(iframes) == 1 and iframes[0]:
        fallbacks.append(normalize_url(iframes[0], base))
    return _first_urls(found), _first_urls(fallbacks)


def _first_urls(urls: list[str | None]) -> list[str]:
    return list(dict.fromkeys(filter(None, urls)))[:MAX_FORWARDS]


def _truncate(document: Any, max_elements: int) -> bool:
    """Remove all elements after the first `max_elements`, comments included; return whether there were any."""
    last = next(itertools.islice(document.iter(), max_elements, None), None)
    if last is None:
        return False
    for element in (last, *last.iterancestors()):
        for later in list(element.itersiblings()):
            later.getparent().remove(later)
    return True


def _drop_not_content(document: Any) -> None:
    """Remove elements that are not content, and attributes but `CONTENT_ATTRIBUTES` and `READ_ATTRIBUTES`.

    Comments and processing instructions must have been removed. An element with the role `main` becomes `main`.
    """
    for element in document.iter("div", "section"):
        if element.get("role") == "main":
            element.tag = "main"
    for element in document.iter(etree.Element):
        if _is_not_content(element):
            element.tag = DROPPED
        names = CONTENT_ATTRIBUTES | READ_ATTRIBUTES.get(element.tag, set())
        kept = {name: value[:MAX_ATTRIBUTE_CHARS] for name, value in element.items() if name in names}
        element.attrib.clear()
        element.attrib.update(kept)
    # All at once: removing them one by one would copy the preceding text each time.
    etree.strip_elements(document, DROPPED, with_tail=False)
    for element in document.xpath(EMPTY):
        element.tag = DROPPED
    etree.strip_elements(document, DROPPED, with_tail=False)


def _write_as_shown(document: Any) -> None:
    """Change what crawl4ai would write otherwise than browsers show it: white space, lines, and fences in listings."""
    for text in document.xpath(INLINE_CODE):
        setattr(text.getparent(), "text" if text.is_text else "tail", re.sub(r"\s+", " ", text))
    for line_break in document.iter("br"):
        if _is_in(line_break, *HEADINGS):
            line_break.tag, line_break.text = "span", " "
    for line in document.iter("div", "p"):
        if _is_in(line, "pre"):
            line.tag, line.tail = "span", line.tail if (line.tail or "").startswith("\n") else f"\n{line.tail or ''}"
    for listing in document.iter("pre"):
        if not _is_in(listing, "pre") and "```" in "".join(listing.itertext()):
            listing.tag = FENCED


def _is_in(element: Any, *tags: str) -> bool:
    return next(element.iterancestors(*tags), None) is not None


def _is_not_content(element: Any) -> bool:
    """Whether an element is dropped: by its tag or role, or hidden by an attribute.

    An aside outside `main`, a header outside `main` and `article`, and elements of the class `headerlink` are dropped
    too. Other classes and ids do not matter.
    """
    tag, attributes = element.tag, element.attrib
    return bool(
        tag in NOT_CONTENT
        or (tag == "aside" and next(element.iterancestors("main"), None) is None)
        or (tag == "header" and next(element.iterancestors("main", "article"), None) is None)
        or "hidden" in attributes
        or attributes.get("aria-hidden") == "true"
        or attributes.get("role") in NOT_CONTENT_ROLES
        or "headerlink" in attributes.get("class", "")
    )


def _links(anchors: dict[Any, tuple[str, str]], content: set[Any], base: str) -> dict[str, str]:
    """Return the first link text by URL, without files that are no pages; links in `content` come first."""
    links: dict[str, str] = {}
    for anchor in sorted(anchors, key=lambda anchor: anchor not in content)[:MAX_ANCHORS]:
        href, text = anchors[anchor]
        address = normalize_url(href, base)
        if address and not NO_PAGE.search(urlsplit(address).path):
            links.setdefault(address, text)
    return links


def _link_text(anchor: Any) -> str:
    """Return the text of a link's first elements on one line, or an area's label, at most 200 characters."""
    if anchor.tag == "area":
        return (anchor.get("alt") or anchor.get("title") or "")[:200]
    inside = itertools.islice(anchor.iter(), MAX_LINK_ELEMENTS)
    texts = ((part.text or "") + ("" if part is anchor else part.tail or "") for part in inside)
    return " ".join(" ".join(texts).split())[:200]
