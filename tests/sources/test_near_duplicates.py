"""Which paragraphs are near-duplicates of an earlier page's, and which only look like them."""

import random

import pytest

from streamrag.core.text import TextPassage
from streamrag.sources.pages import near_duplicates
from streamrag.sources.pages.near_duplicates import NearDuplicates
from streamrag.sources.pages.relevant_passages import assemble

pytest.importorskip("rensa")

TEXT = (
    "Penguins swim with their wings, and steer with their feet, while the tail helps them to brake when they come near "
    "the ice. It takes a young bird some weeks to learn it."
)


def is_known(later: str, earlier: str = TEXT) -> bool:
    known = NearDuplicates()
    assert not known.has(earlier)
    known.end_page()
    return known.has(later)


@pytest.mark.parametrize(
    "later",
    [
        TEXT.upper(),
        TEXT.replace("It takes", "It usually takes"),
        TEXT.replace("wings", "wing"),
        "Note: " + TEXT,
        TEXT.replace(" to learn it", ""),
    ],
)
def test_the_same_in_nearly_the_same_words_is_known(later: str) -> None:
    assert is_known(later)


@pytest.mark.parametrize(
    "later",
    [
        TEXT.replace("some weeks", "3 weeks"),
        TEXT.replace("swim", "cannot swim"),
        TEXT.replace("helps them", "doesn't help them"),
        TEXT.replace("young", "old"),
        TEXT.replace("Penguins", "Seals"),
        TEXT.replace("to brake", "to brake, except in winter,"),
        TEXT + " They are taught by their parents, who go ahead and wait for them in the open water.",
        "Penguins swim.",
        "",
    ],
)
def test_a_paragraph_that_differs_in_a_word_that_counts_is_news(later: str) -> None:
    assert not is_known(later)


def test_numbers_that_changed_are_news() -> None:
    assert not is_known(TEXT.replace("some", "4"), TEXT.replace("some", "3"))


def test_paragraphs_of_one_page_may_be_alike() -> None:
    known = NearDuplicates()
    assert [known.has(text) for text in (TEXT, "Note: " + TEXT)] == [False, False]
    known.end_page()
    assert known.has("Hint: " + TEXT)


def test_a_chunk_lacks_what_an_earlier_page_said_nearly() -> None:
    known, seen = NearDuplicates(), set[bytes]()
    pages = [(TEXT,), ("Note: " + TEXT, "This is told by no other page of the whole site.")]
    texts = []
    for blocks in pages:
        texts.append(assemble([TextPassage((), blocks)], seen, known.has))
        known.end_page()
    assert texts == [TEXT, "This is told by no other page of the whole site."]


def test_the_number_of_remembered_paragraphs_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(near_duplicates, "MAX_PARAGRAPHS", 10)
    known = NearDuplicates()
    choose = random.Random(1)
    for _ in range(50):
        known.has(" ".join(choose.choice("abcdefgh") * 5 for _ in range(30)))
        known.end_page()
    assert len(known._words) == 10
    assert known._page_paragraphs == []


def test_paragraphs_that_differ_in_many_words_are_not_compared_word_by_word(monkeypatch: pytest.MonkeyPatch) -> None:
    num_compared = 0

    def are_forms(one: str, other: str) -> bool:
        nonlocal num_compared
        num_compared += 1
        return False

    monkeypatch.setattr(near_duplicates, "_are_forms", are_forms)
    common = "".join(map(chr, range(0x4E00, 0x4E00 + 1702)))
    words = [near_duplicates.words_of(common + chr(0x3041 + number) * 297) for number in range(2)]
    assert not near_duplicates.is_near_duplicate(*words)
    assert num_compared == 0
    few = [near_duplicates.words_of(common + chr(0x3041 + number) * 15) for number in range(2)]
    assert not near_duplicates.is_near_duplicate(*few)
    assert 0 < num_compared <= (near_duplicates.MAX_DIFFERENT_WORDS / 2) ** 2


@pytest.mark.timeout(60)
def test_a_paragraph_of_a_megabyte_takes_time_in_proportion() -> None:
    for text in ("penguin " * 130_000, " ".join(f"p{number}x" for number in range(130_000)), "a" * 1_000_000):
        known = NearDuplicates()
        known.has(text)
        known.end_page()
        known.has("note " + text)
