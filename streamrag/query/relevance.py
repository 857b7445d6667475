"""Rank chunks and their passages by relevance to a question, when the context cannot hold all of them.

Markdown is split into passages, which BM25 scores; a chunk is as relevant as its best passage. Words are compared by
their first letters: with the few documents of one query, that replaces a stemmer, and needs no package.

The text is untrusted, so every function takes linear time: no two repeats of a regular expression can match the same
characters, and no line is copied or summed up more than once.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from streamrag.core import Chunk

NUM_LETTERS = 5  # first letters by which words are compared, so that "cancelled" and "cancelling" are equal

MIN_READ_CHARS = 200_000
"""Characters of a text that are scored, or twice as many as can be used if that is more: time must not grow with text
that cannot be used."""

K1, B = 1.5, 0.75
"""BM25's usual weights of repeated words and of length."""

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


class Relevance:
    """The relevance of texts to one question. Its methods block, in proportion to the text that can be used."""

    def __init__(self, question: str) -> None:
        self._wanted = relevant_terms(question, _stem)
        self._split: tuple[str, list[TextPassage], list[int]] = ("", [], [])

    def shorten(self, text: str, max_chars: int) -> tuple[str, str]:
        """Return the most relevant passages of `text`, at most `max_chars`, and the rest; each in text order.

        Passages are joined anew, each counted with its heading, so even a text within `max_chars` may change. Among
        equals, earlier ones go first. A passage that is too long goes to the rest; if all are, the text is cut at
        `max_chars`. Text behind the first MIN_READ_CHARS, or twice `max_chars`, goes to the rest too.
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

    def _ranked(self, text: str) -> tuple[list[TextPassage], list[int]]:
        """Return the passages of a text, and their indices in order of relevance. The last result is cached."""
        if self._split[0] != text:
            passages = split_markdown(text)
            scores = self._bm25([" ".join((*passage.headings, *passage.blocks)) for passage in passages])
            self._split = (text, passages, sorted(range(len(passages)), key=lambda i: -scores[i]))
        return self._split[1:]

    def scores(self, chunks: Sequence[Chunk]) -> list[float]:
        """Return a score for each chunk, larger is better: the retriever's if all have one, else its best passage's, by
        BM25 among the passages of all chunks."""
        own = [chunk.score for chunk in chunks if chunk.score is not None]
        if len(own) == len(chunks):
            return own
        scored = [chunk.text[: _end_of(chunk.text, MIN_READ_CHARS)] for chunk in chunks]
        passages = [(i, passage) for i, text in enumerate(scored) for passage in split_markdown(text)]
        texts = [" ".join((chunks[i].title, *passage.headings, *passage.blocks)) for i, passage in passages]
        best = [0.0] * len(chunks)
        for (i, _), score in zip(passages, self._bm25(texts), strict=True):
            best[i] = max(best[i], score)
        return best

    def _bm25(self, texts: Sequence[str]) -> list[float]:
        """Return each text's BM25 score for the question, with Lucene's weights (en.wikipedia.org/wiki/Okapi_BM25)."""
        documents = [Counter(terms(text, _stem)) for text in texts]
        lengths = [document.total() for document in documents]
        mean = sum(lengths) / max(len(lengths), 1) or 1.0
        wanted = set(self._wanted)
        # Iterate over the terms of each document only: a question may have as many words as a document.
        present_terms = [sorted(document.keys() & wanted) for document in documents]
        num_with = Counter(term for present in present_terms for term in present)
        weights = {term: math.log(1 + (len(documents) - n + 0.5) / (n + 0.5)) for term, n in num_with.items()}
        scores = []
        for document, length, present in zip(documents, lengths, present_terms, strict=True):
            norm = K1 * (1 - B + B * length / mean)
            scores.append(sum(weights[t] * document[t] * (K1 + 1) / (document[t] + norm) for t in present))
        return scores


def _end_of(text: str, max_chars: int) -> int:
    """Return how many characters of a text to score: at most `max_chars`, in whole lines if possible."""
    return len(text) if len(text) <= max_chars else text.rfind("\n", 0, max_chars) + 1 or max_chars


def _stem(word: str) -> str:
    return word[:NUM_LETTERS]


def _joined(passages: Sequence[TextPassage]) -> str:
    """Return the text of passages, each under its innermost heading unless the passage before has the same."""
    text: list[str] = []
    heading = ""
    for passage in passages:
        if passage.headings and passage.headings[-1] != heading:
            heading = passage.headings[-1]
            text.append(heading)
        text += passage.blocks
    return "\n\n".join(text)
