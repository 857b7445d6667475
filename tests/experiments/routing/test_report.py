import io
import json
from pathlib import Path

from rich.console import Console

from experiments.routing.__main__ import read
from experiments.routing.cells import ROUTERS, Cell, run_cell
from experiments.routing.decisions import held_bytes
from experiments.routing.report import draw, show

RESULTS = Path(__file__).parents[3] / "experiments" / "results" / "routing.json"


def test_the_committed_figures_can_be_shown_and_drawn(tmp_path):
    rows = json.loads(RESULTS.read_text())["results"]
    console = Console(file=io.StringIO(), width=200)
    show(rows, console)
    shown = console.file.getvalue()
    assert all(name in shown for name in ROUTERS)
    assert all(
        size in shown for size in ("2 replicas", "8 replicas, one slow", "8 replicas, one killed", "64 replicas")
    )
    draw(tmp_path / "picture.png", rows)
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_finished_runs_are_read_again(tmp_path):
    cell = Cell("azure", 2, "routers", "round robin", 10)
    row = {**run_cell(cell, {}), "code": "this"}
    path = tmp_path / "folder" / "runs.jsonl"
    assert read(path, "this") == {}
    path.write_text(json.dumps(row) + "\n")
    assert read(path, "this") == {cell: row}
    assert read(path, "other code") == {}


def test_what_a_router_holds_is_a_few_hundred_bytes_a_piece():
    assert all(50 < num < 1_000 for num in held_bytes().values())
