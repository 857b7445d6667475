"""Questions, passages and answers to teach the demo's model with, made from any folder of documentation.

Most passages are single sentences, as `HybridSource(sentences=...)` gives them, others whole. A sentence becomes a
question by one of a few rules of English, or by leaving a part of it out; the answer is that sentence, with the number
of its passage in brackets. The other passages share rare words with the question, as those do that a search finds, and
several questions are asked over the same ones: what differs is the sentence that answers. A question is used if it
shares more rare words with its sentence than with any other. Plain questions, which people wrote about sentences, are
used as they are.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from teaching_questions import is_unclear, make_question

from streamrag.core import Chunk
from streamrag.core.text import relevant_terms, terms
from streamrag.sources.documents.file_worker import file_worker
from streamrag.sources.documents.reader import UnreadableError
from streamrag.sources.index.document_passages import find_documents, read_document
from streamrag.sources.index.keywords import new_stem
from streamrag.sources.search.sentences import split_sentences

NO_ANSWER = "The documents do not say."
NO_ANSWER_SHARE = 0.02
ITEM_SHARE = 0.6
"""Of sentences that say what something is, which become an item of a list: `- Term: what it is.`"""

FIRST_SHARE = 0.5
"""Of examples whose right passage stands first, as a search that ranks has it; in the others it is anywhere."""

NUM_PASSAGES, NUM_WHOLE = (2, 3, 3, 3, 3, 4), (2, 3, 3, 4)
WHOLE_SHARE = 0.6
"""Of pages whose passages are whole."""

PLAIN_SHARE = 0.6
"""Of examples about a sentence that has a plain question."""

NUM_LOOKED_THROUGH = 40
"""Passages that those beside the right one are found in: of its page, and as many of others."""

PASSAGE_WORDS = (60, 100, 140)
MIN_WORDS, MAX_WORDS = 3, 45
"""Of a sentence, and of one that is an answer."""
NUM_TRIES = 6
MAX_FILE_BYTES = 400_000

DEFINED = re.compile(
    r"^(?:An? |The )?(?P<term>[^,;:()]{3,32}?) (?:is|are|means) (?P<what>(?:an?|the|used|what|any|all) .+)$"
)


@dataclass(frozen=True)
class Example:
    """One question over some passages, and what is to be answered."""

    question: str
    chunks: tuple[Chunk, ...]
    answer: str


@dataclass(frozen=True)
class Page:
    """A document's passages, of which at least one has a sentence that a question can be made of."""

    passages: tuple[Chunk, ...]
    is_whole: bool
    """Whether passages have several sentences."""


def read_pages(folder: Path, rng: random.Random, num_pages: int) -> Iterator[Page]:
    """Pages of `folder`, at most so many, in random order.

    Text files are left out: they are what pages were made of.
    """
    paths, _ = find_documents(folder, max_file_bytes=MAX_FILE_BYTES, leave_out=folder / "-")
    paths = [path for path in paths if path.suffix != ".txt"]
    rng.shuffle(paths)
    with file_worker() as read:
        for path in paths[:num_pages]:
            try:
                document = read_document(path, folder, rng.choice(PASSAGE_WORDS), read)
            except UnreadableError:
                continue
            texts = [with_items(text, rng) for text in document.passages]
            if not (is_whole := rng.random() < WHOLE_SHARE):
                found = (sentence for text in texts for sentence in split_sentences(text))
                texts = [*dict.fromkeys(sentence for sentence in found if len(sentence.split()) >= MIN_WORDS)]
            chunks = (Chunk(text, document.uri, document.title, number) for number, text in enumerate(texts))
            page = Page(tuple(chunks), is_whole)
            if any(usable_sentences(chunk.text) for chunk in page.passages):
                yield page


def usable_sentences(text: str) -> list[str]:
    """Those that can be an answer."""
    return [
        sentence
        for sentence in split_sentences(text)
        if sentence.endswith(".")
        and 4 <= len(sentence.split()) <= MAX_WORDS
        and sum(c.isalnum() or c == " " for c in sentence) > 0.85 * len(sentence)
    ]


def with_items(text: str, rng: random.Random) -> str:
    """The passage, with some of the sentences that say what something is as items of a list."""
    for sentence in usable_sentences(text):
        found = DEFINED.match(sentence)
        if found and len(found["term"].split()) <= 4 and not is_unclear(sentence) and rng.random() < ITEM_SHARE:
            term = found["term"][0].upper() + found["term"][1:] if rng.random() < 0.7 else found["term"]
            text = text.replace(sentence, f"\n\n- {term}: {found['what']}\n\n", 1)
    return re.sub(r"\s*\n\n\s*(?:- )*(?=- )|\s*\n\n\s*", "\n\n", text).strip()


_stem = new_stem()


@cache
def stems(text: str) -> frozenset[str]:
    return frozenset(terms(text, _stem))


def nearest(question: str, passages: Sequence[Chunk], num: int) -> list[Chunk]:
    """Those that share most words with the question; rare words count more."""
    asked = relevant_terms(question, _stem)
    found = [stems(chunk.text).intersection(asked) for chunk in passages]
    num_with = Counter(term for each in found for term in each)
    scores = [sum(math.log(1 + len(passages) / num_with[term]) for term in each) for each in found]
    best = sorted(range(len(passages)), key=lambda n: -scores[n])
    return [passages[n] for n in best[:num]]


def is_asked(question: str, sentence: str, others: Sequence[str]) -> bool:
    """Whether the question shares more with this sentence than with any of the others; rare words count more."""
    asked = frozenset(relevant_terms(question, _stem))
    found = [stems(each).intersection(asked) for each in (sentence, *others)]
    num_with = Counter(term for each in found for term in each)
    first, *rest = (sum(1 / num_with[term] for term in each) for each in found)
    return first > max(rest, default=0)


def choose_passage(pages: Sequence[Page], plain: Mapping[str, str], rng: random.Random) -> tuple[Page, Chunk]:
    """Return a page and one of its passages; of those with a plain question, in `PLAIN_SHARE` of all cases."""
    if rng.random() < PLAIN_SHARE and (found := passages_with(tuple(pages), frozenset(plain))):
        return rng.choice(found)
    page = rng.choice(pages)
    return page, rng.choice(page.passages)


@cache
def passages_with(pages: tuple[Page, ...], sentences: frozenset[str]) -> list[tuple[Page, Chunk]]:
    """Return the passages that have one of these sentences, each with its page."""
    return [(page, chunk) for page in pages for chunk in page.passages if sentences & {*usable_sentences(chunk.text)}]


def make_examples(
    pages: Sequence[Page], rng: random.Random, max_questions: int, plain: Mapping[str, str] | None = None
) -> list[Example]:
    """Return up to `max_questions` about the same passages, most of them about one; a few have no answer there.

    plain: questions by the sentences that answer them.
    """
    plain = plain or {}
    while True:
        page, right = choose_passage(pages, plain, rng)
        usable = usable_sentences(right.text)
        if not usable:
            continue
        rng.shuffle(usable)
        usable.sort(key=lambda sentence: sentence not in plain)
        question = plain.get(usable[0]) or make_question(usable[0], rng)
        chunks, beyond = put_others_beside(right, page, pages, question, rng)
        place = chunks.index(right)
        targets = [(place, s) for s in usable][: max(2, max_questions * 2 // 3)]
        rest = [(n, s) for n, c in enumerate(chunks) if n != place for s in usable_sentences(c.text)]
        targets += rng.sample(rest, min(len(rest), max_questions - len(targets)))
        every = [s for chunk in chunks for s in (*split_sentences(chunk.text), chunk.title)]
        examples = []
        for number, sentence in targets:
            if every.count(sentence) > 1:
                continue
            competing = [s for s in every if s != sentence]
            tried = (make_question(sentence, rng) for _ in range(NUM_TRIES))
            question = plain.get(sentence) or next((q for q in tried if is_asked(q, sentence, competing)), "")
            if question:
                examples.append(Example(question, chunks, f"{sentence[:-1]} [{number + 1}]."))
        unknown = [s for chunk in beyond for s in usable_sentences(chunk.text) if s not in every]
        if examples and unknown and rng.random() < NO_ANSWER_SHARE * max_questions:
            examples.append(Example(make_question(rng.choice(unknown), rng), chunks, NO_ANSWER))
        if examples:
            return examples


def put_others_beside(
    right: Chunk, page: Page, pages: Sequence[Page], question: str, rng: random.Random
) -> tuple[tuple[Chunk, ...], list[Chunk]]:
    """Return the passages of a context in their order, and some that are near to the question and not in it."""
    alike = [other for other in pages if other.is_whole == page.is_whole]
    num_passages = NUM_WHOLE if page.is_whole else NUM_PASSAGES
    beside = dict.fromkeys(rng.sample(page.passages, min(NUM_LOOKED_THROUGH, len(page.passages))))
    beside |= {rng.choice(rng.choice(alike).passages): None for _ in range(NUM_LOOKED_THROUGH)}
    known = {*usable_sentences(right.text)}
    wrong = [c for c in beside if c != right and known.isdisjoint(split_sentences(c.text))]
    near = nearest(question, wrong, 2 * max(num_passages))
    others = near[: rng.choice(num_passages) - 1]
    place = 0 if rng.random() < FIRST_SHARE else rng.randrange(len(others) + 1)
    return (*others[:place], right, *others[place:]), near[len(others) :]
