"""Where an answer cites its passages."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from streamrag import Chunk
from streamrag.serve.citation_marks import LONGEST_MARK, encode_annotation, file_name, find_marks

PASSAGES = [Chunk("", f"https://a.example/{number}", "") for number in range(3)]


@given(st.text(alphabet="[]123, x\n", max_size=60), st.data())
def test_marks_are_the_same_when_the_text_comes_in_pieces(text: str, data: st.DataObject) -> None:
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text))))})
    found = []
    for start, end in pairwise(cuts):
        window = max(0, start - LONGEST_MARK)
        found += [mark for mark in find_marks(text[:end], len(PASSAGES), window) if mark.end > start]
    assert found == find_marks(text, len(PASSAGES))


def test_the_longest_mark_fits_into_the_window() -> None:
    text = "[" + " , ".join(["0001"] * 16) + "]"
    assert len(text) <= LONGEST_MARK
    assert len(find_marks(text, 1)) == 1


def test_names_of_files_are_for_people() -> None:
    assert file_name(Chunk("", "/notes/A%20plan.md", "Plan")) == "A plan.md"
    assert file_name(Chunk("", "/", "Plan")) == "Plan"
    assert file_name(Chunk("", "", "")) == "document"
    first, second = (
        encode_annotation(mark, [Chunk("", "a", ""), Chunk("", "b", "")]) for mark in find_marks("[1][2]", 2)
    )
    assert first["file_id"] != second["file_id"]
