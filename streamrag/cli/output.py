"""The program's console, which sanitizes all text before it reaches a terminal."""

import os
import sys
from collections.abc import Iterable
from typing import IO, Any, Literal, TextIO, cast

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.measure import Measurement
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from streamrag.display_text import json_text, one_line, sanitize
from streamrag.errors import StreamRagError

MIN_NAMES_WIDTH = 14  # minimum width of a table's first column, in characters
MAX_WIDTH = 10_000


class OutputError(StreamRagError):
    """The standard output cannot be written."""


class Output(Console):
    """A console on the standard output or the standard error, which removes control characters from all text.

    Texts are printed literally; use `markup` for styled text.

    :raises OutputError: on printing, if the standard output cannot be written. Errors of stderr are ignored.
    """

    def __init__(self, *, stderr: bool = False, quiet: bool = False, width: int | None = None) -> None:
        file = cast(TextIO, _StandardStream("stderr" if stderr else "stdout"))
        super().__init__(file=file, quiet=quiet, width=width, highlight=False, markup=False, emoji=False)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render like rich, and sanitize the text of each segment."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(sanitize(segment.text), segment.style)

    def print_line(self, text: str | Text, style: str = "") -> None:
        """Print a line without wrapping, so that paths can be copied."""
        self.print(text, style=style, soft_wrap=True)

    def print_table(self, table: Table) -> None:
        """Print a table of names and figures. If it is too wide, names are folded; figures are never cut."""
        names, *figures = table.columns
        for column in figures:
            column.justify, column.no_wrap = "right", True
        names.overflow, names.min_width = "fold", MIN_NAMES_WIDTH
        num_foldable = max((cell_len(str(name)) for name in names.cells), default=0) - MIN_NAMES_WIDTH
        natural = Measurement.get(self, self.options.update(width=MAX_WIDTH), table).maximum
        table.width = min(natural, max(self.width, natural - max(num_foldable, 0)))
        self.print(table, crop=False)

    def print_json_text(self, values: Any) -> None:
        """Print `values` as JSON; characters that the encoding lacks are escaped."""
        text = json_text(values)
        self._write(text if _encodable(text, self.file) == text else json_text(values, only_ascii=True))

    def print_plain(self, text: str) -> None:
        """Print a text with its line breaks, sanitized but neither wrapped nor styled."""
        self._write(sanitize(text).removesuffix("\n"))

    def _write(self, text: str) -> None:
        """Write a text and a line break, and flush, also if quiet. If the reader has left, end the program."""
        try:
            self.file.write(text + "\n")
            self.file.flush()
        except BrokenPipeError:
            self.on_broken_pipe()


def markup(template: str, *values: object) -> Text:
    """Return a text in rich's markup, with `values` in place of each `{}`, escaped and reduced to one line."""
    return Text.from_markup(template.format(*(escape(one_line(str(value))) for value in values)), emoji=False)


class _StandardStream:
    """The current standard output or error. Writing to the standard error never fails: its text may be lost."""

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys, self._name), name)

    def write(self, text: str) -> int:
        """Write the text; raise OutputError if stdout fails, BrokenPipeError if its reader has left."""
        stream = getattr(sys, self._name)
        if stream is None and self._name == "stdout":  # closed before Python started
            raise OutputError("the standard output is closed")
        try:
            return stream.write(_encodable(text, stream)) if stream is not None else len(text)
        except OSError as error:
            if self._name == "stdout":
                raise _output_error(error) from error
            return len(text)

    def flush(self) -> None:
        """Flush the stream, if it is open; raise as `write` does."""
        try:
            if (stream := getattr(sys, self._name)) is not None:
                stream.flush()
        except OSError as error:
            if self._name == "stdout":
                raise _output_error(error) from error


def _encodable(text: str, file: IO[str]) -> str:
    """Replace characters that the file's encoding lacks by question marks."""
    encoding = getattr(file, "encoding", None)
    return text.encode(encoding, "replace").decode(encoding) if encoding else text


def _output_error(error: OSError) -> Exception:
    """Return a BrokenPipeError itself, else an OutputError, after discarding what Python would write again at exit."""
    if isinstance(error, BrokenPipeError):  # rich ends the program
        return error
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, sys.stdout.fileno())
    os.close(devnull)
    return OutputError(f"the standard output cannot be written: {error.strerror or error}")
