import io
import json
from pathlib import Path

from rich.console import Console

from experiments.routing.__main__ import filled, read
from experiments.routing.cells import ROUTERS, Cell, run_cell
from experiments.routing.decisions import held_bytes
from experiments.routing.report import _largest, draw, show, written

RESULTS = Path(__file__).parents[3] / "experiments" / "results" / "routing.json"


def test_the_committed_figures_can_be_shown_and_drawn(tmp_path):
    rows = filled(json.loads(RESULTS.read_text())["results"])
    console = Console(file=io.StringIO(), width=200)
    show(rows, console)
    shown = console.file.getvalue()
    assert all(name in shown for name in ROUTERS)
    assert all(size in shown for size in ("2 replicas", "8 replicas", "one slow", "one killed, trees", "64 replicas"))
    draw(tmp_path / "picture.png", rows)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_tables_go_into_a_page_where_they_stood_before():
    cells = [Cell("rag", 8, of, "soonest", 10) for of in ("routers", "soonest")]
    page = (
        "One.\n\n<!-- table: signals-soonest -->\n\n| old |\n| - |\n\nTwo.\n\n<!-- table: decisions -->\n\n\nThree.\n"
    )
    rows = [run_cell(cell, {}) for cell in cells]
    decisions = [{"what": "tracker", "num_replicas": num, "us": num / 3} for num in (2, 1_000)]
    once = written(page, rows, decisions)
    assert "old" not in once
    assert "| soonest |  |  | **" in once
    assert "| `tracker` | 1 | 333 |" in once
    assert all(text in once for text in ("One.\n\n<!--", "\n\nTwo.\n", "\n\nThree.\n"))
    assert written(once, rows, decisions) == once


def test_a_run_of_few_queries_is_not_shown_for_one_of_many():
    few, many, chats = (
        {**run_cell(Cell("azure", 2, "routers", "round robin", num, rate=rate), {}), "code": ""}
        for num, rate in ((10, 0.0), (20, 0.0), (30, 1.0))
    )
    assert _largest([many, chats, few]) == [many, chats]


def test_finished_runs_are_read_again(tmp_path):
    cell = Cell("azure", 2, "routers", "round robin", 10)
    row = {**run_cell(cell, {}), "code": "this"}
    path = tmp_path / "folder" / "runs.jsonl"
    assert read(path, "this") == {}
    path.write_text(json.dumps(row) + "\n")
    assert read(path, "this") == {cell: row}
    assert read(path, "other code") == {}


def test_each_piece_in_a_router_takes_a_few_hundred_bytes():
    assert all(50 < num < 1_000 for num in held_bytes().values())
