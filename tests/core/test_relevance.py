"""What of a page, and which pages, matter to a question."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamrag import Append, Chunk, Pipeline, Update
from streamrag.core import relevance
from streamrag.core.relevance import Relevance
from streamrag.core.text import TextPassage, split_markdown
from streamrag.testing import ScriptedBackend, ScriptedSource

QUESTION = "How do I cancel a task group?"
ABOUT = "A group of tasks is cancelled by its cancel scope, and waits until all of its tasks have ended."
FILLER = "The weather was fine on that day, and nobody thought of anything else but of going out."
PAGE = f"# Weather\n\n{FILLER * 8}\n\n## Cancellation\n\n{ABOUT}\n\n## More weather\n\n{FILLER * 8}"


def test_a_page_is_shortened_to_what_the_question_is_about_under_its_heading() -> None:
    part, rest = Relevance(QUESTION).shorten(PAGE, 200)
    assert part == f"## Cancellation\n\n{ABOUT}"
    assert rest == PAGE.replace(f"{part}\n\n", "")


def test_without_any_word_of_the_question_the_beginning_is_kept() -> None:
    for question in ("Was?", "\N{GRINNING FACE}"):
        part, _ = Relevance(question).shorten(PAGE, 800)
        assert part.startswith("# Weather\n\nThe weather")


@given(st.text(max_size=400) | st.just("x" * 5000), st.integers(-5, 300))
def test_a_part_is_never_longer_than_is_allowed_and_no_word_is_lost(text: str, max_chars: int) -> None:
    part, rest = Relevance(QUESTION).shorten(text, max_chars)
    assert len(part) <= max(max_chars, 0)
    if max_chars <= 0:
        assert rest == text


def test_only_the_beginning_of_a_huge_text_is_compared_and_the_rest_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    num_split = 0

    def counting(text: str) -> list[TextPassage]:
        nonlocal num_split
        num_split += len(text)
        return split_markdown(text)

    monkeypatch.setattr(relevance, "split_markdown", counting)
    judge, text = Relevance(QUESTION), f"{PAGE}\n\n" * 4000
    for max_chars in (1000, 500, 200):
        part, rest = judge.shorten(text, max_chars)
        assert part.count(ABOUT) + rest.count(ABOUT) == 4000
    assert (part.count(ABOUT), num_split) == (1, pytest.approx(relevance.MIN_READ_CHARS, rel=0.01))
    assert judge.scores([Chunk(text, "a.md"), Chunk(PAGE, "b.md")])[0] > 0
    assert num_split < 2.1 * relevance.MIN_READ_CHARS
    judge.shorten(text, 1_000_000)
    assert num_split < 2.1 * relevance.MIN_READ_CHARS + 2_000_000


def test_pages_are_compared_by_their_best_part() -> None:
    pages = [Chunk(FILLER, "a.md"), Chunk(PAGE, "b.md"), Chunk("A task.", "c.md"), Chunk("", "d.md")]
    scores = Relevance(QUESTION).scores(pages)
    assert sorted(range(4), key=lambda i: -scores[i])[:2] == [1, 2]
    assert scores[0] == scores[3] == 0


@pytest.mark.parametrize(("second", "best"), [(2.0, 1), (None, 0)])
def test_the_retrievers_own_scores_count_if_all_have_one(second: float | None, best: int) -> None:
    scores = Relevance(QUESTION).scores([Chunk(ABOUT, "a.md", score=1.0), Chunk(FILLER, "b.md", score=second)])
    assert scores.index(max(scores)) == best


def test_a_question_of_many_words_is_compared_in_proportion_to_the_text() -> None:
    class Counting(str):
        num_hashed = 0

        def __hash__(self) -> int:
            Counting.num_hashed += 1
            return super().__hash__()

        def __eq__(self, other: object) -> bool:
            return str.__eq__(self, other)

    relevance = Relevance(" ".join(f"word{i}" for i in range(15_000)))
    relevance._wanted = [Counting(term) for term in relevance._wanted]
    text = "\n\n".join(f"## Part {i}\n\nHere is word{i} and no other." for i in range(3_000))
    kept, _ = relevance.shorten(text, 1_000)
    assert kept
    assert Counting.num_hashed <= 3 * len(relevance._wanted)


async def test_an_append_behind_an_update_invalidates_nothing() -> None:
    text = "\n\n".join(f"Part {i} has words of its own, and the question's." for i in range(60))
    chunks = [Chunk(text, f"{name}.md") for name in "abcd"]
    source = ScriptedSource([Update(tuple(chunks[:3])), Append(chunks[3]), Append(chunks[0])])
    async with Pipeline(source, ScriptedBackend()) as pipeline:
        async with pipeline.stream("What has the question?", max_context_tokens=7_500) as stream:
            _ = [chunk async for chunk in stream]
    assert stream.result.num_invalidated == 0
