"""How far the cells are, and how long they still take: cells differ a hundredfold, so that each counts by its work."""

from collections.abc import Sequence
from types import TracebackType

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from streamrag.cli.output import Output
from streamrag.cli.progress import bar
from streamrag.support.clock import Clock, monotonic
from streamrag_bench.cell import CellSettings
from streamrag_bench.grid import describe_cell
from streamrag_bench.runner import CellEvent, CellFailed, CellFinished, CellProgressed

from .plan import expected_s, total_s

KNOWN_SHARE = 0.02
"""Of the work, that has to be done before its speed is believed."""


class Progress:
    """A bar on a terminal; elsewhere a line for each cell that is through."""

    def __init__(
        self, cells: Sequence[CellSettings], num_processes: int, console: Output, clock: Clock = monotonic
    ) -> None:
        self._total_s = total_s(cells)
        self._num_cells = len(cells)
        self._num_processes = num_processes
        self._console = console
        self._clock = clock
        self._start_s = clock()
        self._num_through = 0
        self._through_s = 0.0
        self._running: dict[CellSettings, float] = {}
        columns = (
            BarColumn(),
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[left]}"),
        )
        self._bar = bar(console, *columns)
        self._task = self._bar.add_task("", total=self._total_s, left="")

    def __enter__(self) -> "Progress":
        self._bar.start()
        self._show()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    @property
    def left_s(self) -> float:
        """Seconds until all cells are through, at the speed so far; at first at the expected one."""
        done_s = self._through_s + sum(self._running.values())
        if done_s <= KNOWN_SHARE * self._total_s:
            return (self._total_s - done_s) / self._num_processes
        return (self._clock() - self._start_s) * (self._total_s / done_s - 1)

    def show(self, event: CellEvent) -> None:
        """Something has happened to a cell."""
        cell = event.settings
        if isinstance(event, CellProgressed):
            self._running[cell] = expected_s(cell) * event.num_done / event.num_total
        elif isinstance(event, CellFinished | CellFailed):
            self._running.pop(cell, None)
            self._through_s += expected_s(cell)
            self._num_through += 1
            if isinstance(event, CellFailed):
                self._console.print_line(f"failed: {describe_cell(cell)}: {event.error}; its log: {event.log}")
            elif not self._console.is_terminal:
                self._console.print_line(f"{self._count}, {self._left} left: {describe_cell(cell)}")
        self._show()

    @property
    def _count(self) -> str:
        return f"{self._num_through}/{self._num_cells} cells"

    @property
    def _left(self) -> str:
        minutes = self.left_s / 60
        return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"

    def _show(self) -> None:
        done_s = self._through_s + sum(self._running.values())
        self._bar.update(self._task, completed=done_s, description=self._count, left=f"{self._left} left")
