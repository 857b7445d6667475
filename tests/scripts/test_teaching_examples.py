"""What the demo's model is taught with; `scripts/teach_demo_model.py` needs torch, and this does not."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest

pytest.importorskip("snowballstemmer")

from teaching_examples import (
    NO_ANSWER,
    NUM_PASSAGES,
    Page,
    is_asked,
    make_examples,
    nearest,
    read_pages,
    usable_sentences,
    with_items,
)
from teaching_questions import by_rule

from streamrag.core import Chunk

PAGE = """# Queues

A queue has at most 200 places for callers. It is short.

- Warming: asking for one token that nobody reads.
- Refusal: the answer to callers when all of the places are taken.

## Closing a queue

If a queue is closed early, its callers get a QueueClosedError at once. A queue that is empty closes by itself.

## Paper

Paper is made of wood, of rags, or of whatever else has fibres that can be pressed into a thin and even sheet.
"""


@pytest.fixture
def pages(tmp_path: Path) -> Sequence[Page]:
    (tmp_path / "queues.md").write_text(PAGE)
    return [*read_pages(tmp_path, random.Random(0), 5)]


def test_an_answer_is_a_sentence_of_the_passage_that_it_cites(pages: Sequence[Page]) -> None:
    seen = set()
    for seed in range(200):
        examples = make_examples(pages, random.Random(seed), 6)
        assert 0 < len(examples) <= 7
        assert len({example.chunks for example in examples}) == 1, "they share their passages"
        for example in examples:
            assert len({*example.chunks}) == len(example.chunks) <= max(NUM_PASSAGES)
            if example.answer != NO_ANSWER:
                sentence, _, number = example.answer.removesuffix("].").rpartition(" [")
                assert sentence in example.chunks[int(number) - 1].text
                assert sum(sentence in chunk.text for chunk in example.chunks) == 1
                seen.add(sentence)
    assert "Warming: asking for one token that nobody reads" in seen, "an item of a list"


def test_a_plain_question_is_asked_as_it_was_written(pages: Sequence[Page]) -> None:
    sentence, question = "A queue that is empty closes by itself.", "Do I have to tidy up?"
    plain = {sentence: question}
    examples = [each for seed in range(50) for each in make_examples(pages, random.Random(seed), 4, plain)]
    answers = {example.answer.rpartition(" [")[0] for example in examples if example.question == question}
    assert answers == {sentence.removesuffix(".")}
    assert len({example.question for example in examples}) > 1, "other sentences are asked about by rule"


def test_a_question_is_asked_only_where_it_shares_most_with_its_own_sentence() -> None:
    sentence, others = "A queue has at most 200 places.", ["A queue that is empty closes by itself."]
    assert is_asked("How many places has a queue?", sentence, others)
    assert not is_asked("What about a queue?", sentence, others)
    assert not is_asked("What closes an empty queue?", sentence, others)


def test_a_definition_becomes_an_item_of_a_list() -> None:
    text = "A stream waits. An idle stream is a stream that waits for its next chunk. It keeps its memory."
    texts = {with_items(text, random.Random(seed)) for seed in range(20)}
    item = "A stream waits.\n\n- Idle stream: a stream that waits for its next chunk.\n\nIt keeps its memory."
    assert {text, item} <= texts
    assert "Idle stream: a stream that waits for its next chunk." in usable_sentences(item)


def test_sentences_may_begin_with_a_name_as_code_has_them() -> None:
    text = "Addresses. Only http and https are fetched. allow_private=True lifts this for tests. And more"
    assert usable_sentences(text) == ["Only http and https are fetched.", "allow_private=True lifts this for tests."]


@pytest.mark.parametrize(
    ("sentence", "questions"),
    [
        ("Warming: asking for one token that nobody reads.", {"What is Warming?", "What does Warming mean?"}),
        ("A queue has at most 200 places for callers.", {"How many places has a queue?"}),
        ("If a queue is closed, an error is raised at once.", {"What is raised if a queue is closed?"}),
        ("QueueError is raised when the queue is full.", {"Which error is raised if the queue is full?"}),
    ],
)
def test_questions_of_a_sentence(sentence: str, questions: set[str]) -> None:
    assert usable_sentences(f"- {sentence}") == [sentence]
    assert questions <= {by_rule(sentence, random.Random(seed)) for seed in range(100)}


def test_the_passages_nearest_to_a_question_share_its_rare_words() -> None:
    passages = [Chunk(text, "a", "A", n) for n, text in enumerate(("the queue", "the queue closing", "some paper"))]
    assert [chunk.passage for chunk in nearest("When is the queue closed?", passages, 2)] == [1, 0]
