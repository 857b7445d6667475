"""Detection of near-duplicates: paragraphs of mirrors or other versions, with nearly the same words as earlier ones.

    words ──MinHash and LSH, by rensa──▶ similar earlier paragraphs ──which words differ?──▶ near-duplicate or not

MinHash finds similar paragraphs, but two years' price lists are also similar, and so are "is allowed" and "is not
allowed". So two paragraphs are near-duplicates only if they share enough word triples and differ in few words, none of
which is a number, a negation, or a replacement of another word. A paragraph kept by mistake is read twice; one dropped
by mistake is lost.
"""

import re
from collections import Counter
from typing import TYPE_CHECKING

from streamrag.core.text import STOP_WORDS, words

if TYPE_CHECKING:
    from rensa import RMinHash, RMinHashLSH

NUM_PERM, NUM_BANDS = 64, 16
MIN_JACCARD = 0.6  # similarity of word triples: with it, paragraphs with a filling word more count as duplicates
MIN_WORDS = 12  # shorter paragraphs are never near-duplicates
MAX_DIFFERENT = 0.15  # share of words that only one of the paragraphs has
MAX_DIFFERENT_WORDS = 30  # the same as a number, which also bounds the cost of a comparison
FORM_CHARS = 5  # words with the same first letters are forms of one word, and so are a word and the word plus an ending
MAX_ENDING_CHARS = 2
MAX_CANDIDATES = 8  # earlier paragraphs to compare a paragraph with
MAX_PARAGRAPHS = 20_000  # paragraphs to remember in one crawl

NEGATIONS = frozenset(
    """
    no not none nor never neither nobody nothing nowhere cannot cant dont doesnt didnt isnt arent wasnt werent wont
    shouldnt mustnt without except unless only deprecated removed disabled enabled disable enable forbidden allowed
    """.split()  # noqa: SIM905 (nobody can read a list of quoted words)
)
MAY_TURN = re.compile(r"\d|^(un|non|dis|im|ir|in)")  # a number, or a word that may negate a sentence


def words_of(paragraph: str) -> list[str]:
    """Return the words of a paragraph in lower case, without apostrophes."""
    return words(paragraph.replace("'", "").replace("’", ""))


def triples_of(words: list[str]) -> set[str]:
    return {" ".join(words[i : i + 3]) for i in range(len(words) - 2)}


def is_near_duplicate(one: list[str], other: list[str]) -> bool:
    """Whether two paragraphs share most word triples, and differ in few words, none of which can change the meaning."""
    most = min(MAX_DIFFERENT * (len(one) + len(other)), MAX_DIFFERENT_WORDS)
    if abs(len(one) - len(other)) > most:
        return False
    counted, others = Counter(one), Counter(other)
    missing, added = counted - others, others - counted
    if missing.total() + added.total() > most:
        return False
    if any(word in NEGATIONS or MAY_TURN.search(word) for word in (*missing, *added)) or _is_replaced(missing, added):
        return False
    triples, other_triples = triples_of(one), triples_of(other)
    return len(triples & other_triples) >= MIN_JACCARD * len(triples | other_triples)


def _is_replaced(one: Counter[str], other: Counter[str]) -> bool:
    """Whether both sides still have words after leaving out stop words and pairing the forms of one word."""
    left = [word for word in one.elements() if word not in STOP_WORDS]
    right = [word for word in other.elements() if word not in STOP_WORDS]
    for word in list(left):
        if match := next((each for each in right if _are_forms(each, word)), None):
            left.remove(word)
            right.remove(match)
    return bool(left and right)


def _are_forms(one: str, other: str) -> bool:
    """Whether one word is the other with a short ending, or both begin with the same `FORM_CHARS` letters."""
    shorter, longer = sorted((one, other), key=len)
    has_ending = longer.startswith(shorter) and len(longer) - len(shorter) <= MAX_ENDING_CHARS < len(shorter)
    return has_ending or (len(shorter) >= FORM_CHARS and shorter[:FORM_CHARS] == longer[:FORM_CHARS])


class NearDuplicates:
    """An index of the paragraphs of one crawl."""

    def __init__(self) -> None:
        self._index: RMinHashLSH | None = None
        self._words: list[list[str]] = []
        self._page_paragraphs: list[tuple[list[str], RMinHash]] = []

    def has(self, paragraph: str) -> bool:
        """Whether an earlier page has a near-duplicate of `paragraph`; if not, `end_page` indexes it if long enough."""
        from rensa import RMinHash, RMinHashLSH  # an optional dependency

        words = words_of(paragraph)
        if len(words) < MIN_WORDS:
            return False
        minhash = RMinHash(NUM_PERM, 1)
        minhash.update(list(triples_of(words)))
        self._index = self._index or RMinHashLSH(MIN_JACCARD, NUM_PERM, NUM_BANDS)
        for number in self._index.query(minhash)[:MAX_CANDIDATES]:
            if is_near_duplicate(words, self._words[number]):
                return True
        self._page_paragraphs.append((words, minhash))
        return False

    def end_page(self) -> None:
        """Index the paragraphs since the last call. Paragraphs of the same page may be similar to each other."""
        for paragraph, minhash in self._page_paragraphs:
            if self._index and len(self._words) < MAX_PARAGRAPHS:
                self._index.insert(len(self._words), minhash)
                self._words.append(paragraph)
        self._page_paragraphs.clear()
