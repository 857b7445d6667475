"""Runs those cells of an experiment that have no result yet."""

from collections.abc import Sequence

from rich.console import Console

from streamrag.cli.output import Output
from streamrag_bench.cell import CellSettings
from streamrag_bench.cli.bench.display import CellsView
from streamrag_bench.runner import CellFailed, run_cells
from streamrag_bench.store import CellStore


def run_missing(
    cells: Sequence[CellSettings], store: CellStore, num_processes: int, console: Console, *, is_forced: bool
) -> None:
    """Show how far it is. With `is_forced` all cells run.

    :raises SystemExit: some cells failed.
    """
    todo = [cell for cell in cells if is_forced or store.find(cell) is None]
    console.print(f"{len(cells) - len(todo)} of {len(cells)} cells are finished, in {store.folder}")
    failed = []
    with CellsView(len(todo), Output(stderr=True)) as view:
        for event in run_cells(todo, store, num_processes=num_processes):
            view.show(event)
            failed += [event] if isinstance(event, CellFailed) else []
    if failed:
        raise SystemExit(f"{len(failed)} cells failed ({failed[0].error}); the same command tries them again")
