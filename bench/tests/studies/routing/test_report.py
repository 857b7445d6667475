import io
import json
from pathlib import Path

from rich.console import Console

from studies import routing
from studies.page_tables import with_tables
from studies.routing.cells import ROUTERS, Cell, run_cell
from studies.routing.report import _largest, draw, show, tables
from studies.routing.run import read

RESULTS = Path(routing.__file__).with_name("results.json")


def test_the_committed_figures_can_be_shown_and_drawn(tmp_path):
    rows = json.loads(RESULTS.read_text())["results"]
    console = Console(file=io.StringIO(), width=200)
    show(rows, console)
    shown = console.file.getvalue()
    assert all(name in shown for name in ROUTERS)
    assert all(size in shown for size in ("2 replicas", "8 replicas", "one slow", "one killed, trees", "64 replicas"))
    draw(tmp_path / "picture.png", rows)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_tables_of_the_page_are_those_of_the_results():
    page = RESULTS.with_name("README.md").read_text()
    assert with_tables(page, tables(json.loads(RESULTS.read_text())["results"])) == page


def test_a_run_of_few_queries_is_not_shown_for_one_of_many():
    few, many, chats = (
        {**run_cell(Cell("azure", 2, "round robin", num, rate=rate), {}), "code": ""}
        for num, rate in ((10, 0.0), (20, 0.0), (30, 1.0))
    )
    assert _largest([many, chats, few]) == [many, chats]


def test_finished_runs_are_read_again(tmp_path):
    cell = Cell("azure", 2, "round robin", 10)
    row = {**run_cell(cell, {}), "code": "this"}
    path = tmp_path / "folder" / "runs.jsonl"
    assert read(path, "this") == {}
    path.write_text(json.dumps(row) + "\n")
    assert read(path, "this") == {cell: row}
    assert read(path, "other code") == {}
