"""The reader of documents, for crawled pages and for files of an index: from bytes of a kind to a title and Markdown.

    HTML ──prune──▶ main content ──crawl4ai──▶ Markdown        Markdown ──markdown-it──▶ Markdown
    PDF ──pypdf──▶ paragraphs                                  plain text, in any charset

Documents may be hostile, so only worker processes read them, within their limits. Packages are imported when the first
document of a kind is read.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

from streamrag.core.text import readable
from streamrag.sources.documents.charsets import decode

MAX_TITLE_CHARS = 300
TOO_LONG = "its end, because it is too long"

NEEDED = {
    "html": ("crawl", "crawl4ai", "trafilatura", "webencodings"),
    "markdown": ("embed", "markdown_it", "webencodings"),
    "pdf": ("embed", "pypdf"),
    "text": ("embed", "webencodings"),
}
"""The extra and the modules of it that reading a kind takes."""


class UnreadableError(Exception):
    """A document without usable text. It never leaves `sources`; its message is the reason."""


class ReadingLimits(NamedTuple):
    """Limits of reading a document."""

    max_cpu_s: float
    max_chars: int = 1_000_000  # of the text, and of the HTML that it is made of
    max_elements: int = 30_000  # of HTML; crawl4ai takes a second for them
    max_pdf_pages: int = 500


@dataclass(frozen=True, slots=True)
class Content:
    """The text of a document, without navigation and the like."""

    title: str
    text: str  # Markdown, or plain text
    left_out: str = ""  # what is missing in the text, with the reason; empty if it is complete
    links: dict[str, str] = field(default_factory=dict)  # link texts by URL
    forwards: list[str] = field(default_factory=list)  # URLs to which a page sends its reader on


Read: TypeAlias = Callable[[bytes, str], Content]
"""A function from a body and its kind to its content, or UnreadableError."""


def read(body: bytes, kind: str, limits: ReadingLimits, *, charset: str = "", url: str = "") -> Content:
    """Return the content of a body of kind html, markdown, pdf or text, up to the limits.

    charset: what the server says.
    url: what links are relative to.

    :raises UnreadableError: it is no such document, or damaged.
    """
    if kind == "html":
        from streamrag.sources.documents.html import read_html

        content = read_html(decode(body, charset), url, limits)
    elif kind == "markdown":
        from streamrag.sources.documents.markdown import read_markdown

        content = Content(*read_markdown(decode(body, charset, is_markup=False)))
    elif kind == "pdf":
        from streamrag.sources.documents.pdf import read_pdf

        content = read_pdf(body, limits)
    else:
        content = Content("", decode(body, charset, is_markup=False))
    is_cut = len(content.text) > limits.max_chars
    title = readable(" ".join(content.title.split()))[:MAX_TITLE_CHARS]
    text, left_out = readable(content.text[: limits.max_chars]), content.left_out or TOO_LONG * is_cut
    return replace(content, title=title, text=text, left_out=left_out)


def crawl4ai_env(scratch: Path) -> dict[str, str]:
    """Return environment variables for a process that imports crawl4ai, which writes to `scratch`."""
    return {
        "CRAWL4_AI_BASE_DIRECTORY": str(scratch),  # instead of ~/.crawl4ai
        "CRAWL4AI_NO_CLOUD_NOTICE": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",  # instead of downloading a price list
    }
