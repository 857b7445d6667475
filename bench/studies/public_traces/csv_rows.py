"""Lines and CSV rows of files that another program made, with their line numbers."""

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import TypeVar

from streamrag.errors import TraceError
from streamrag.support.bounded_reading import MAX_LINE_BYTES
from streamrag.trace.files import LineReader

MAX_FIELDS = 1_000_000
"""Fields in a row. Each comma counts, also within quotes."""

T = TypeVar("T")


def numbered_lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file, with their newlines, and their numbers, from 1.

    :raises TraceError: the file cannot be read, is damaged or cut off, or has more than a trace may have.
    :raises MissingDependencyError: it is a .zst file, and zstandard is not installed.
    """
    reader = LineReader(path)
    yield from enumerate(reader.lines(), start=1)
    if reader.is_torn:
        raise TraceError(f"{path} is damaged: its compressed data ends too early")


class Row:
    """A row by column, which knows where it stands."""

    __slots__ = ("_columns", "_line", "_path", "_values")

    def __init__(self, path: Path, line: int, columns: Mapping[str, int], values: tuple[str, ...]) -> None:
        self._path = path
        self._line = line
        self._columns = columns
        self._values = values

    def __getitem__(self, column: str) -> str:
        return self._values[self._columns[column]]

    def optional(self, column: str) -> str:
        """The field, empty if there is no such column."""
        return self[column] if column in self._columns else ""

    def get(self, column: str, parse: Callable[[str], T], what: str) -> T:
        """The field as `parse` reads it.

        :raises TraceError: it cannot be read as `what`.
        """
        try:
            return parse(self[column])
        except ValueError as error:
            raise self.error(f"{column}={self[column][:60]!r} must be {what}") from error

    def error(self, problem: str) -> TraceError:
        """An error about this row."""
        return TraceError(f"{self._path}, line {self._line}: {problem}")


def read_csv(
    path: Path, columns: Iterable[str], *, optional: Iterable[str] = (), max_rows: int | None = None
) -> list[Row]:
    """The rows of a CSV file that has these columns, and may have the optional ones, and others that are left out.

    :raises TraceError: the file cannot be read, lacks a column, or has a row of another length.
    """
    with _fields_up_to(MAX_LINE_BYTES):
        return list(islice(_rows(_Texts(path), tuple(columns), tuple(optional)), max_rows))


class _Texts:
    """The lines of a file, of which a row may take several: quotes hold newlines.

    :raises TraceError: when read: a row is too large, beside what `numbered_lines` raises.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.row_line = 1
        """Where the row that is being read begins."""
        self._num_lines = self._row_bytes = self._row_commas = 0

    def __iter__(self) -> Iterator[str]:
        for number, line in numbered_lines(self.path):
            self._num_lines = number
            self._row_bytes += len(line)
            self._row_commas += line.count(b",")
            if self._row_bytes > MAX_LINE_BYTES or self._row_commas >= MAX_FIELDS:
                most = f"{MAX_LINE_BYTES >> 20} MiB or {MAX_FIELDS:,} fields"
                raise TraceError(f"{self.path}, line {self.row_line}: a row of more than {most}, the most that is read")
            try:
                yield line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise TraceError(f"{self.path}, line {number} is not UTF-8: {error.reason}") from error

    def begin_row(self) -> None:
        """The row is whole; the next line begins another."""
        self.row_line = self._num_lines + 1
        self._row_bytes = self._row_commas = 0


def _rows(texts: _Texts, columns: tuple[str, ...], optional: tuple[str, ...]) -> Iterator[Row]:
    path = texts.path
    header: list[str] = []
    places: list[int] = []
    kept: dict[str, int] = {}
    try:
        for values in csv.reader(texts, strict=True):
            line = texts.row_line
            texts.begin_row()
            if not header:
                header = [name.strip() for name in values]
                missing = [name for name in columns if name not in header]
                if missing:
                    names = ", ".join(header)[:1000]
                    raise TraceError(f"{path}, line {line}: no column {', '.join(missing)}; it has {names}")
                found = {name: place for place, name in enumerate(header) if name in (*columns, *optional)}
                kept, places = {name: number for number, name in enumerate(found)}, list(found.values())
            elif values:
                if len(values) != len(header):
                    raise TraceError(f"{path}, line {line}: {len(values)} fields, and {len(header)} columns")
                yield Row(path, line, kept, tuple(values[place] for place in places))
    except csv.Error as error:
        raise TraceError(f"{path}, line {texts.row_line}: {error}") from error
    if not header:
        raise TraceError(f"{path} is empty")


@contextmanager
def _fields_up_to(num_characters: int) -> Iterator[None]:
    """The csv module's limit, 128 KiB, holds for the whole process; a page may be larger."""
    before = csv.field_size_limit(num_characters)
    try:
        yield
    finally:
        csv.field_size_limit(before)
