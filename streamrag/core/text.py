"""Split Markdown into passages, and texts into terms that can be compared.

The text is untrusted, so every function takes linear time: no two repeats of a regular expression can match the same
characters, and no line is copied or summed up more than once.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

TARGET_CHARS = 600  # a passage ends once it is this long: about what a question needs to be answered, with its context

MAX_BLOCK_CHARS = 2000
MAX_HEADING_CHARS = 200
MAX_WORD_CHARS = 100
"""Most characters of a term. Stemmers cache words, and a page may be one word of a megabyte."""

HEADING = re.compile(r"(#{1,6})\s")
HEADING_END = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "¶"
"""Unicode white space, and the sign that documentation tools put behind a heading as its link."""

FENCE = re.compile(r"\s*(```|~~~)")
RULE = re.compile(r"\s*([*_-]\s*){3,}")

CJK = r"\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af"
WORD = re.compile(rf"[{CJK}]|[^\W_{CJK}]+")
CAMEL_CASE = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")

STOP_WORDS = frozenset(
    """
    a about all also am an and any are as at be because been being but by can could did do does doing during each few
    for from further had has have having he her here hers him his how i if in into is it its just me more most my no
    nor not now of off on once only or other our out over own please same she should so some such tell than that the
    their them then there these they this those through to too up very was way we were what when where which while who
    whom why will with would you your
    """.split()  # noqa: SIM905 (a list of quoted words is unreadable)
)

Stem: TypeAlias = Callable[[str], str]


@dataclass(frozen=True, slots=True)
class TextPassage:
    """Consecutive blocks (paragraphs, list items, code listings) under one heading."""

    headings: tuple[str, ...]
    """Markdown headings from the page's title down to its own."""
    blocks: tuple[str, ...]

    @property
    def num_chars(self) -> int:
        """Number of characters of the blocks and the innermost heading, with separators."""
        return sum(len(block) + 2 for block in (*self.blocks, *self.headings[-1:]))


class _Block(NamedTuple):
    text: str
    is_term: bool = False
    """Whether the next block defines it, as in a definition list."""
    is_heading: bool = False

    @property
    def introduces(self) -> bool:
        """Whether the next block belongs to this one, which is a term or ends with a colon."""
        return self.is_term or self.text.endswith(":")


def split_markdown(markdown: str) -> list[TextPassage]:
    """Split a page between blocks at headings, definition terms and past `TARGET_CHARS`, not behind an introduction."""
    passages: list[TextPassage] = []
    headings: list[str] = []
    blocks: list[_Block] = []
    num_chars = 0  # in `blocks`

    def close() -> None:
        if blocks:
            passages.append(TextPassage(tuple(headings), tuple(block.text for block in blocks)))
            blocks.clear()

    for block in _blocks(markdown.splitlines()):
        if heading := block.is_heading and HEADING.match(block.text):
            close()
            num_chars = 0
            headings = [outer for outer in headings if outer.index(" ") < len(heading[1])]
            text = block.text[heading.end() :].strip(HEADING_END)
            headings += [f"{heading[1]} {text[:MAX_HEADING_CHARS]}"] if text else []
            continue
        if blocks and (num_chars >= TARGET_CHARS or block.is_term) and not blocks[-1].introduces:
            close()
            num_chars = 0
        blocks.append(block)
        num_chars += len(block.text)
    close()
    return passages


def _blocks(lines: Iterable[str]) -> Iterator[_Block]:
    """Yield headings, fenced listings, and runs of lines between empty ones, in pieces where they are too long."""
    block: list[str] = []
    fence = ""
    for line in lines:
        if fence:
            if line.strip() == fence:
                while not block[-1].strip():
                    block.pop()
                fence = ""
            block.append(line)
            if not fence:
                yield from _pieces(block)
                block = []
        elif not line.strip() or HEADING.match(line) or FENCE.match(line):
            # html2text puts four spaces under a term of a definition list.
            yield from _pieces(block, is_term=len(block) == 1 and line == "    ")
            opening = FENCE.match(line)
            fence = opening[1] if opening else ""
            block = [line] if opening else []
            if HEADING.match(line):
                yield _Block(line, is_heading=True)
        else:
            block.append(line)
    yield from _pieces(block)


def _pieces(lines: list[str], is_term: bool = False) -> Iterator[_Block]:
    """Yield blocks of at most MAX_BLOCK_CHARS, the last a term if `is_term`; nothing for blank lines or a rule."""
    piece: list[str] = []
    num_chars = 0
    for part in (part for line in lines for part in _fold(line)):
        if piece and num_chars + len(part) > MAX_BLOCK_CHARS:
            yield _Block("\n".join(piece))
            piece, num_chars = [], 0
        piece.append(part)
        num_chars += len(part) + 1
    text = "\n".join(piece).strip("\n")
    if text.strip() and not RULE.fullmatch(text):
        yield _Block(text, is_term)


def _fold(line: str) -> Iterator[str]:
    """Yield parts of a line of at most MAX_BLOCK_CHARS, cut between words if possible."""
    begin = 0
    while len(line) - begin > MAX_BLOCK_CHARS:
        end = begin + MAX_BLOCK_CHARS
        cut = line.rfind(" ", begin + MAX_BLOCK_CHARS // 2, end) + 1 or end
        yield line[begin:cut]
        begin = cut
    yield line[begin:].rstrip()


def terms(text: str, stem: Stem = str) -> list[str]:
    """Return the case-folded stems of the words in `text`, and of parts of CamelCase words. CJK splits by character."""
    stems: list[str] = []
    for word in (match[0][:MAX_WORD_CHARS] for match in WORD.finditer(text)):
        stems.append(stem(word.casefold()))
        if not word.islower() and len(parts := CAMEL_CASE.findall(word)) > 1:
            stems.extend(stem(part.casefold()) for part in parts)
    return stems


def relevant_terms(query: str, stem: Stem = str) -> list[str]:
    """Return the distinct terms of the query, without stop words unless there are no others."""
    words = WORD.findall(query)
    relevant = [word for word in words if word.casefold() not in STOP_WORDS]
    return list(dict.fromkeys(terms(" ".join(relevant or words), stem)))
