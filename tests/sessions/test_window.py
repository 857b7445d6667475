"""What a window holds."""

import pytest

from streamrag import Chunk, PromptTemplate
from streamrag.sessions.prompts import SessionPrompts
from streamrag.sessions.window import Numbered, Window, WindowChunk
from streamrag.testing import ScriptedBackend

PIECES = [WindowChunk(number, (number,) * (1 + number * 7 % 23)) for number in range(1, 60)]


@pytest.mark.parametrize("batch", [2, 7, 59])
def test_a_window_does_not_depend_on_how_many_pieces_come_at_once(batch: int) -> None:
    one, other = Window(50, 0.4), Window(50, 0.4)
    has_slid = [one.add([piece]) for piece in PIECES]
    slides = [other.add(PIECES[i : i + batch]) for i in range(0, len(PIECES), batch)]
    assert any(has_slid)
    assert slides == [any(has_slid[i : i + batch]) for i in range(0, len(PIECES), batch)]
    assert (one.token_ids, one.oldest, one.num_slid) == (other.token_ids, other.oldest, other.num_slid)


@pytest.mark.parametrize("start", range(1, 60, 4))
def test_a_window_can_be_rebuilt_from_the_pieces_that_it_holds(start: int) -> None:
    """As a session does that is resumed from its log."""
    before, after = Window(50, 0.4), Window(50, 0.4)
    before.add(PIECES[:start])
    after.add(piece for piece in PIECES[:start] if piece.number >= (before.oldest or 0))
    assert after.token_ids == before.token_ids
    before.add(PIECES[start:])
    after.add(PIECES[start:])
    assert after.token_ids == before.token_ids


@pytest.mark.parametrize(
    ("passage", "end"), [("{text}\n", "\n"), ("[{number}] {text}}}\n\n", "}\n\n"), ("{text}", ""), ("{text} {uri}", "")]
)
def test_a_piece_that_is_cut_keeps_what_each_ends_with(passage: str, end: str) -> None:
    model = ScriptedBackend(answer="x").model
    prompts = SessionPrompts(model, PromptTemplate(passage=passage))
    window = Window(40, 0.5, prompts.passage_end)
    window.add(prompts.pieces([Numbered(1, Chunk("x" * 100, "feed"))]))
    text = model.tokenizer.decode(window.token_ids)
    assert len(text) == 20
    assert text.endswith("x" + end)


def test_an_end_that_is_longer_than_what_is_kept_goes_too() -> None:
    window = Window(2, 0.5, end=(9, 9, 9))
    window.add([WindowChunk(1, (1, 2, 3))])
    assert window.token_ids == (1,)
