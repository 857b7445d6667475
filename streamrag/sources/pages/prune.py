"""Content of a page, without what is around it: what crawl4ai is given.

It takes time proportional to the page's length, whatever is on it: pages may be hostile.
"""

import itertools
import re
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from lxml import etree
from lxml import html as lxml_html

from streamrag.sources.http.urls import normalize_url

MAX_ELEMENTS = 30_000
"""Elements of a page; what comes after them is not read. crawl4ai takes a second or two for this many."""

MAX_CONTENT_CHARS = 1_000_000
"""Characters of a page's HTML after pruning, or of its text. What comes after them is not read."""

MAX_ANCHORS = 10_000
MAX_LINK_ELEMENTS = 20  # elements within a link that are looked at for its text. Links can be nested
NOT_CONTENT = {"script", "style", "template", "iframe", "svg", "img", "picture", "nav", "footer", "button", "select"}
NOT_CONTENT |= {"textarea", "input", "dialog", "noscript", "link"}
"""Not `form`: whole sites stand in one."""

EMPTY = {"a", "br", "hr", "tr", "td", "th", "wbr"}  # elements that mean something without any text
NOT_CONTENT_ROLES = {"navigation", "search", "banner", "contentinfo"}

DROPPED = "streamrag-dropped"

NO_PAGE = re.compile(
    r"\.(7z|avi|bin|bz2|css|csv|deb|dmg|docx?|epub|exe|gif|gz|ico|iso|jar|jpe?g|js|json|mp[34]|msi|ods|odt|og[gv]|png"
    r"|pptx?|rar|rpm|rss|svg|tar|tgz|wav|web[mp]|whl|woff2?|xlsx?|xml|xz|zip)$",
    re.IGNORECASE,
)


class PrunedPage(NamedTuple):
    """The content of a page."""

    html: str
    links: dict[str, str]
    """Texts by address, for the whole page; links in the content come first."""
    is_cut: bool
    """Whether the page is larger than what is read of it."""


def prune(url: str, html: str) -> PrunedPage:
    """Return the page without what is not content, without attributes, and with pairs of tags only.

    crawl4ai's own `excluded_tags` lose the text that follows an excluded element, its links do not include those of
    excluded elements, and it takes the slash from their ends.
    """
    # As bytes: of text, lxml first looks for an XML declaration, with a regular expression that is quadratic in spaces.
    parser = lxml_html.HTMLParser(encoding="utf-8")
    try:
        document = lxml_html.document_fromstring(html.encode(errors="replace"), parser=parser)
    except etree.XMLSyntaxError:  # it takes any HTML, so this is its word for it
        raise MemoryError from None
    is_cut = _cut(document)
    base = next((href for base in document.iter("base") if (href := base.get("href"))), "")
    anchors = {anchor: (anchor.get("href", "#"), _beginning(anchor)) for anchor in document.iter("a")}
    _drop_other_elements(document)
    links = _links(anchors, set(document.iter("a")), normalize_url(base, url) or url)
    content = lxml_html.tostring(document, encoding="unicode")
    return PrunedPage(content[:MAX_CONTENT_CHARS], links, is_cut or len(content) > MAX_CONTENT_CHARS)


def _cut(document: Any) -> bool:
    """Take away what comes behind the first `MAX_ELEMENTS`, and return whether there was anything."""
    last = next(itertools.islice(document.iter(), MAX_ELEMENTS, None), None)
    if last is None:
        return False
    for element in (last, *last.iterancestors()):
        for later in list(element.itersiblings()):
            later.getparent().remove(later)
    return True


def _drop_other_elements(document: Any) -> None:
    for element in reversed(list(document.iter(etree.Element))):
        if _is_no_content(element):
            element.tag = DROPPED
        abbreviated = element.get("title") if element.tag == "abbr" else None
        if element.tag != "meta":
            element.attrib.clear()
        if abbreviated:
            element.set("title", abbreviated)
    # One by one, each would have its text joined to what stands before it, and that copied every time.
    etree.strip_elements(document, DROPPED, etree.Comment, etree.ProcessingInstruction, with_tail=False)


def _is_no_content(element: Any) -> bool:
    tag, given = element.tag, element.attrib
    return bool(
        tag in NOT_CONTENT
        or (tag == "aside" and next(element.iterancestors("main"), None) is None)
        or (tag == "header" and next(element.iterancestors("main", "article"), None) is None)
        or "hidden" in given
        or given.get("aria-hidden") == "true"
        or given.get("role") in NOT_CONTENT_ROLES
        or "headerlink" in given.get("class", "")
        or (tag == "meta" and element.getparent().tag != "head")
        or (tag not in EMPTY and _is_empty(element))
    )


def _is_empty(element: Any) -> bool:
    """Whether it has no text, once those within it that are no content are gone. White space goes to what follows it.

    crawl4ai does the same, but joins texts one by one.
    """
    if any(child.tag != DROPPED or child.tail for child in element.iterchildren(etree.Element)):
        return False
    text = element.text or ""
    if text.strip() or (text and next(element.iterancestors("pre", "code"), None) is not None):
        return False
    if text:
        element.tail = " " + (element.tail or "")
    return element.getparent() is not None


def _links(anchors: dict[Any, tuple[str, str]], content: set[Any], base: str) -> dict[str, str]:
    links: dict[str, str] = {}
    for anchor in sorted(anchors, key=lambda anchor: anchor not in content)[:MAX_ANCHORS]:
        href, text = anchors[anchor]
        address = normalize_url(href, base)
        if address and not NO_PAGE.search(urlsplit(address).path):
            links.setdefault(address, text)
    return links


def _beginning(anchor: Any) -> str:
    """Return the beginning of a link's text."""
    inside = itertools.islice(anchor.iter(), MAX_LINK_ELEMENTS)
    texts = ((part.text or "") + ("" if part is anchor else part.tail or "") for part in inside)
    return " ".join(" ".join(texts).split())[:200]
