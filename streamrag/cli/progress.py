"""Progress of a command: bars on a terminal, otherwise lines."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from streamrag.cli.output import Output
from streamrag.display_text import one_line
from streamrag.support.clock import Clock, monotonic

EVERY_S = 10.0


def bar(console: Console, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """Return a progress bar with these columns, which is disabled without a terminal."""
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)


class StepLines:
    """A printer of progress lines: one per step, and at most one per `EVERY_S` within a step. Silent on a terminal."""

    def __init__(self, console: Output, clock: Clock = monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last: tuple[str, float] | None = None

    def show(self, step: str, count: str = "") -> None:
        """Print the current step and its progress, if a line is due."""
        if self._console.is_terminal:
            return
        now_s = self._clock()
        if self._last is None or self._last[0] != step or now_s - self._last[1] >= EVERY_S:
            self._last = step, now_s
            self._console.print_line(f"{step}, {count}" if count else step)


@contextmanager
def step_bars(console: Output) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar for each step, or lines without a terminal. Yields a function of number done, total and step name."""
    lines = StepLines(console)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bar(console, *columns) as progress:
        tasks: dict[str, TaskID] = {}

        def show(num_done: int, num_total: int, step: str) -> None:
            if step not in tasks:
                # What a resumed build had done before is no part of the speed.
                tasks[step] = progress.add_task(step, total=num_total, completed=num_done)
            progress.update(tasks[step], completed=num_done, total=num_total)
            lines.show(step, f"{num_done:,} of {num_total:,}")

        yield show


@contextmanager
def shown_starting(console: Output) -> Iterator[Callable[[str], None]]:
    """Show a start-up status in the block, or lines without a terminal. Yields a function to call with each line."""
    lines = StepLines(console)
    with console.status("starting") as status:

        def show(line: str) -> None:
            status.update(Text(one_line(line)))
            lines.show(line)

        yield show
