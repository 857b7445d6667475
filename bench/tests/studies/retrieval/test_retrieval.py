from collections.abc import Iterator
from pathlib import Path

import pytest

from streamrag import Chunk
from studies.retrieval.run import CHOOSING, TESTING, Documentation, Found, Question, summary


@pytest.mark.parametrize("name", CHOOSING + TESTING)
def test_each_documentation_has_30_questions_about_its_pages(name: str) -> None:
    documentation = Documentation.read(name)
    assert len({question.text for question in documentation.questions}) == 30
    for question in documentation.questions:
        for page, *words in question.answers:
            assert page in documentation.pages, question
            assert words, question
            assert [word.lower() for word in words] == words, question


def test_a_question_is_answered_by_a_passage_of_the_page_with_all_words() -> None:
    question = Question("Which?", (("a/page", "first", "second word"), ("other", "third")))

    def found(*chunks: Chunk) -> Iterator[Found]:
        yield Found(question, chunks, 0.1)

    for chunks, num_answered in (
        ((Chunk("The first, and the `Second` word", "a/page.html"),), 1),
        ((Chunk("first", "a/page.html"), Chunk("second word", "a/page.html")), 0),
        ((Chunk("The first second word", "other.html"), Chunk("A third.", "other.html")), 1),
        ((Chunk("thirds", "other.html"),), 0),
    ):
        assert summary([*found(*chunks)])["num_answered"] == num_answered


def test_the_pages_of_a_package_are_copied_with_their_folders(tmp_path: Path) -> None:
    documentation = Documentation("name", "package", "usr/doc", ("a/page",), ())
    (tmp_path / "packages/usr/doc/a").mkdir(parents=True)
    (tmp_path / "packages/usr/doc/a/page.html").write_text("text")
    (tmp_path / "packages/usr/doc/other.html").write_text("text")
    documentation.copy_pages(tmp_path / "packages", tmp_path / "pages")
    assert [path.relative_to(tmp_path / "pages").as_posix() for path in (tmp_path / "pages").rglob("*.html")] == [
        "a/page.html"
    ]
