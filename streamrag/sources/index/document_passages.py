"""Find text, Markdown, HTML and PDF documents in a folder, read them, and split them into passages.

folder ──find_documents──▶ paths ──read_document──▶ Document ──split_document──▶ passages
"""

import os
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path, PurePosixPath
from typing import Any, TypeAlias

from streamrag.core.text import is_blank, readable
from streamrag.errors import ConfigurationError, MissingDependencyError
from streamrag.sources.index.packages import EMBED, require_package
from streamrag.sources.workers.charsets import decode, marked_encoding
from streamrag.sources.workers.pdf import ReadPdf, UnusablePdfError
from streamrag.support.bounded_reading import open_regular

OnProgress: TypeAlias = Callable[[int, int, str], None]
"""A callback with the number of finished items, the number of all items, and the step."""
TEXT, MARKDOWN, HTML, PDF = {".txt", ".text"}, {".md", ".markdown"}, {".html", ".htm", ".xhtml"}, {".pdf"}
CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+|[^\w\s]")
"""A run of letters and digits, a CJK character, or a sign: each begins a new piece of a wordpiece tokenizer."""
BREAKS = (re.compile(r"(?<=\n)"), re.compile(r"(?<=[.!?…])(?=\s)|(?<=[。！？])"), re.compile(r"(?<=\s)"))
"""Places to break a paragraph that is too long, best first: after lines, after sentences, after words."""
NOT_CONTENT = (
    "nav, script, style, footer, aside:not(.footnote, .footnote-list), noscript, template, iframe, svg, button, "
    "select, form, [role=navigation], [role=search], [role=contentinfo], [hidden], .headerlink, .toc, .navheader, "
    ".navfooter"
)
MAIN = ("main", "[role=main]", "body")
HEADINGS = {f"h{level}": level for level in range(1, 7)}
MAX_HEADINGS, MAX_HEADING_CHARS = 6, 200
"""Bounds of what a passage repeats of the headings above it: the innermost, and the beginning of each."""
PARAGRAPHS = HEADINGS.keys() | {
    *("address", "article", "blockquote", "body", "caption", "dd", "details", "div", "dl", "dt", "figcaption"),
    *("figure", "header", "hr", "html", "li", "main", "ol", "p", "pre", "section", "summary", "table", "tr", "ul"),
}


class UnusableDocumentError(Exception):
    """A file without usable text. It never leaves `sources`: its message becomes an entry of the summary."""


@dataclass(frozen=True, slots=True)
class Block:
    """A heading, or a paragraph, list, table or listing. Terms of definition lists are headings of the definitions."""

    text: str
    level: int = 0
    """Level of a heading: 1 to 6, or more for the term of a definition list; 0 of any other block."""
    list_depth: int = 0
    """Number of definition lists around it."""


@dataclass(frozen=True, slots=True)
class Document:
    """A file's title and its text, as blocks in order."""

    uri: str
    """Path within the folder, with slashes."""
    title: str
    blocks: tuple[Block, ...]
    left_out: str = ""
    """The pages of a PDF that are missing in `blocks`, with the reason; empty if there are none."""


def find_documents(
    folder: Path, *, max_file_bytes: int, leave_out: Path | None = None
) -> tuple[list[Path], list[tuple[str, str]]]:
    """Return the files to read below `folder`, sorted by path, and the skipped paths within it, each with the reason.

    A path is skipped as `reason_to_skip` says, and a folder also if it cannot be read; nothing below it is listed.

    :raises ConfigurationError: `folder` is not a folder.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"{folder} is not a folder: name the folder that holds the documents")
    files, skipped = [], []
    pending = [folder]
    while pending:
        path = pending.pop()
        reason = None if path == folder else reason_to_skip(path, max_file_bytes, leave_out)
        if reason:
            skipped.append((relative_name(path, folder), reason))
        elif not path.is_dir():
            files.append(path)
        else:
            try:
                pending.extend(sorted(path.iterdir(), reverse=True))
            except OSError as error:
                skipped.append((relative_name(path, folder), f"cannot be read: {error.strerror}"))
    return files, skipped


def reason_to_skip(path: Path, max_file_bytes: int, leave_out: Path | None) -> str | None:
    """Return why this path is skipped: hidden, a symbolic link, `leave_out`, of another type, too large; else None."""
    if path.name.startswith("."):
        return "hidden"
    if path.is_symlink():  # a target within the folder is read by itself; this way there are no loops
        return "symbolic link"
    if path.is_dir():
        return "is the index" if path == leave_out else None
    if not path.is_file():
        return "not a regular file"
    if path.suffix.lower() not in TEXT | MARKDOWN | HTML | PDF:
        return "not text, Markdown, HTML or PDF by its name"
    num_bytes = path.stat().st_size
    return f"{num_bytes} bytes, more than {max_file_bytes}" if num_bytes > max_file_bytes else None


def relative_name(path: Path, folder: Path) -> str:
    """Return the path within the folder, with slashes, and with U+FFFD for bytes that are not UTF-8."""
    return os.fsencode(path.relative_to(folder).as_posix()).decode("utf-8", "replace")


def nothing_to_index(folder: Path | str, skipped: Iterable[tuple[str, str]]) -> ConfigurationError:
    """Return the error for a folder or file without passages, which counts the skipped files by reason."""
    counts = Counter(reason for _, reason in sorted(skipped))
    reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
    return ConfigurationError(
        f"{folder} holds no text, Markdown, HTML or PDF to index (skipped: {reasons or 'nothing'})"
    )


def read_documents(
    folder: Path,
    paths: list[Path],
    skipped: list[tuple[str, str]],
    passage_words: int,
    report: Callable[[int], None],
    read_pdf: ReadPdf,
) -> Iterator[tuple[Document, list[str]]]:
    """Yield each document at `paths` with its passages. Add to `skipped` each unusable file with the reason, and each
    PDF that is yielded without some of its pages.

    report: called before each file with the number of files before it.
    """
    for number, path in enumerate(paths):
        report(number)
        try:
            document = read_document(path, folder, read_pdf)
        except UnusableDocumentError as error:
            skipped.append((relative_name(path, folder), str(error)))
        else:
            if document.left_out:
                skipped.append((document.uri, document.left_out))
            yield document, list(split_document(document, passage_words))


def read_document(path: Path, folder: Path, read_pdf: ReadPdf) -> Document:
    """Return the document in a file, titled by its title, else first heading, else file name.

    Raises UnusableDocumentError for a file that cannot be read or decoded, is a symbolic link, or has no text.
    """
    try:
        with open_regular(path) as file:
            body = file.read()
    except OSError as error:
        raise UnusableDocumentError(f"cannot be read: {error.strerror}") from error
    suffix, left_out = path.suffix.lower(), ""
    if suffix in PDF:
        require_package("pypdf")
        try:
            title, text, left_out = read_pdf(body)
        except UnusablePdfError as error:
            raise UnusableDocumentError(str(error)) from error
        blocks = _read_text(text)[1]
    elif not marked_encoding(body) and b"\0" in body[:8192]:
        raise UnusableDocumentError("binary")
    elif suffix in HTML:
        require_package("webencodings")
        title, blocks = _read_html(decode(body))
    else:
        title, blocks = (_read_markdown if suffix in MARKDOWN else _read_text)(_decode(body))
    blocks = [replace(block, text=readable(block.text)) for block in blocks if not is_blank(block.text)]
    if not blocks:
        raise UnusableDocumentError("no text in it")
    uri = relative_name(path, folder)
    heading = next((block.text for block in blocks if block.level), "")
    return Document(uri, readable(title) or heading or PurePosixPath(uri).stem, tuple(blocks), left_out)


def _decode(body: bytes) -> str:
    """Decode UTF-8, or UTF-16 with a mark, with uniform line ends. Raises UnusableDocumentError for others."""
    try:
        text = body.decode(marked_encoding(body) or "utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        raise UnusableDocumentError(f"not UTF-8: byte {error.start} does not decode") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _read_text(text: str) -> tuple[str, list[Block]]:
    """Return an empty title, and the paragraphs between empty lines."""
    return "", [Block(part.strip("\n")) for part in re.split(r"\n\s*\n", text) if part.strip()]


def _read_markdown(text: str) -> tuple[str, list[Block]]:
    """Return the front matter's title, or "", and the blocks after it.

    Headings become plain text, HTML blocks their text; others keep their Markdown.
    """
    try:
        from markdown_it import MarkdownIt
    except ImportError:
        raise MissingDependencyError("markdown-it-py", EMBED) from None
    title = ""
    if front_matter := re.match(r"---\n(.*?\n)?---\n", text, re.DOTALL):
        text = text[front_matter.end() :]
        if match := re.search(r"""^title:\s*["']?(.+?)["']?\s*$""", front_matter[0], re.MULTILINE):
            title = match[1]
    lines = text.split("\n")
    blocks = []
    tokens = MarkdownIt("commonmark").parse(text)
    for number, token in enumerate(tokens):
        if token.level or not token.map or token.nesting < 0:
            continue
        if token.type == "heading_open":
            inline = tokens[number + 1].children or []
            heading = "".join(" " if part.type == "softbreak" else part.content for part in inline)
            blocks.append(Block(heading.strip(), HEADINGS[token.tag]))
        elif token.type == "html_block":
            blocks += _read_html(token.content)[1]
        else:
            blocks.append(Block("\n".join(lines[slice(*token.map)]).strip("\n")))
    return title, [block for block in blocks if block.text.strip()]


def _read_html(html: str) -> tuple[str, list[Block]]:
    """Return the title, or "", and the blocks of the main part, else of the body, else none, without menus and forms.

    Raises UnusableDocumentError if the parser rejects the markup.
    """
    try:
        import lxml  # noqa: F401 - BeautifulSoup loads it by name
        from bs4 import BeautifulSoup, XMLParsedAsHTMLWarning
        from bs4.exceptions import ParserRejectedMarkup
    except ImportError as error:
        raise MissingDependencyError(f"beautifulsoup4 or lxml ({error.name})", EMBED) from None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", XMLParsedAsHTMLWarning)
        try:
            page = BeautifulSoup(html, "lxml")
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
    """Yield a block for each run of text in the same innermost element of `PARAGRAPHS`; list items begin with "- ".

    White space is collapsed, except in `pre`. A row of a table is one block. The `list_depth` of a block is the number
    of `dl` around its element; a `dt` is a heading, of level 6 plus that number. root: an element of Beautiful Soup.
    """
    from bs4.element import NavigableString, PreformattedString

    def paragraph(text: Any) -> Any:
        return text.find_parent(PARAGRAPHS)

    # Comments are PreformattedString. Tags are compared by identity, because == compares their whole contents.
    texts = (each for each in root.descendants if isinstance(each, NavigableString))
    texts = (each for each in texts if not isinstance(each, PreformattedString))
    for _, run in groupby(texts, key=lambda text: id(paragraph(text))):
        parts = list(run)
        element, text = paragraph(parts[0]), "".join(parts)
        text = text.strip("\n").rstrip() if element.name == "pre" else " ".join(text.split())
        if text:
            depth = len(element.find_parents("dl"))
            level = len(HEADINGS) + depth if element.name == "dt" else HEADINGS.get(element.name, 0)
            yield Block(f"- {text}" if element.name == "li" else text, level, depth)


def count_words(text: str) -> int:
    """Return the number of words, signs and CJK characters, which is close to the number of word pieces.

    >>> count_words("asyncio.run() は 2 つ")
    8
    """
    return sum(1 for _ in WORD.finditer(text))


def split_document(document: Document, passage_words: int) -> Iterator[str]:
    """Yield passages of about `passage_words` words or fewer, each beginning with the headings above it.

    Passages end at headings and between paragraphs, and inside a paragraph only if it alone is too long. A section
    shorter than a third of `passage_words` is joined to the next. Passages do not overlap: overlapping neighbours would
    compete for the k nearest and be prefilled twice. Headings that the document's title contains are not repeated.
    """
    path: list[Block] = []
    held: list[Block] = []
    num_words, has_passage = 0, False
    for block in document.blocks:
        if block.level and held and held[-1].level >= block.level:  # the last heading has no text of its own
            num_words += count_words(held[-1].text)
            held[-1] = Block(held[-1].text)
        if block.level and num_words * 3 >= passage_words:
            yield _join(held)
            held, num_words, has_passage = [], 0, True
        path = [each for each in path if each.level < (block.level or len(HEADINGS) + block.list_depth + 1)]
        if block.level:
            held = [*held, block] if held else [*_repeated(path, document.title), block]
            path.append(block)
            continue
        for piece in _pieces(block.text, passage_words):
            num_new = count_words(piece)
            if num_words and num_words + num_new > passage_words:
                yield _join(held)
                held, num_words, has_passage = _repeated(path, document.title), 0, True
            held.append(Block(piece.strip("\n")))
            num_words += num_new
    if num_words or not has_passage:
        yield "\n\n".join(block.text for block in held)


def _repeated(path: list[Block], title: str) -> list[Block]:
    """Return the headings that a passage repeats, as one block: without those that its document's title has."""
    texts = [each.text[:MAX_HEADING_CHARS] for each in path if each.text not in title]
    headings = " > ".join(texts[-MAX_HEADINGS:])
    return [Block(headings, level=1)] if headings else []


def _join(blocks: list[Block]) -> str:
    """Join the text of a passage, without the headings at its end, which belong to the next."""
    end = max(number for number, block in enumerate(blocks, 1) if not block.level)
    return "\n\n".join(block.text for block in blocks[:end])


def _pieces(text: str, max_words: int, level: int = 0) -> list[str]:
    """Split `text` at its best breaks into few pieces of at most `max_words` words, which joined are `text`."""
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
