"""Passages of a page that are relevant to a query, and what of them is new after the pages before.

    Markdown ──split_markdown──▶ passages ──select──▶ relevant ones, in page order ──assemble──▶ text of a chunk

All but `assemble` run in a worker; that runs in the caller's process, where what earlier pages said is known.
"""

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

from streamrag.query.relevance import WORD, Passage, Stem, relevant_terms, terms

MAX_STEMS = 10_000
"""Different words of a page that begin like one of the query and are stemmed: half a second, and enough for a book."""

MIN_REPEATED_CHARS = 40
"""Shorter paragraphs ("Example:") are repeated for good reasons."""

MIN_NEWS_CHARS = 20
"""Shorter paragraphs are no news: they are what is left of a page that differs from another in its page number."""

MIN_SCORE = 0.25
"""Share of the page's best score. Passages below it share a common word with the query, and little else."""

MAX_TERMS_REQUIRED = 3

Score: TypeAlias = Callable[[Sequence[Sequence[str]], Sequence[str]], Sequence[float]]
"""Documents as terms, and the query's terms, to one score per document."""


def relevant_stems(query: str, stem: Stem) -> Stem:
    """Return `stem` for words that may have a stem in common with `query`; others stay as they are, and match nothing.

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
    """Return the passages that are relevant to `query`, at most `max_chars` together, in page order.

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
    """Join `passages` without the blocks that are in `seen`, which is added to; return "" if nothing is new.

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
