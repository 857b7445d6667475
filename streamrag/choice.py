"""Which parts of a page, and which pages, matter to a question: for contexts that do not hold everything.

BM25 over a page's parts, and over pages by their best parts. Words are compared by how they begin, which does for a
stemmer here: nothing has to be installed, and what is compared are documents of one query.
"""

import math
from collections import Counter
from collections.abc import Sequence

from streamrag.core import Chunk
from streamrag.sources.relevance import Passage, relevant_terms, split_markdown, terms

NUM_LETTERS = 5
"""First letters by which words are compared: "cancelled" and "cancelling" are the same then."""

MIN_READ_CHARS = 200_000
"""At least so many characters of a text are compared, and at most twice as many as are wanted of it if that is more:
time must not grow with what cannot be used."""

K1, B = 1.5, 0.75
"""BM25's usual weights of repeated words, and of length."""


class Relevance:
    """Judges texts by one question. Blocking, for a time in proportion to the text, or to what may be used of it."""

    def __init__(self, question: str) -> None:
        self._wanted = relevant_terms(question, _stem)
        self._split: tuple[str, list[Passage], list[int]] = ("", [], [])

    def shorten(self, text: str, max_chars: int) -> tuple[str, str]:
        """The parts of `text` that have most of the question's words, at most `max_chars`, and the rest; both in order.

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
        """The parts of a text, and their numbers, the best first. The last ones are kept, for another `max_chars`."""
        if self._split[0] != text:
            passages = split_markdown(text)
            scores = self._bm25([" ".join((*passage.headings, *passage.blocks)) for passage in passages])
            self._split = (text, passages, sorted(range(len(passages)), key=lambda i: -scores[i]))
        return self._split[1:]

    def scores(self, chunks: Sequence[Chunk]) -> list[float]:
        """One for each chunk; larger is better. The retriever's own, if it gave them to all."""
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
        """Source: https://en.wikipedia.org/wiki/Okapi_BM25, with Lucene's weights of words, which are positive."""
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
    """How much of a text is read: at most so many characters, and if there are any, whole lines."""
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
