"""Progress of a command: bars on a terminal, lines in a file or a pipe."""

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
from streamrag.support.clock import Clock, monotonic
from streamrag.support.display_text import one_line

EVERY_S = 10.0


def bar(console: Console, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """Return a bar of these columns, which shows nothing where there is no terminal."""
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)


class StepLines:
    """A line for each step and, while it lasts, one every ten seconds at most. Nothing on a terminal."""

    def __init__(self, console: Output, clock: Clock = monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last: tuple[str, float] | None = None

    def show(self, step: str, count: str = "") -> None:
        """Show that the program is at `step`, and how far in it."""
        if self._console.is_terminal:
            return
        now_s = self._clock()
        if self._last is None or self._last[0] != step or now_s - self._last[1] >= EVERY_S:
            self._last = step, now_s
            text = f"{step}, {count}" if count else step
            self._console.print(text, soft_wrap=True)


@contextmanager
def step_bars(console: Output) -> Iterator[Callable[[int, int, str], None]]:
    """Show a bar for each step, or its lines; yields what is called with the number done, that of all, and the step."""
    lines = StepLines(console)
    columns = (TextColumn("{task.description:12}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with bar(console, *columns) as progress:
        tasks: dict[str, TaskID] = {}

        def show(num_done: int, num_total: int, step: str) -> None:
            if step not in tasks:
                tasks[step] = progress.add_task(step, total=num_total)
            progress.update(tasks[step], completed=num_done, total=num_total)
            lines.show(step, f"{num_done:,} of {num_total:,}")

        yield show


@contextmanager
def shown_starting(console: Output) -> Iterator[Callable[[str], None]]:
    """Show that something starts, and each line that it says of that."""
    lines = StepLines(console)
    with console.status("starting") as status:

        def show(line: str) -> None:
            status.update(Text(one_line(line)))
            lines.show(line)

        yield show
