"""The page about drafts has the figures of the results file."""

from itertools import product

import pytest

from studies.answer_ahead.tables import PAGE, measured_table, page_tables
from studies.markdown_tables import table, with_tables


def test_the_table_of_the_page_is_that_of_the_results() -> None:
    text = PAGE.read_text()
    assert with_tables(text, page_tables()) == text, "run bench/studies/answer_ahead/tables.py"


def test_a_table_is_written_behind_its_comment_and_nothing_else_changes() -> None:
    page = "before\n\n<!-- table: a -->\n\n| old |\n| --- |\n\nbetween\n\n<!-- table: b -->\n\nbehind\n"
    text = with_tables(page, {"a": table(["new"], [["1"]])})
    assert text == page.replace("| old |\n| --- |", "| new |\n| --- |\n| 1 |")
    assert with_tables(text, {"b": table(["c"], [])}) == text.replace("b -->", "b -->\n\n| c |\n| --- |")
    with pytest.raises(ValueError, match="0 comments with the name 'c'"):
        with_tables(page, {"c": ""})


def test_times_later_than_the_target_allows_are_bold() -> None:
    names = product(("first", "last"), (50, 95), ("without", "ahead"))
    row = {f"{token}_s_p{percent}_{way}": 1.0 for token, percent, way in names}
    row |= {"bound_s": 0.0, "num_complete": 1, "num_equal": 2, "num_pairs": 2}
    assert "**" not in measured_table({"load": {**row, "first_s_p50_ahead": 1.019}})
    assert "1.000, 1.021 **+2.1%**" in measured_table({"load": {**row, "first_s_p50_ahead": 1.021}})
