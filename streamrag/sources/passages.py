"""Documents in a folder, and the passages that they are split into: text, Markdown and HTML.

folder ──find_documents──▶ paths ──read_document──▶ Document ──split──▶ passages
"""

import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import Any

from streamrag.errors import ConfigurationError, MissingDependencyError
from streamrag.support.bounded_reading import open_regular

TEXT, MARKDOWN, HTML = {".txt", ".text"}, {".md", ".markdown"}, {".html", ".htm", ".xhtml"}
INSTALL = "pip install 'streamrag[embed]'"

CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+|[^\w\s]")
"""What a wordpiece tokenizer begins a new piece at: a run of letters and digits, a CJK character, a sign."""

BREAKS = (re.compile(r"(?<=\n)"), re.compile(r"(?<=[.!?…])(?=\s)|(?<=[。！？])"), re.compile(r"(?<=\s)"))
"""Where a paragraph that is too long is broken, best first: after lines, after sentences, after words."""

NOT_CONTENT = (
    "nav, script, style, footer, aside, noscript, template, iframe, svg, button, select, form, "
    "[role=navigation], [role=search], [role=contentinfo], [hidden], .headerlink"
)
MAIN = ("main", "[role=main]", "body")
HEADINGS = {"h1", "h2", "h3", "h4", "h5", "h6"}
PARAGRAPHS = HEADINGS | {
    *("address", "article", "blockquote", "body", "caption", "dd", "details", "div", "dl", "dt", "figcaption"),
    *("figure", "header", "hr", "html", "li", "main", "ol", "p", "pre", "section", "summary", "table", "tr", "ul"),
}


class UnusableDocumentError(Exception):
    """Why a file gives no passages. Never leaves `sources`: it becomes a line of the summary."""


@dataclass(frozen=True, slots=True)
class Block:
    """A heading, or a paragraph, list, table or listing."""

    text: str
    is_heading: bool = False


@dataclass(frozen=True, slots=True)
class Document:
    """What a file says."""

    uri: str
    """Path within the folder, with slashes."""
    title: str
    blocks: tuple[Block, ...]


# ------------------------------------------------------------------------------------------------------ the folder


def find_documents(folder: Path, *, max_file_bytes: int, leave_out: Path) -> tuple[list[Path], list[tuple[str, str]]]:
    """Files to read, below `folder`, sorted by path; and what was skipped, each with the reason.

    Nothing below a hidden folder, a symbolic link or the folder `leave_out` is looked at.

    :raises ConfigurationError: `folder` is not there, or not a folder.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder: name the folder that holds the documents")
    found, skipped = [], []
    pending = [folder]
    while pending:
        path = pending.pop()
        reason = None if path == folder else reason_to_skip(path, max_file_bytes, leave_out)
        if reason:
            skipped.append((relative_name(path, folder), reason))
        elif not path.is_dir():
            found.append(path)
        else:
            try:
                pending.extend(sorted(path.iterdir(), reverse=True))
            except OSError as error:
                skipped.append((relative_name(path, folder), f"cannot be read: {error.strerror}"))
    return found, skipped


def reason_to_skip(path: Path, max_file_bytes: int, leave_out: Path) -> str | None:
    """Why this file or folder is not looked at; None if it is."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_symlink():  # what it points to is read itself, if it is in the folder; so there are no loops
        return "symbolic link"
    if path.is_dir():
        return "is the index" if path == leave_out else None
    if not path.is_file():
        return "not a regular file"
    if path.suffix.lower() not in TEXT | MARKDOWN | HTML:
        return "not text, Markdown or HTML by its name"
    num_bytes = path.stat().st_size
    return f"{num_bytes} bytes, more than {max_file_bytes}" if num_bytes > max_file_bytes else None


def relative_name(path: Path, folder: Path) -> str:
    """The path within the folder, with slashes. Names need not be text; what is stored and sent to a model must be."""
    return os.fsencode(path.relative_to(folder).as_posix()).decode("utf-8", "replace")


# -------------------------------------------------------------------------------------------------- one document


def read_document(path: Path, folder: Path) -> Document:
    """What the file at `path` says, without markup that only steers its looks.

    :raises UnusableDocumentError: with the reason; the file gives no text.
    """
    try:
        with open_regular(path, follow_links=False) as file:
            body = file.read()
    except OSError as error:
        raise UnusableDocumentError(f"cannot be read: {error.strerror}") from error
    if not body.startswith((b"\xff\xfe", b"\xfe\xff")) and b"\0" in body[:8192]:
        raise UnusableDocumentError("binary")
    suffix = path.suffix.lower()
    if suffix in HTML:
        title, blocks = _read_html(body)
    else:
        title, blocks = (_read_markdown if suffix in MARKDOWN else _read_text)(_decode(body))
    if not blocks:
        raise UnusableDocumentError("no text in it")
    source = relative_name(path, folder)
    heading = next((block.text for block in blocks if block.is_heading), "")
    return Document(source, title or heading or PurePosixPath(source).stem, tuple(blocks))


def _decode(body: bytes) -> str:
    try:
        text = body.decode("utf-16" if body.startswith((b"\xff\xfe", b"\xfe\xff")) else "utf-8-sig")
    except UnicodeDecodeError as error:
        raise UnusableDocumentError(f"not UTF-8: byte {error.start} does not decode") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_text(text: str) -> tuple[str, list[Block]]:
    return "", [Block(part.strip("\n")) for part in re.split(r"\n\s*\n", text) if part.strip()]


def _read_markdown(text: str) -> tuple[str, list[Block]]:
    """Blocks keep their Markdown, which models read well; headings become plain text."""
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise MissingDependencyError("markdown-it-py", INSTALL) from None
    title = ""
    if front_matter := re.match(r"---\n(.*?\n)?---\n", text, re.DOTALL):
        text = text[front_matter.end() :]
        if found := re.search(r"""^title:\s*["']?(.+?)["']?\s*$""", front_matter[0], re.MULTILINE):
            title = found[1]
    lines = text.split("\n")
    blocks = []
    tokens = MarkdownIt("commonmark").parse(text)
    for number, token in enumerate(tokens):
        if token.level or not token.map or token.nesting < 0:
            continue
        if token.type == "heading_open":
            inline = tokens[number + 1].children or []
            heading = "".join(" " if part.type == "softbreak" else part.content for part in inline)
            blocks.append(Block(heading.strip(), is_heading=True))
        elif token.type == "html_block":
            blocks += _read_html(token.content.encode())[1]
        else:
            blocks.append(Block("\n".join(lines[slice(*token.map)]).strip("\n")))
    return title, [block for block in blocks if block.text.strip()]


def _read_html(body: bytes) -> tuple[str, list[Block]]:
    """The text of the main part, paragraph by paragraph."""
    try:
        import lxml  # noqa: F401 - BeautifulSoup loads it by name
        from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning
        from bs4.exceptions import ParserRejectedMarkup
    except ImportError as error:
        raise MissingDependencyError(f"beautifulsoup4 or lxml ({error.name})", INSTALL) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)
        try:
            page = BeautifulSoup(body, "lxml")
        except ParserRejectedMarkup as error:
            raise UnusableDocumentError(f"not HTML: {error}") from error
    title = " ".join(page.title.get_text().split()) if page.title else ""
    for tag in page.select(NOT_CONTENT):
        tag.decompose()
    for tag in page.find_all("br"):
        tag.replace_with("\n")
    for tag in page.find_all(["td", "th"]):
        tag.insert_after(" ")
    for selector in MAIN:
        if blocks := [block for root in page.select(selector) for block in _html_blocks(root)]:
            return title, blocks
    return title, []


def _html_blocks(root: Any) -> Iterator[Block]:
    """One block for each run of text that has the same innermost paragraph-like element around it."""
    from bs4.element import NavigableString, PreformattedString

    def around(text: Any) -> Any:
        return text.find_parent(PARAGRAPHS)

    # Comments and their like are PreformattedString. Tags are compared by identity: == compares all that is in them.
    texts = (each for each in root.descendants if isinstance(each, NavigableString))
    texts = (each for each in texts if not isinstance(each, PreformattedString))
    for _, run in groupby(texts, key=lambda text: id(around(text))):
        parts = list(run)
        element, text = around(parts[0]), "".join(parts)
        text = text.strip("\n").rstrip() if element.name == "pre" else " ".join(text.split())
        if text:
            yield Block(f"- {text}" if element.name == "li" else text, element.name in HEADINGS)


# ---------------------------------------------------------------------------------------------------- the passages


def count_words(text: str) -> int:
    """Number of words, signs and CJK characters: close to the number of word pieces.

    >>> count_words("asyncio.run() は 2 つ")
    8
    """
    return sum(1 for _ in WORD.finditer(text))


def split_document(document: Document, passage_words: int) -> Iterator[str]:
    """Passages of at most about `passage_words` words, each beginning with the heading that it stands under.

    They break at headings and between paragraphs, inside a paragraph only if it is too long by itself; a section under
    a third of that is joined to the next. They do not overlap: none begins in the middle of a thought, and overlapping
    neighbours would take each other's places among the k nearest and be prefilled twice.
    """
    heading: list[Block] = []
    held: list[Block] = []
    num_words, has_passage = 0, False
    for block in document.blocks:
        if block.is_heading:
            if num_words * 3 >= passage_words:
                yield _join(held)
                held, num_words, has_passage = [], 0, True
            heading = [block]
            held.append(block)
            continue
        for piece in _pieces(block.text, passage_words):
            num_new = count_words(piece)
            if num_words and num_words + num_new > passage_words:
                yield _join(held)
                held, num_words, has_passage = [*heading], 0, True
            held.append(Block(piece.strip("\n")))
            num_words += num_new
    if num_words or not has_passage:
        yield _join(held)


def _join(blocks: list[Block]) -> str:
    """The text of a passage. Headings at its end belong to what follows; a document may be nothing but headings."""
    end = max((number for number, block in enumerate(blocks, 1) if not block.is_heading), default=len(blocks))
    return "\n\n".join(block.text for block in blocks[:end])


def _pieces(text: str, max_words: int, level: int = 0) -> list[str]:
    """`text` in as few pieces as its best breaks allow, none longer than `max_words`."""
    if count_words(text) <= max_words:
        return [text]
    if level == len(BREAKS):
        ends = [word.end() for word in WORD.finditer(text)]
        return [text[a:b] for a, b in pairwise([0, *ends[max_words - 1 : -1 : max_words], len(text)])]
    pieces: list[str] = []
    num_words = max_words  # of the last piece; full at first
    for part in BREAKS[level].split(text):
        for piece in _pieces(part, max_words, level + 1):
            num_new = count_words(piece)
            if num_words + num_new <= max_words and pieces:
                pieces[-1] += piece
                num_words += num_new
            else:
                pieces.append(piece)
                num_words = num_new
    return pieces
