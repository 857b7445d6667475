"""The pages about drafts and copies have the figures of the results files."""

import re
from itertools import product
from pathlib import Path

import pytest
from answer_ahead_tables import measured_table, pages, targets_table
from page_tables import table, with_tables

RENEW = "run experiments/answer_ahead_tables.py"


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.parent.name)
def test_the_tables_of_a_page_are_those_of_the_results(page: Path) -> None:
    text = page.read_text()
    assert with_tables(text, pages()[page]) == text, RENEW


def test_figures_of_the_study_s_conclusions_stand_above_them() -> None:
    (study,) = (page for page in pages() if page.parent.name == "studies")
    above, conclusions = study.read_text().replace(" %", "%").split("## What this says")
    figures = set(re.findall(r"\d[\d.]*(?:x|%)|\d+\.\d+", conclusions))
    assert len(figures) > 10
    known = set(re.findall(r"\d[\d.]*(?:x|%)|\d+\.\d+", above))
    assert figures - known == set(), "these figures are of another run"


def test_a_table_is_written_behind_its_comment_and_nothing_else_changes() -> None:
    page = "before\n\n<!-- table: a -->\n\n| old |\n| --- |\n\nbetween\n\n<!-- table: b -->\n\nbehind\n"
    text = with_tables(page, {"a": table(["new"], [["1"]])})
    assert text == page.replace("| old |\n| --- |", "| new |\n| --- |\n| 1 |")
    assert with_tables(text, {"b": table(["c"], [])}) == text.replace("b -->", "b -->\n\n| c |\n| --- |")
    with pytest.raises(ValueError, match="0 comments with the name 'c'"):
        with_tables(page, {"c": ""})


def test_a_target_is_met_or_missed() -> None:
    names = product(("first", "last"), ("sync", "off", "ahead"), ("p50", "p95", "p99"))
    row = {"_".join(name): 6.0 for name in names}
    assert "| 3x sooner | 1.00x | **no** |" in targets_table({"crawler 2 QPS, 200 tokens": row})
    met = {**row, "last_ahead_p50": 2.0, "first_ahead_p99": 6.1}
    assert "| 3x sooner | 3.00x | yes |" in targets_table({"crawler 2 QPS, 200 tokens": met})
    assert targets_table({"crawler 2 QPS, 200 tokens": met}).count("| none | 0 of 6 | yes |") == 2
    later = {**met, "first_ahead_p99": 6.2}
    assert targets_table({"crawler 2 QPS, 200 tokens": later}).count("| none | 1 of 6 | **no** |") == 2


def test_times_later_than_the_target_allows_are_bold() -> None:
    names = product(("first", "last"), (50, 95), ("without", "ahead"))
    row = {f"{token}_s_p{percent}_{way}": 1.0 for token, percent, way in names}
    row |= {"bound_s": 0.0, "num_complete": 1, "num_equal": 2, "num_pairs": 2}
    assert "**" not in measured_table({"load": {**row, "first_s_p50_ahead": 1.019}})
    assert "1.000, 1.021 **+2.1%**" in measured_table({"load": {**row, "first_s_p50_ahead": 1.021}})
