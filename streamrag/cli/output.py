"""The program's console: everything is sanitised before it reaches a terminal."""

import os
import sys
from collections.abc import Iterable
from typing import IO, Any, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from streamrag.errors import StreamRagError
from streamrag.support.display_text import json_text, one_line, sanitize

MIN_NAMES_WIDTH = 14
"""Characters of the first column of a table, at least."""
MAX_WIDTH = 10_000


class OutputError(StreamRagError):
    """The standard output cannot be written."""


class Output(Console):
    """The standard output or the standard error. What is printed is sanitised last of all, whatever it came through.

    Texts are taken as they are; `markup` makes those that have styles.

    :raises OutputError: when printing: the standard output cannot be written. The standard error may be lost.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False, width: int | None = None) -> None:
        file = cast(TextIO, _Errors() if stderr else _Results())
        super().__init__(file=file, quiet=quiet, width=width, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render as rich does, without what a terminal would obey."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(sanitize(segment.text), segment.style)

    def print_line(self, text: str | Text, style: str = "") -> None:
        """Print a line that is not wrapped: a wrapped path cannot be copied."""
        self.print(text, style=style, soft_wrap=True)

    def print_table(self, table: Table) -> None:
        """Print a table of names and figures. Where there is no room, names are folded, and no figure is ever cut."""
        names, *figures = table.columns
        for column in figures:
            column.justify, column.no_wrap = "right", True
        names.overflow, names.min_width = "fold", MIN_NAMES_WIDTH
        num_foldable = max((cell_len(str(name)) for name in names.cells), default=0) - MIN_NAMES_WIDTH
        natural = Measurement.get(self, self.options.update(width=MAX_WIDTH), table).maximum
        table.width = min(natural, max(self.width, natural - max(num_foldable, 0)))
        self.print(table, crop=False)

    def print_json_text(self, values: Any) -> None:
        """Print `values` as JSON, for programs; nothing is lost."""
        text = json_text(values)
        self._write(text if _encodable(text, self.file) == text else json_text(values, only_ascii=True))

    def print_plain(self, text: str) -> None:
        """Print a text as it is, but for what a terminal would obey; nothing is folded."""
        self._write(sanitize(text).removesuffix("\n"))

    def _write(self, text: str) -> None:
        try:
            self.file.write(text + "\n")
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()


def markup(template: str, *values: object) -> Text:
    """A text in rich's markup, in which each `{}` is one line that may hold anything."""
    return Text.from_markup(template.format(*(escape(one_line(str(value))) for value in values)), emoji=False)


class _Results:
    """The standard output of the moment."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stdout, name)

    def write(self, text: str) -> int:
        if sys.stdout is None:  # it was closed when Python started
            raise OutputError("the standard output is closed")
        try:
            return sys.stdout.write(_encodable(text, sys.stdout))
        except OSError as error:
            raise _given_up(error) from error

    def flush(self) -> None:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError as error:
            raise _given_up(error) from error


def _encodable(text: str, file: IO[str]) -> str:
    """With question marks for what the terminal has no code for."""
    encoding = getattr(file, "encoding", None)
    return text.encode(encoding, "replace").decode(encoding) if encoding else text


def _given_up(error: OSError) -> Exception:
    """Return the error to raise, and discard Python's buffer, which would be written again at the program's end."""
    if isinstance(error, BrokenPipeError):  # the reader has seen enough: rich ends the program
        return error
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    return OutputError(f"the standard output cannot be written: {error.strerror or error}")


class _Errors:
    """The standard error of the moment. When it cannot be written, there is nobody to tell."""

    def __getattr__(self, name: str) -> Any:
        return getattr(sys.stderr, name)

    def write(self, text: str) -> int:
        try:
            return sys.stderr.write(_encodable(text, sys.stderr)) if sys.stderr is not None else len(text)
        except OSError:
            return len(text)

    def flush(self) -> None:
        try:
            if sys.stderr is not None:
                sys.stderr.flush()
        except OSError:
            return
