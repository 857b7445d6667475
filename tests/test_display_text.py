import sys
import unicodedata
from pathlib import Path

import pytest

from streamrag.display_text import for_picture, one_line, sanitize
from streamrag.trace.picture import draw_trace
from streamrag.trace.statistics import describe
from streamrag.trace.values import Trace, TracedQuery


def test_every_character_that_is_obeyed_or_cannot_be_seen_is_known() -> None:
    """Those of the category "format" that have a shape of their own are shown."""
    signs = {*range(0x600, 0x606), 0x6DD, 0x70F, 0x890, 0x891, 0x8E2, 0x110BD, 0x110CD}
    dangerous = {
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) in ("Cc", "Cf", "Cs", "Zl", "Zp") and code not in signs
    } - {"\t", "\n"}
    assert [character for character in dangerous if character in sanitize(f"a{character}b")] == []
    harmless = "".join(
        chr(code)
        for code in range(sys.maxunicode + 1)
        if unicodedata.category(chr(code)) not in ("Cc", "Cf", "Cs", "Cn", "Zl", "Zp")
    )
    assert sanitize(harmless) == harmless


def test_control_characters_are_marked_and_invisible_ones_left_out() -> None:
    assert sanitize("a\x1b[2J\u202eb\u200bc\td\n") == "a\N{REPLACEMENT CHARACTER}[2J\N{REPLACEMENT CHARACTER}bc\td\n"
    assert one_line("a\nb\tc\r") == "a b c\N{REPLACEMENT CHARACTER}"
    assert for_picture("x" * 500) == "x" * 120 + "…"


@pytest.mark.parametrize("text", ["$x$", "$\\frac{$", "\\$5 and $6", "$", "\x1b[2J $\ud800$"])
def test_a_picture_takes_no_text_for_a_formula(text: str, tmp_path: Path) -> None:
    from matplotlib.text import Text

    drawn, is_formula = Text(0, 0, for_picture(text))._preprocess_math(for_picture(text))  # type: ignore[attr-defined]
    assert (drawn, is_formula) == (one_line(text), False)
    trace = Trace((TracedQuery("1", 0.0, text, (), 1.0),))
    draw_trace(tmp_path / "x.png", trace, describe(trace), title=text)
