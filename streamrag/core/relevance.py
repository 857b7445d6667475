"""Rank chunks and their passages by relevance to a question, when the context cannot hold all of them.

Markdown is split into passages, which BM25 scores; a chunk is as relevant as its best passage. Words are compared by
their first letters: with the few documents of one query, that replaces a stemmer, and needs no package.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from streamrag.core import Chunk
from streamrag.core.text import TextPassage, relevant_terms, split_markdown, terms

NUM_LETTERS = 5  # first letters by which words are compared, so that "cancelled" and "cancelling" are equal

MIN_READ_CHARS = 200_000
"""Characters of a text that are scored, or twice as many as can be used if that is more: time must not grow with text
that cannot be used."""

K1, B = 1.5, 0.75
"""BM25's usual weights of repeated words and of length."""


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
        kept = fitting(passages, ranked, max_chars)
        if not kept:
            return text[: max(max_chars, 0)], text[max(max_chars, 0) :]
        first, rest = ([p for i, p in enumerate(passages) if (i in kept) is is_kept] for is_kept in (True, False))
        return _joined(first), "\n\n".join(filter(None, (_joined(rest), text[end:])))

    def _ranked(self, text: str) -> tuple[list[TextPassage], list[int]]:
        """Return the passages of a text, and their indices in order of relevance. The last result is cached."""
        if self._split[0] != text:
            passages = split_markdown(text)
            scores = self._bm25(" ".join((*passage.headings, *passage.blocks)) for passage in passages)
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
        texts = (" ".join((chunks[i].title, *passage.headings, *passage.blocks)) for i, passage in passages)
        best = [0.0] * len(chunks)
        for (i, _), score in zip(passages, self._bm25(texts), strict=True):
            best[i] = max(best[i], score)
        return best

    def _bm25(self, texts: Iterable[str]) -> list[float]:
        return bm25((terms(text, _stem) for text in texts), self._wanted)


def bm25(documents: Iterable[Sequence[str]], query: Sequence[str]) -> list[float]:
    """Return each document's score for `query`, both as terms, with Lucene's weights, which are never negative.

    Source: https://lucene.apache.org/core/9_11_0/core/org/apache/lucene/search/similarities/BM25Similarity.html
    """
    counts = list(map(Counter, documents))
    lengths = [count.total() for count in counts]
    mean = sum(lengths) / max(len(lengths), 1) or 1.0
    wanted = set(query)
    # Iterate over the terms of each document only: a question may have as many words as a document.
    present_terms = [sorted(count.keys() & wanted) for count in counts]
    num_with = Counter(term for present in present_terms for term in present)
    weights = {term: math.log(1 + (len(counts) - n + 0.5) / (n + 0.5)) for term, n in num_with.items()}
    scores = []
    for count, length, present in zip(counts, lengths, present_terms, strict=True):
        norm = K1 * (1 - B + B * length / mean)
        scores.append(sum(weights[t] * count[t] * (K1 + 1) / (count[t] + norm) for t in present))
    return scores


def fitting(passages: Sequence[TextPassage], ranked: Iterable[int], max_chars: int) -> set[int]:
    """Return the indices of passages, taken by rank while they fit `max_chars`; too long ones are passed over."""
    indices: set[int] = set()
    for i in ranked:
        if passages[i].num_chars <= max_chars:
            max_chars -= passages[i].num_chars
            indices.add(i)
    return indices


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
