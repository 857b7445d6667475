import time
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrag.core import Append, Chunk, Skipped, SourceEvent, Update
from streamrag.errors import SourceError
from streamrag.sources.search.refinement import Failures
from streamrag.sources.search.sentences import MAX_SENTENCES, BestSentences, split_sentences

DOGS = Chunk("Dogs bark. They eat meat!\n- Cats: see there.", "dogs.txt", "Dogs", 3)
CATS = Chunk("Cats purr. Dogs bark.", "cats.txt", "Cats")


class Scorer:
    """Scores by length, and keeps what it was given."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.asked: list[list[str]] = []
        self.fails_at = fails_at

    async def __call__(self, texts: list[str]) -> list[float]:
        self.asked.append(texts)
        if len(self.asked) - 1 == self.fails_at:
            raise SourceError("no scores today")
        return [float(len(text)) for text in texts]


def noted() -> Failures:
    return Failures(lambda: True)


async def played(*events: SourceEvent) -> AsyncGenerator[SourceEvent, None]:
    for event in events:
        yield event


async def narrowed(narrowing: BestSentences, failures: Failures, *events: SourceEvent) -> list[SourceEvent]:
    return [event async for event in narrowing.select_in_events(played(*events), failures)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two? Three! Four", ["One.", "Two?", "Three!", "Four"]),
        ("- Item: one.\n\n* Item: two", ["Item: one.", "Item: two"]),
        ("See e.g. this, i.e. that. num_workers=4 helps.", ["See e.g. this, i.e. that.", "num_workers=4 helps."]),
        ("Version 3.11 works. Élan too. Да. Нет.", ["Version 3.11 works.", "Élan too.", "Да.", "Нет."]),
        ("これは文です。次の文。", ["これは文です。", "次の文。"]),
        (" \n\n", []),
        ("- ", ["-"]),
        ("a - b * c", ["a - b * c"]),
    ],
)
def test_a_text_has_sentences_items_and_lines(text: str, expected: list[str]) -> None:
    assert split_sentences(text) == expected


@given(st.text(st.sampled_from("aB .!?\n-*。=("), max_size=200))
def test_splitting_into_sentences_loses_only_space_and_signs_of_items(text: str) -> None:
    def letters(text: str) -> str:
        return "".join(c for c in text if c not in " \n-*")

    assert letters("".join(split_sentences(text))) == letters(text)


@pytest.mark.parametrize(
    "text", ["a. " * 300_000, "A. " * 300_000, "-" * 900_000, " " * 900_000, "。" * 900_000, "." + " " * 900_000 + "b"]
)
def test_a_hostile_text_takes_time_in_proportion_and_gives_few_sentences(text: str) -> None:
    began_s = time.process_time()
    assert len(split_sentences(text)) <= MAX_SENTENCES
    assert time.process_time() - began_s < 10


async def test_the_best_sentences_of_all_passages_come_best_first_with_their_places() -> None:
    scorer = Scorer()
    best = await BestSentences(3, scorer).select([DOGS, CATS])
    assert [chunk.text for chunk in best] == ["Cats: see there.", "They eat meat!", "Dogs bark."]
    assert [(chunk.uri, chunk.title, chunk.passage) for chunk in best[:2]] == [("dogs.txt", "Dogs", 3)] * 2
    assert scorer.asked == [
        ["Dogs bark.", "Dogs\nThey eat meat!", "Dogs\nCats: see there."],
        ["Cats purr.", "Cats\nDogs bark."],
    ]


async def test_passages_stay_whole_if_the_best_sentence_is_not_in_the_first() -> None:
    assert await BestSentences(1, Scorer()).select([CATS, DOGS]) == (CATS, DOGS)


async def test_a_passage_is_scored_once_and_what_did_not_change_is_not_sent_again() -> None:
    scorer, failures = Scorer(), noted()
    skipped = Skipped("a", "too large")
    sent = Update((DOGS,)), skipped, Update((CATS, DOGS)), Update((CATS,)), Append(CATS)
    events = await narrowed(BestSentences(1, scorer), failures, *sent)
    updates = [event for event in events if isinstance(event, Update)]
    assert [[chunk.text for chunk in update.chunks] for update in updates] == [
        ["Cats: see there."],
        [CATS.text, DOGS.text],
        ["Dogs bark."],
    ]
    assert events[1] == skipped
    assert len(scorer.asked) == 2
    assert not failures.missing


async def test_passages_are_given_whole_once_scoring_has_failed() -> None:
    failures = noted()
    narrowing = BestSentences(1, Scorer(fails_at=1))
    events = await narrowed(narrowing, failures, Update((DOGS,)), Update((CATS,)), Update((DOGS, CATS)))
    assert [event.chunks[0].text for event in events if isinstance(event, Update)] == [
        "Cats: see there.",
        CATS.text,
        DOGS.text,
    ]
    assert failures.missing == ["finding the best sentences failed"]


async def test_passages_without_words_stay_whole() -> None:
    scorer = Scorer()
    drawings = (Chunk(" ", "a"), Chunk("|<------- a drawing ------->|", "b"))
    assert await BestSentences(2, scorer).select(drawings) == drawings
    assert not scorer.asked
