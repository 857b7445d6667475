"""Questions, passages and answers to teach the demo's model with, made from any folder of documentation.

A sentence of a passage becomes a question by one of a few rules of English, or by leaving a part of it out; the answer
is that sentence, with the number of its passage in brackets. The other passages of an example share rare words with the
question, as those do that a search finds.
"""

import math
import random
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from streamrag.core import Chunk
from streamrag.sources.passages import UnusableDocumentError, find_documents, read_document, split_document
from streamrag.sources.relevance import relevant_terms, terms
from streamrag.sources.search.keywords import new_stem

NO_ANSWER = "The documents do not say."
NO_ANSWER_SHARE = 0.02
GAP_SHARE = 0.35
"""Of questions that leave a part of the sentence out, also where a rule fits."""

FIRST_SHARE = 0.5
"""Of examples whose right passage stands first, as a search that ranks has it; in the others it is anywhere."""

NUM_LOOKED_THROUGH = 40
"""Passages that those beside the right one are found in: of its page, and as many of others."""

MAX_FILE_BYTES = 400_000

SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z])")
UNCLEAR = {
    *("this", "it", "these", "they", "that", "those", "such", "he", "she", "we", "note", "also", "however", "see"),
    *("changed", "new", "deprecated", "its", "their", "here", "there", "thus", "therefore", "then", "but", "and"),
    *("otherwise", "both", "another", "one", "some", "example", "for", "in", "as", "by", "prev", "next", "other"),
}
"""A sentence that begins with one of these says little by itself."""

NO_SUBJECT = {
    *("If", "When", "To", "Use", "While", "Since", "After", "Before", "Unless", "Name"),
    *("Return", "Sets", "Returns", "You", "I"),
}
"""What a subject does not begin with."""

BE = "is|are|was|were"
MODAL = "must|should|can|may|cannot|will|might"
VERB = (
    "returns|raises|uses|contains|allows|provides|supports|takes|creates|defines|accepts|specifies|controls|"
    "determines|represents|holds|stores|sends|reads|writes|causes|requires|performs|gives|makes|adds|removes|"
    "opens|closes|starts|stops|checks|describes|indicates|converts|computes|produces|keeps|lets|runs|waits|"
    "shows|prevents|ignores|matches|calls|sets|gets|prints|loads|includes|handles|executes|replaces|expects|"
    "generates|implements|lists|records"
)
SUBJECT = r"(?P<subject>[A-Z][^,;:()]{2,45}?)"

Rule = tuple[re.Pattern[str], tuple[str, ...]]
RULES: tuple[Rule, ...] = tuple(
    (re.compile(pattern), questions)
    for pattern, questions in (
        (
            r"^(?:If|When) (?P<condition>[^,]{8,90}), .*\b(?P<done>raised|returned|ignored|reported|used|set)\b.*\.$",
            ("What is {done} if {condition}?", "What is {done} when {condition}?", "What happens when {condition}?"),
        ),
        (
            r"^.*\b(?P<error>[A-Z]\w+(?:Error|Exception|Warning))\b.* (?:if|when) (?P<condition>[^,;]{8,90})\.$",
            ("What is raised when {condition}?", "Which error is raised if {condition}?", "When is {error} raised?"),
        ),
        (
            rf"^{SUBJECT} (?P<verb>{VERB}) .*\b\d[\d,.]* (?P<unit>[a-z]+s)\b.*\.$",
            ("How many {unit} does {subject} {base}?", "How much does {subject} {base}?"),
        ),
        (
            rf"^{SUBJECT} (?:has|have|takes|is|are) .*\b\d[\d,.]* (?P<unit>[a-z]+s)\b.*\.$",
            ("How many {unit} has {subject}?", "How many {unit} may {subject} have?", "How large may {subject} be?"),
        ),
        (
            r"^(?P<term>[A-Z][^,;:.()]{1,30}): (?P<what>.+)\.$",
            ("What is {term}?", "What does {term} mean?", "What is a {term}?", "What does {term} stand for?"),
        ),
        (
            r"^If (?P<condition>[^,]{8,90}), (?P<result>.+)\.$",
            ("What happens if {condition}?", "What if {condition}?", "What happens when {condition}?"),
        ),
        (
            r"^When (?P<condition>[^,]{8,90}), (?P<result>.+)\.$",
            ("What happens when {condition}?", "What is done when {condition}?"),
        ),
        (
            r"^(?:In order to|To) (?P<aim>[^,]{6,80}), (?P<result>.+)\.$",
            ("How do I {aim}?", "How can one {aim}?", "What should I do to {aim}?", "How to {aim}?"),
        ),
        (
            r"^Use (?P<means>[^,;]{3,60}?) (?:to|for) (?P<aim>[^,;]{6,80})\.$",
            ("How do I {aim}?", "What is {means} for?", "What do I need to {aim}?"),
        ),
        (
            rf"^{SUBJECT} (?P<be>{BE}) (?P<done>\w+ed) (?P<link>if|when|unless|until|after|before) (?P<why>.+)\.$",
            ("When {be} {subject} {done}?", "What happens {link} {why}?", "Why {be} {subject} {done}?"),
        ),
        (
            rf"^{SUBJECT} (?P<be>{BE}) (?P<what>.+?),? because (?P<why>.+)\.$",
            ("Why {be} {subject} {what}?", "What is the reason that {subject} {be} {what}?"),
        ),
        (
            rf"^{SUBJECT} (?P<modal>{MODAL}) (?P<what>[^,;]+)\.$",
            ("What {modal} {subject} do?", "{modal} {subject} {what}?"),
        ),
        (
            rf"^{SUBJECT} (?P<verb>{VERB}) (?P<what>[^,;]+)[,;.].*$",
            (
                "What does {subject} {base}?",
                "What {verb} {what}?",
                "What does {subject} do?",
                "Which one {verb} {what}?",
                "How does {subject} {base} {what}?",
            ),
        ),
        (
            rf"^{SUBJECT} (?P<be>{BE}) (?P<done>\w+ed) (?P<link>by|in|as|from|with|to|for) (?P<what>.+)\.$",
            ("How {be} {subject} {done}?", "What {be} {subject} {done} {link}?", "What {be} {done} {link} {what}?"),
        ),
        (
            rf"^{SUBJECT} (?P<be>{BE}) (?P<what>.+)\.$",
            ("What {be} {subject}?", "What does {subject} mean?", "What {be} {what}?", "{be} {subject} {what}?"),
        ),
        (
            rf"^{SUBJECT} (?:has|have) (?P<what>.+)\.$",
            ("What does {subject} have?", "What belongs to {subject}?", "Which has {what}?"),
        ),
    )
)
SYNONYMS = {
    "returned": "given back",
    "raised": "thrown",
    "function": "call",
    "method": "function",
    "default": "usual value",
    "specified": "given",
    "value": "setting",
    "create": "make",
    "remove": "delete",
    "object": "thing",
    "use": "need",
    "contains": "holds",
    "allows": "permits",
    "argument": "parameter",
    "file": "document",
    "error": "failure",
    "started": "begun",
    "wait": "pause",
    "stop": "end",
    "closed": "shut",
    "obtain": "get",
    "determine": "find out",
}


@dataclass(frozen=True)
class Example:
    """One question over some passages, and what is to be answered."""

    question: str
    chunks: tuple[Chunk, ...]
    answer: str


@dataclass(frozen=True)
class Page:
    """A document's passages, and its sentences that a question can be made of: number of the passage, sentence."""

    passages: tuple[Chunk, ...]
    sentences: tuple[tuple[int, str], ...]


def read_pages(folder: Path, passage_words: Sequence[int], rng: random.Random, num_pages: int) -> Iterator[Page]:
    """Pages of `folder`, at most so many, in random order; passages of each have one of these lengths."""
    paths, _ = find_documents(folder, max_file_bytes=MAX_FILE_BYTES, leave_out=folder / "-")
    rng.shuffle(paths)
    for path in paths[:num_pages]:
        try:
            document = read_document(path, folder)
        except UnusableDocumentError:
            continue
        passages = tuple(
            Chunk(text, document.uri, document.title, number)
            for number, text in enumerate(split_document(document, rng.choice(passage_words)))
        )
        sentences = tuple((n, s) for n, chunk in enumerate(passages) for s in usable_sentences(chunk.text))
        if sentences:
            yield Page(passages, sentences)


def usable_sentences(text: str) -> Iterator[str]:
    """Sentences that say something by themselves."""
    for line in text.split("\n"):
        for sentence in SENTENCE_END.split(line.strip().removeprefix("- ")):
            words = sentence.split()
            is_whole = sentence.endswith(".") and sentence[:1].isupper() and 5 <= len(words) <= 34
            if (
                is_whole
                and words[0].lower() not in UNCLEAR
                and sum(c.isalpha() or c == " " for c in sentence) > 0.85 * len(sentence)
            ):
                yield sentence


def make_question(sentence: str, rng: random.Random) -> str:
    """A question that `sentence` answers."""
    question = None if rng.random() < GAP_SHARE else by_rule(sentence, rng)
    return question or with_gap(sentence, rng)


def with_gap(sentence: str, rng: random.Random) -> str:
    """What is left of the sentence without some words that follow one another, behind a word that asks."""
    words = sentence[:-1].split()
    num_left = rng.randrange(3, min(11, len(words)))
    at = rng.randrange(len(words) - num_left + 1)
    left = words[at : at + num_left]
    if at == 0:
        left[0] = lowered(left[0])
    asks = rng.choice(("What", "Which", "How", "When", "Where", "Why", "What about", "How much", "What is"))
    return varied(f"{asks} {' '.join(left).strip(',;:( ')}?", rng)


def by_rule(sentence: str, rng: random.Random) -> str | None:
    """The question of the first rule that fits."""
    for pattern, questions in RULES:
        found = pattern.match(sentence)
        if found is None or ("subject" in found.groupdict() and sentence.split()[0] in NO_SUBJECT):
            continue
        parts = found.groupdict()
        if "subject" in parts:
            parts["subject"] = lowered(parts["subject"])
        if "verb" in parts:
            parts["base"] = base_form(parts["verb"])
        question = rng.choice(questions).format(**parts)
        if len(question.split()) > 22:
            return None
        question = question[0].upper() + question[1:]
        return varied(question, rng)
    return None


def lowered(subject: str) -> str:
    """As it stands within a sentence."""
    first = subject.split()[0]
    is_name = any(c.isupper() or c in "._()" for c in first[1:])
    return subject if is_name else subject[0].lower() + subject[1:]


def base_form(verb: str) -> str:
    """`returns` as `return`."""
    return verb[:-2] if verb.endswith(("sses", "ches", "shes")) else verb[:-1]


def varied(question: str, rng: random.Random) -> str:
    """With some words replaced or left out, as a person who has not read the sentence would ask."""
    words = question.rstrip("?").split()
    words = [SYNONYMS.get(word, word) if rng.random() < 0.5 else word for word in words]
    if len(words) > 8 and rng.random() < 0.4:
        del words[rng.randrange(4, len(words))]
    if len(words) > 12 and rng.random() < 0.4:
        words = words[: rng.randrange(8, len(words))]
    return " ".join(words) + "?"


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


def make_example(pages: Sequence[Page], rng: random.Random, max_passages: int) -> Example:
    """A question over 1 to `max_passages` passages, of which one has the answer, or sometimes none."""
    while True:
        page = rng.choice(pages)
        number, sentence = rng.choice(page.sentences)
        question = make_question(sentence, rng)
        right = page.passages[number]
        beside = dict.fromkeys(rng.sample(page.passages, min(NUM_LOOKED_THROUGH, len(page.passages))))
        beside |= {rng.choice(rng.choice(pages).passages): None for _ in range(NUM_LOOKED_THROUGH)}
        wrong = [chunk for chunk in beside if sentence not in chunk.text and len(chunk.text) > 80]
        others = nearest(question, wrong, rng.randrange(max_passages))
        if others and rng.random() < NO_ANSWER_SHARE:
            return Example(question, tuple(others), NO_ANSWER)
        place = 0 if rng.random() < FIRST_SHARE else rng.randrange(len(others) + 1)
        return Example(question, (*others[:place], right, *others[place:]), f"{sentence[:-1]} [{place + 1}].")
