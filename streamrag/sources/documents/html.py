"""Reading of HTML: crawl4ai converts what `prune` leaves to Markdown.

crawl4ai gets small and well-formed HTML, because some of its regular expressions and loops take time quadratic in raw
pages. Importing this module takes two seconds, writes to CRAWL4_AI_BASE_DIRECTORY and reads a `.env` file, so only
worker processes import it.
"""

from dataclasses import replace
from typing import Any

from crawl4ai import DefaultMarkdownGenerator

from streamrag.core.text import MAX_LEVEL
from streamrag.sources.documents.prune import FENCED, prune
from streamrag.sources.documents.reader import Content, ReadingLimits

ERRORS = ("Error converting HTML to markdown:", "Error in markdown generation:")
"""Beginnings of crawl4ai's output when it fails."""


def read_html(html: str, url: str, limits: ReadingLimits) -> Content:
    """Return the content of a page at `url`; raise ValueError if crawl4ai fails."""
    page = prune(url, html, limits)
    text = GENERATOR.generate_markdown(page.text, base_url=url, citations=False).raw_markdown
    if text.startswith(ERRORS):
        raise ValueError(text)
    return replace(page, text=text)


def _write_terms(converter: Any, tag: str, attributes: Any, is_start: bool) -> bool:
    """Write terms of definition lists as headings below `MAX_LEVEL`, and an empty one at the end of each list; and
    listings with fences between others.

    Return whether the tag is dealt with. `converter` is crawl4ai's HTML2Text, which calls this for each tag. A heading
    stays on one line, and the terms of one definition are one heading.
    """
    if tag == FENCED:
        converter.o("\n~~~~\n")
        converter.inside_pre = is_start
        return True
    if tag in ("p", "div") and converter.inheader:
        converter.space = True
        return True
    is_behind_term = getattr(converter, "is_behind_term", False)
    converter.is_behind_term = tag == "dt" and not is_start
    if tag not in ("dl", "dt", "dd"):
        return False
    num_lists = getattr(converter, "num_lists", 0)
    signs = "#" * (MAX_LEVEL + max(num_lists, 1))
    converter.p()
    if tag == "dl":
        if not is_start:
            converter.o(signs)
            converter.p()
        converter.num_lists = num_lists + (1 if is_start else -1)
    elif tag == "dt" and is_start:
        if is_behind_term:
            converter.p_p, converter.space = 0, False
        converter.o(", " if is_behind_term else f"{signs} ")
    converter.inheader = tag == "dt" and is_start
    return True


GENERATOR = DefaultMarkdownGenerator(
    options={
        **dict.fromkeys(("ignore_links", "ignore_images", "ignore_emphasis"), True),
        "body_width": 0,
        "single_line_break": False,
        "tag_callback": _write_terms,
    }
)
