"""Choice of a page's main content, without the menus, teasers and notices around it.

A page with code is technical: its `article` or `main` is taken whole, as extractors made for articles lose code and
definitions. So is that of a table of contents, which they take for a menu. In other pages trafilatura chooses among
blocks that we mark, because its own output changes the white space of code and the levels of headings. Takes linear
time, but for trafilatura.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import trafilatura
from lxml import etree

from streamrag.core.text import words

CODE = ("pre", "code", "kbd", "samp", "tt")
"""Elements of computer text: none of 92 news pages has one, and 96 % of 530 pages of nine documentations have."""

MIN_EXTRACTED_CHARS = 250  # of an extraction; a shorter one may be a notice, as trafilatura assumes too
MAX_EXTRACTED_ELEMENTS = 10_000  # of a page; trafilatura takes seconds for more, and is made for articles
MIN_SHARE_OF_LINKS = 0.55  # of the text of a table of contents; at most 0.49 on the news pages, 0.6 and more on those
MIN_ENTRY_CHARS = 100  # of an entry's text outside of links; a teaser has less
MIN_SHARE_OF_ELEMENT = 0.75  # of the text of an element around the content, for the whole element to be content
SELECTOR = "[\U000e0100-\U000e01ef]"  # a variation selector: printable, no letter, and never beside another one
MARK = re.compile(SELECTOR * 2)

BLOCKS = {
    *("address", "article", "aside", "blockquote", "body", "caption", "dd", "details", "div", "dl", "dt", "fieldset"),
    *("figcaption", "figure", "footer", "form", "h1", "h2", "h3", "h4", "h5", "h6", "header", "li", "main", "ol", "p"),
    *("pre", "section", "summary", "table", "tbody", "td", "th", "thead", "tr", "ul"),
}
HEADINGS = ("h1", "h2", "h3", "h4", "h5", "h6")
DROPPED = "streamrag-dropped"


class _Block(NamedTuple):
    """The text of which `element` is the innermost block element."""

    element: Any
    places: list[tuple[Any, str]]
    """Elements and their attribute, "text" or "tail", with a part of the text each."""

    @property
    def text(self) -> str:
        return "".join(getattr(element, place) for element, place in self.places)


def keep_main_content(document: Any, title: str) -> None:
    """Remove from the body what is not main content; nothing if that cannot be told.

    Elements that are hidden must have been removed, and `role="main"` must have become `main`.
    """
    body = document.find("body")
    is_technical = _count(body, CODE) > 0
    root = _declared_main(body)
    if root is not None and (is_technical or _share_of_links(root) > MIN_SHARE_OF_LINKS):
        body.text = root.tail = None
        body[:] = [root]
        return
    blocks = _blocks(body)
    if chosen := _choose(document, blocks):
        _mind_heading(blocks, chosen, title)
        _keep(body, blocks, _widen(blocks, chosen) if is_technical else chosen | _entries_beside(blocks, chosen))


def _count(root: Any, tags: Iterable[str]) -> int:
    return sum(1 for _ in root.iter(*tags))


def _declared_main(body: Any) -> Any:
    """Return the only `article` if it has all code and `h1`, else the only `main` unless all code is elsewhere."""
    main = _only(body, "main")
    around = body if main is None else main
    article = _only(around, "article")
    wanted = (*CODE, "h1")
    if article is not None and _count(article, wanted) == _count(around, wanted):
        return article
    return main if main is not None and (_count(main, CODE) or not _count(body, CODE)) else None


def _share_of_links(root: Any) -> float:
    """Return the share of characters that are in links."""
    inside, everywhere = (
        sum(len("".join(text.split())) for element in elements for text in element.itertext())
        for elements in (root.xpath(".//a[not(ancestor::a)]"), [root])
    )
    return inside / max(everywhere, 1)


def _only(root: Any, tag: str) -> Any:
    elements = list(root.iter(tag))
    return elements[0] if len(elements) == 1 else None


def _blocks(body: Any) -> list[_Block]:
    """Return the blocks, ordered by their beginnings."""
    blocks: dict[Any, _Block] = {}
    innermost: dict[Any, Any] = {}

    def add(block: Any, element: Any, place: str) -> None:
        if (getattr(element, place) or "").strip():
            blocks.setdefault(block, _Block(block, [])).places.append((element, place))

    for event, element in etree.iterwalk(body, events=("start", "end")):
        if event == "start":
            is_block = element is body or element.tag in BLOCKS
            innermost[element] = element if is_block else innermost[element.getparent()]
            add(innermost[element], element, "text")
        elif element is not body:
            add(innermost[element.getparent()], element, "tail")
    return list(blocks.values())


def _choose(document: Any, blocks: Sequence[_Block]) -> set[int]:
    """Return the numbers of the blocks that trafilatura chooses, of the headings and terms above, and of all listings.

    Return no number if the page is too large for trafilatura, makes it fail, or if trafilatura chooses little.
    """
    if _count(document, ()) > MAX_EXTRACTED_ELEMENTS:
        return set()
    marks = {f"{chr(0xE0100 + number // 240)}{chr(0xE0100 + number % 240)}": number for number in range(len(blocks))}
    originals = [(*block.places[-1], getattr(*block.places[-1])) for block in blocks]
    for (element, place, text), mark in zip(originals, marks, strict=True):
        setattr(element, place, re.sub(SELECTOR, "", text) + mark)
    try:
        text = trafilatura.extract(document, fast=True, favor_recall=True, include_comments=False) or ""
    except MemoryError:
        raise
    except Exception:  # of a library that gets a hostile page; the page without a choice is good enough
        return set()
    finally:
        for element, place, original in originals:
            setattr(element, place, original)
    if len(MARK.sub("", text)) < MIN_EXTRACTED_CHARS:
        return set()
    chosen = {number for number, block in enumerate(blocks) if block.element.xpath("ancestor-or-self::pre")}
    chosen.update(marks[mark] for mark in MARK.findall(text) if mark in marks)
    for number in reversed(range(len(blocks) - 1)):
        if blocks[number].element.tag in (*HEADINGS, "dt") and number + 1 in chosen:
            chosen.add(number)
    return chosen


def _mind_heading(blocks: Sequence[_Block], chosen: set[int], title: str) -> None:
    """Choose the last main heading up to the first chosen block, if not all of its words are in the title.

    Extractors take such a heading for the title, and leave it out or not.
    """
    headings = {number for number in range(min(chosen) + 1) if blocks[number].element.tag == "h1"}
    for number in sorted(headings)[-1:]:
        if not set(words(blocks[number].text)) <= set(words(title)):
            chosen.add(number)
        elif len(chosen) > 1:
            chosen.discard(number)


def _widen(blocks: Sequence[_Block], chosen: set[int]) -> set[int]:
    """Return `chosen` with all blocks in between, or in the smallest element around it if most of that is chosen."""
    elements = set(_elements_around(blocks, chosen)[-1].iter())
    inside = {number for number, block in enumerate(blocks) if block.element in elements}
    if _num_chars(blocks, inside & chosen) >= MIN_SHARE_OF_ELEMENT * _num_chars(blocks, inside):
        return inside
    return set(range(min(chosen), max(chosen) + 1))


def _entries_beside(blocks: Sequence[_Block], chosen: set[int]) -> set[int]:
    """Return the blocks of the entries after that of the chosen ones, such as a forum's posts or a blog's articles.

    Entries have the same parent, tag and class, and together more text than the chosen blocks, of which extractors
    take the first entry only.
    """
    for entry in reversed(_elements_around(blocks, chosen)[1:]):
        if entry.tag == "article" or entry.get("class"):
            entries = [each for each in entry.itersiblings(entry.tag) if each.get("class") == entry.get("class")]
            sizes = list(map(_num_own_chars, entries))
            if min(sizes, default=0) >= MIN_ENTRY_CHARS and sum(sizes) >= _num_chars(blocks, chosen):
                elements = {element for each in entries for element in each.iter()}
                return {number for number, block in enumerate(blocks) if block.element in elements}
    return set()


def _num_own_chars(element: Any) -> int:
    """Return the number of characters outside of links."""
    return sum(len("".join(text.split())) for text in element.xpath(".//text()[not(ancestor::a)]"))


def _elements_around(blocks: Sequence[_Block], chosen: set[int]) -> list[Any]:
    """Return the elements around all chosen blocks, the outermost first."""
    paths = [_path(blocks[number].element) for number in (min(chosen), max(chosen))]
    return [first for first, last in zip(*paths, strict=False) if first is last]


def _path(element: Any) -> list[Any]:
    return [*reversed(list(element.iterancestors())), element]


def _num_chars(blocks: Sequence[_Block], numbers: Iterable[int]) -> int:
    return sum(len(blocks[number].text) for number in numbers)


def _keep(body: Any, blocks: Sequence[_Block], chosen: set[int]) -> None:
    """Remove from the body all blocks but `chosen` and the elements around them."""
    kept: set[Any] = {body}
    for number in chosen:
        element = blocks[number].element
        while element is not None and element not in kept:
            kept.add(element)
            element = element.getparent()
    for number, block in enumerate(blocks):
        if number not in chosen:
            for element, place in block.places:
                setattr(element, place, None)
    for element in list(body.iter(*BLOCKS)):
        if element not in kept:
            element.tag = DROPPED
    etree.strip_elements(body, DROPPED, with_tail=False)
