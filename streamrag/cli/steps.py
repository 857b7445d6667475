"""How far a command is: a bar on a terminal; lines in a file or a pipe, where nobody watches it."""

from rich.console import Console
from rich.progress import Progress, ProgressColumn

from streamrag.cli.output import Output
from streamrag.clock import Clock, monotonic

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
