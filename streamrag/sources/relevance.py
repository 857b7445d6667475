"""Cutting a page's text into passages, keeping those that matter for a query, and dropping what came before.

    Markdown ──split_markdown──▶ passages ──select──▶ relevant ones, in page order ──assemble──▶ text of a chunk

Pages are written by strangers, so every step takes time in proportion to what it is given: no two repeats of a regular
expression can match the same characters, and nothing is summed up or copied anew for each line.

All but `assemble` run in a worker; that runs in the caller's process, where what earlier pages said is known.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

TARGET_CHARS = 600
"""A passage is closed once it is this long: about what a question needs to be answered, with its context."""

MAX_BLOCK_CHARS = 2000
MAX_HEADING_CHARS = 200
MAX_WORD_CHARS = 100
"""Characters of a word as a term. Stems are remembered, and a page may be one word of a megabyte."""

MAX_STEMS = 10_000
"""Different words of a page that begin like one of the query and are stemmed: half a second, and enough for a book."""

MIN_REPEATED_CHARS = 40
"""Shorter paragraphs ("Example:") are repeated for good reasons."""

MIN_NEWS_CHARS = 20
"""Shorter paragraphs are no news: they are what is left of a page that differs from another in its page number."""

MIN_SCORE = 0.25
"""Share of the page's best score. Passages below it share a common word with the query, and little else."""

MAX_TERMS_REQUIRED = 3

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

Score: TypeAlias = Callable[[Sequence[Sequence[str]], Sequence[str]], Sequence[float]]
"""Documents as terms, and the query's terms, to one score per document."""


@dataclass(frozen=True, slots=True)
class Passage:
    """Consecutive blocks (paragraphs, list items, code listings) under one heading."""

    headings: tuple[str, ...]
    """From the page's to its own, as Markdown."""
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
    """The passages of a page, in page order."""
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
    """What the lines make together; several blocks if it is too long."""
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
    """A line in parts of at most MAX_BLOCK_CHARS, cut between words where there are any."""
    begin = 0
    while len(line) - begin > MAX_BLOCK_CHARS:
        end = begin + MAX_BLOCK_CHARS
        cut = line.rfind(" ", begin + MAX_BLOCK_CHARS // 2, end) + 1 or end
        yield line[begin:cut]
        begin = cut
    yield line[begin:].rstrip()


# ---------------------------------------------------------------------------------------------------------- selecting


def terms(text: str, stem: Stem = str) -> list[str]:
    """The words of `text`, and the parts of those in CamelCase. Chinese, Japanese and Korean go by character."""
    found: list[str] = []
    for word in (match[0][:MAX_WORD_CHARS] for match in WORD.finditer(text)):
        found.append(stem(word.casefold()))
        if not word.islower() and len(parts := CAMEL_CASE.findall(word)) > 1:
            found.extend(stem(part.casefold()) for part in parts)
    return found


def relevant_terms(query: str, stem: Stem = str) -> list[str]:
    """The query's terms, each once, without those that every English text contains unless there are no others."""
    words = WORD.findall(query)
    telling = [word for word in words if word.casefold() not in STOP_WORDS]
    return list(dict.fromkeys(terms(" ".join(telling or words), stem)))


def relevant_stems(query: str, stem: Stem) -> Stem:
    """`stem` for the words that may have a stem in common with `query`; others are what they are, and match nothing.

    Stemming costs much more than all else that is done with a word, and a page may have 100,000 different ones. A stem
    begins as its word does, but for a "y" that becomes "i" (dying, die).
    """
    stems: dict[str, str] = {}
    beginnings = {_beginning(term) for term in relevant_terms(query, stem)}

    def stem_if_relevant(word: str) -> str:
        if word in stems:
            return stems[word]
        if len(stems) == MAX_STEMS or not beginnings.intersection((_beginning(word), word[:1])):
            return word
        return stems.setdefault(word, stem(word))

    return stem_if_relevant


def _beginning(word: str) -> str:
    return word[:2].replace("y", "i")


def select(
    passages: Sequence[Passage],
    query: str,
    *,
    title: str,
    max_chars: int,
    score: Score,
    stem: Stem = str,
) -> list[Passage]:
    """The passages that are relevant to `query`, at most `max_chars` together, in page order.

    None if no passage has, with its headings and the page's title, half of the query's terms (three of many). A query
    without words, such as an emoji, makes no choice: the page's beginning is as good as any part.
    """
    wanted = relevant_terms(query, stem)
    if not wanted:
        return _fitting(passages, range(len(passages)), max_chars)
    documents = [terms(" ".join((*passage.headings, *passage.blocks)), stem) for passage in passages]
    in_title = set(terms(title, stem))
    required = min(MAX_TERMS_REQUIRED, math.ceil(len(wanted) / 2))
    coverage = (sum(term in document or term in in_title for term in wanted) for document in map(set, documents))
    if max(coverage, default=0) < required:
        return []
    scores = score(documents, wanted)
    least = MIN_SCORE * max(scores)
    ranked = sorted(range(len(passages)), key=lambda i: -scores[i])
    return _fitting(passages, (i for i in ranked if scores[i] > 0 and scores[i] >= least), max_chars)


def _fitting(passages: Sequence[Passage], ranked: Iterable[int], max_chars: int) -> list[Passage]:
    chosen: list[int] = []
    for i in ranked:
        if passages[i].num_chars <= max_chars:
            max_chars -= passages[i].num_chars
            chosen.append(i)
    return [passages[i] for i in sorted(chosen)]


# --------------------------------------------------------------------------------------------------------- assembling


def assemble(
    passages: Iterable[Passage], seen: set[bytes], is_known: Callable[[str], bool] = lambda block: False
) -> str:
    """The text of `passages` without the blocks that are in `seen`, which is added to; empty if nothing is new.

    Blocks are the same if their words are; what is between words, and the case, does not count. `is_known` says of
    others whether they say nothing new either.
    """
    text: list[str] = []
    heading = ""
    has_any = has_news = could_have_news = False
    for passage in passages:
        blocks: list[str] = []
        for block in passage.blocks:
            words = " ".join(WORD.findall(block.casefold()))
            fingerprint = hashlib.blake2b(words.encode(errors="replace"), digest_size=16).digest()
            is_new = fingerprint not in seen and not is_known(block)
            seen.add(fingerprint)
            if is_new or len(words) < MIN_REPEATED_CHARS:
                blocks.append(block)
            has_news |= is_new and len(words) >= MIN_NEWS_CHARS
            could_have_news |= len(words) >= MIN_NEWS_CHARS
            has_any |= is_new
        if blocks and passage.headings and passage.headings[-1] != heading:
            heading = passage.headings[-1]
            text.append(heading)
        text += blocks
    return "\n\n".join(text) if has_news or (has_any and not could_have_news) else ""
