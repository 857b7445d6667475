"""Relevance of a page's parts, and of pages, to a question: for contexts that do not hold everything.

Markdown is split into passages, which BM25 compares with the question; a page is as relevant as its best passage. Words
are compared by how they begin, which does for a stemmer here: nothing has to be installed, and the documents that are
compared are those of one query.

Pages are written by strangers, so every step takes time in proportion to what it is given: no two repeats of a regular
expression can match the same characters, and nothing is summed up or copied anew for each line.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from streamrag.core import Chunk

NUM_LETTERS = 5
"""First letters by which words are compared: "cancelled" and "cancelling" are the same then."""

MIN_READ_CHARS = 200_000
"""At least so many characters of a text are compared, and at most twice as many as are wanted of it if that is more:
time must not grow with what cannot be used."""

K1, B = 1.5, 0.75
"""BM25's usual weights of repeated words, and of length."""

TARGET_CHARS = 600
"""A passage is closed once it is this long: about what a question needs to be answered, with its context."""

MAX_BLOCK_CHARS = 2000
MAX_HEADING_CHARS = 200
MAX_WORD_CHARS = 100
"""Characters of a word as a term. Stems are remembered, and a page may be one word of a megabyte."""

HEADING = re.compile(r"(#{1,6})\s")
HEADING_END = "".join(filter(str.isspace, map(chr, range(0x3001)))) + "¶"
"""All white space of Unicode, and the sign that documentation puts behind a heading to link to it."""

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
    """.split()  # noqa: SIM905 (nobody can read a list of quoted words)
)

Stem: TypeAlias = Callable[[str], str]


# ---------------------------------------------------------------------------------------------------------- passages


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive blocks (paragraphs, list items, code listings) under one heading."""

    headings: tuple[str, ...]
    """Headings from the page's to its own, as Markdown."""
    blocks: tuple[str, ...]

    @property
    def num_chars(self) -> int:
        return sum(len(block) + 2 for block in (*self.blocks, *self.headings[-1:]))


# ---------------------------------------------------------------------------------------------------------- splitting


class _Block(NamedTuple):
    text: str
    is_term: bool = False
    """A line that the next block explains, as in a definition list."""
    is_heading: bool = False

    @property
    def introduces(self) -> bool:
        return self.is_term or self.text.endswith(":")


def split_markdown(markdown: str) -> list[Passage]:
    """Split a page into passages, in page order."""
    passages: list[Passage] = []
    headings: list[str] = []
    blocks: list[_Block] = []
    num_chars = 0  # in `blocks`

    def close() -> None:
        if blocks:
            passages.append(Passage(tuple(headings), tuple(block.text for block in blocks)))
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
    """Yield the lines as a block; as several if it is too long."""
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
    """Cut a line into parts of at most MAX_BLOCK_CHARS, between words where there are any."""
    begin = 0
    while len(line) - begin > MAX_BLOCK_CHARS:
        end = begin + MAX_BLOCK_CHARS
        cut = line.rfind(" ", begin + MAX_BLOCK_CHARS // 2, end) + 1 or end
        yield line[begin:cut]
        begin = cut
    yield line[begin:].rstrip()


# ------------------------------------------------------------------------------------------------------------- terms


def terms(text: str, stem: Stem = str) -> list[str]:
    """Return the words of `text`, and the parts of those in CamelCase. Chinese, Japanese and Korean go by character."""
    found: list[str] = []
    for word in (match[0][:MAX_WORD_CHARS] for match in WORD.finditer(text)):
        found.append(stem(word.casefold()))
        if not word.islower() and len(parts := CAMEL_CASE.findall(word)) > 1:
            found.extend(stem(part.casefold()) for part in parts)
    return found


def relevant_terms(query: str, stem: Stem = str) -> list[str]:
    """Return the query's terms, each once, without those that every English text has unless there are no others."""
    words = WORD.findall(query)
    telling = [word for word in words if word.casefold() not in STOP_WORDS]
    return list(dict.fromkeys(terms(" ".join(telling or words), stem)))


# --------------------------------------------------------------------------------------------------------- relevance


class Relevance:
    """A judge of texts by one question. It blocks for a time in proportion to the text that may be used."""

    def __init__(self, question: str) -> None:
        self._wanted = relevant_terms(question, _stem)
        self._split: tuple[str, list[Passage], list[int]] = ("", [], [])

    def shorten(self, text: str, max_chars: int) -> tuple[str, str]:
        """Return the parts of `text` with most of the question's words, at most `max_chars`, and the rest, in order.

        Of parts that have as many, the earlier go first. A part that is too long is left to the rest; if all are, what
        comes first is cut off. What is behind the first MIN_READ_CHARS, or twice `max_chars`, is left to the rest too.
        """
        end = _end_of(text, max(MIN_READ_CHARS, 2 * max_chars))
        passages, ranked = self._ranked(text[:end])
        kept: set[int] = set()
        room = max_chars
        for i in ranked:
            if passages[i].num_chars <= room:
                room -= passages[i].num_chars
                kept.add(i)
        if not kept:
            return text[: max(max_chars, 0)], text[max(max_chars, 0) :]
        first, rest = ([p for i, p in enumerate(passages) if (i in kept) is is_kept] for is_kept in (True, False))
        return _joined(first), "\n\n".join(filter(None, (_joined(rest), text[end:])))

    def _ranked(self, text: str) -> tuple[list[Passage], list[int]]:
        """Return the parts of a text, and their numbers, the best first. Keeps the last, for another `max_chars`."""
        if self._split[0] != text:
            passages = split_markdown(text)
            scores = self._bm25([" ".join((*passage.headings, *passage.blocks)) for passage in passages])
            self._split = (text, passages, sorted(range(len(passages)), key=lambda i: -scores[i]))
        return self._split[1:]

    def scores(self, chunks: Sequence[Chunk]) -> list[float]:
        """Return a score for each chunk, larger for better: the retriever's own, if it gave them to all."""
        own = [chunk.score for chunk in chunks if chunk.score is not None]
        if len(own) == len(chunks):
            return own
        passages = [(i, passage) for i, chunk in enumerate(chunks) for passage in split_markdown(_read(chunk))]
        texts = [" ".join((chunks[i].title, *passage.headings, *passage.blocks)) for i, passage in passages]
        best = [0.0] * len(chunks)
        for (i, _), score in zip(passages, self._bm25(texts), strict=True):
            best[i] = max(best[i], score)
        return best

    def _bm25(self, texts: Sequence[str]) -> list[float]:
        """Score texts by BM25, with Lucene's weights of words, which are positive.

        Source: https://en.wikipedia.org/wiki/Okapi_BM25
        """
        documents = [Counter(terms(text, _stem)) for text in texts]
        lengths = [document.total() for document in documents]
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        wanted = set(self._wanted)
        # Only the terms that each document has: a question may have as many words as a document.
        found = [sorted(document.keys() & wanted) for document in documents]
        num_with = Counter(term for terms_of_one in found for term in terms_of_one)
        weights = {term: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for term, n in num_with.items()}
        scores = []
        for document, length, present in zip(documents, lengths, found, strict=True):
            norm = K1 * (1 - B + B * length / mean)
            scores.append(sum(weights[t] * document[t] * (K1 + 1) / (document[t] + norm) for t in present))
        return scores


def _end_of(text: str, max_chars: int) -> int:
    """Return how much of a text is read: at most `max_chars`, and if there are any, whole lines."""
    return len(text) if len(text) <= max_chars else text.rfind("\n", 0, max_chars) + 1 or max_chars


def _read(chunk: Chunk) -> str:
    return chunk.text[: _end_of(chunk.text, MIN_READ_CHARS)]


def _stem(word: str) -> str:
    return word[:NUM_LETTERS]


def _joined(passages: Sequence[Passage]) -> str:
    text: list[str] = []
    heading = ""
    for passage in passages:
        if passage.headings and passage.headings[-1] != heading:
            heading = passage.headings[-1]
            text.append(heading)
        text += passage.blocks
    return "\n\n".join(text)
