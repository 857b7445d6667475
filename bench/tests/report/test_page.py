"""Reports: what is in them, and that they need nothing else."""

import base64
import math
import re
from dataclasses import replace
from html.parser import HTMLParser
from xml.etree import ElementTree

import pytest
from made import made_result, settings

from streamrag_bench.grid import Grid
from streamrag_bench.report.comparison import Figure
from streamrag_bench.report.html import cell, figure_text
from streamrag_bench.report.page import make_report
from streamrag_bench.summary import Digest, digest

VOID = {"meta", "img", "br"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps what matters."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.addresses: list[str] = []
        self.ids: list[str] = []
        self.text = ""
        self.feed(html)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]
        self.ids += [value or "" for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def pictures(self) -> list[str]:
        """The text of each picture."""
        start = "data:image/svg+xml;base64,"
        svgs = [base64.b64decode(a.removeprefix(start)) for a in self.addresses if a.startswith(start)]
        for svg in svgs:
            ElementTree.fromstring(svg)
        return [svg.decode() for svg in svgs]


def digests_of(grid: Grid) -> list[Digest]:
    return [digest(made_result(cell)) for cell in grid.cells()]


@pytest.fixture(scope="module")
def page() -> Page:
    arms = ("no-streaming", "stock-sessions", "streaming")
    grid = Grid("virtual", "anns", arms=arms, evictions=("cost",), qps=(1, 2), seeds=(1, 2), num_queries=40)
    return Page(make_report(digests_of(grid), slos={"ttft_s": 5.0}))


def test_a_report_fetches_nothing(page: Page) -> None:
    assert all(address.startswith(("data:", "#")) for address in page.addresses)
    assert {address for address in page.addresses if address.startswith("#")} <= {f"#{name}" for name in page.ids}
    for svg in page.pictures():
        assert not re.search(r'(?:href|src)="(?!#)', svg)


def test_a_report_of_two_rates_has_two_pictures(page: Page) -> None:
    assert len(page.pictures()) == 2


def test_speed_ups_are_those_of_the_requests() -> None:
    cells = digests_of(Grid("virtual", "crawler", qps=(2,), num_queries=1))
    before, after = (d.ttft_after_retrieval_s[0] for d in cells)
    assert f"{figure_text(before / after)}x" in Page(make_report(cells, slos={})).text


@pytest.mark.parametrize(
    "grid",
    [
        Grid("virtual", "crawler", arms=("no-streaming",), qps=(1,), num_queries=3),
        Grid("virtual", "crawler", arms=("streaming",), qps=(1, 2), num_queries=1),
        Grid("virtual", "anns", qps=(2,), delays=(1.0, 30.0), kv_tokens=(1000, 2000), num_queries=3),
    ],
)
def test_a_report_of_few_cells_has_a_picture_and_no_nan(grid: Grid) -> None:
    page = Page(make_report(digests_of(grid), slos={}))
    assert ("No verdict" in page.text) == (len(grid.arms) == 1)
    assert len(page.pictures()) >= 1
    assert not re.search(r"\bnan\b", page.text)


def test_engines_that_do_not_tell_and_unanswered_queries_are_named() -> None:
    results = [made_result(cell) for cell in Grid("virtual", "anns", qps=(2,), num_queries=5).cells()]
    silent = [
        digest(replace(r, num_unfinished=7, requests=tuple(replace(q, record=None) for q in r.requests)))
        for r in results
    ]
    page = Page(make_report(silent, slos={}))
    assert "unknown" in page.text
    assert "7 never answered" in page.text
    assert "Gaps are reported by streaming cells only" in page.text


def test_copied_blocks_are_reported_only_for_cells_that_copy() -> None:
    headings = ("blocks", "GB", "tax")
    recompute, cost = (
        Page(make_report(digests_of(Grid("virtual", "anns", evictions=(e,), qps=(2,), num_queries=40)), slos={})).text
        for e in ("recompute", "cost")
    )
    assert [heading in cost for heading in headings] == [True, True, True]
    assert [heading in recompute for heading in headings] == [False, False, True]


def test_a_cell_in_which_nothing_was_answered_does_not_spoil_the_others() -> None:
    results = [made_result(cell) for cell in Grid("virtual", "crawler", qps=(1, 2), num_queries=5).cells()]
    stuck = replace(results[1], requests=(), num_unfinished=5, completion_s=0.0, busy_s=0.0)
    page = Page(make_report(map(digest, [results[0], stuck, *results[2:]]), slos={"ttft_s": 1.0}))
    assert "5 never answered" in page.text


def test_strange_names_stay_text() -> None:
    odd = [digest(made_result(settings(policy="<script>alert(1)</script>", arm=arm))) for arm in ("streaming",)]
    page = Page(make_report(odd, slos={}, failed={"<b>cell</b>": "<i>error</i>"}))
    assert "<b>cell</b>: <i>error</i>" in page.text
    assert "streaming <script>alert(1)</script>/recompute" in page.text


def test_control_and_invisible_characters_are_not_in_a_report() -> None:
    hostile = "\x1b[2J\x9b\u202e\u200b$x$ $\\frac{$\ud800"
    made = made_result(settings(policy=hostile, workload=hostile))
    odd = digest(replace(made, provenance={hostile: {hostile: hostile}}))
    page = make_report([odd], slos={}, failed={hostile: hostile})
    assert not {*"\x1b\x9b\u202e\u200b\ud800"} & set(page)
    page.encode()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (float("nan"), "–"),
        (0, "0"),
        (0.0001, "1.0e-04"),
        (0.01234, "0.012"),
        (1.234, "1.23"),
        (9999, "9,999"),
    ],
)
def test_figures_have_three_digits(value: float | None, text: str) -> None:
    assert figure_text(value) == text


def test_a_spread_that_does_not_show_is_left_out() -> None:
    assert cell(Figure(1.0, 0.5, 2.0), "x").small == "(0.500–2.00)"
    assert cell(Figure(1.0, 1.0001, 1.0002)).small == ""
    assert cell(Figure(math.nan, math.nan, math.nan), "x") == cell(math.nan, "x") == cell(None, "x")
