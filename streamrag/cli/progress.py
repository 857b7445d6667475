"""How far a command is: a bar on a terminal; lines in a file or a pipe, where nobody watches it."""

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import Progress, ProgressColumn
from rich.text import Text

from streamrag.cli.output import Output
from streamrag.clock import Clock, monotonic
from streamrag.support.display_text import one_line

EVERY_S = 10.0


def bar(console: Console, *columns: ProgressColumn, transient: bool = False) -> Progress:
    """A bar of these columns. Nothing where there is no terminal."""
    return Progress(*columns, console=console, transient=transient, disable=not console.is_terminal)


class StepLines:
    """A line for each step and, while it lasts, one every ten seconds at most. Nothing on a terminal."""

    def __init__(self, console: Output, clock: Clock = monotonic) -> None:
        self._console = console
        self._clock = clock
        self._last: tuple[str, float] | None = None

    def show(self, step: str, count: str = "") -> None:
        """The program is at `step`, and so far in it."""
        if self._console.is_terminal:
            return
        now_s = self._clock()
        if self._last is None or self._last[0] != step or now_s - self._last[1] >= EVERY_S:
            self._last = step, now_s
            text = f"{step}, {count}" if count else step
            self._console.print(text, soft_wrap=True)


@contextmanager
def shown_starting(console: Output) -> Iterator[Callable[[str], None]]:
    """Show that something starts, and each line that it says of that."""
    lines = StepLines(console)
    with console.status("starting") as status:

        def show(line: str) -> None:
            status.update(Text(one_line(line)))
            lines.show(line)

        yield show


def positive(text: str) -> int:
    """The whole number of an option, for `argparse`."""
    value = text.replace("_", "")
    if not value.isdecimal() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number above 0")
    return int(value)
