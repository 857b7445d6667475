"""Rows of other programs' CSV files, with their line numbers."""

import csv
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

from streamrag.errors import TraceError
from streamrag.reading import MAX_LINE_BYTES
from streamrag.trace.files import numbered_lines_of

__all__ = ["Row", "read_csv"]

T = TypeVar("T")


class Row:
    """A row by column, which knows where it stands."""

    def __init__(self, where: str, fields: dict[str, str]) -> None:
        self._where = where
        self._fields = fields

    def __getitem__(self, column: str) -> str:
        return self._fields[column]

    def optional(self, column: str) -> str:
        """The field, empty if there is no such column."""
        return self._fields.get(column, "")

    def get(self, column: str, parse: Callable[[str], T], what: str) -> T:
        """The field as `parse` reads it.

        :raises TraceError: it cannot be read as `what`.
        """
        try:
            return parse(self._fields[column])
        except ValueError as error:
            raise self.error(f"{column}={self._fields[column][:60]!r} must be {what}") from error

    def error(self, problem: str) -> TraceError:
        """An error about this row."""
        return TraceError(f"{self._where}: {problem}")


def read_csv(
    path: Path, columns: Iterable[str], *, optional: Iterable[str] = (), max_rows: int | None = None
) -> list[Row]:
    """The rows of a CSV file that has these columns, and may have the optional ones, and others that are left out.

    :raises TraceError: the file cannot be read, lacks a column, or has a row of another length.
    """
    with _fields_up_to(MAX_LINE_BYTES):
        reader = csv.reader(_texts(path), strict=True)
        return list(islice(_rows(path, reader, tuple(columns), set(optional)), max_rows))


def _texts(path: Path) -> Iterator[str]:
    for number, line in numbered_lines_of(path):
        try:
            yield line.decode("utf-8-sig" if number == 1 else "utf-8")
        except UnicodeDecodeError as error:
            raise TraceError(f"{path}, line {number} is not UTF-8: {error.reason}") from error


def _rows(path: Path, reader: Any, columns: tuple[str, ...], optional: set[str]) -> Iterator[Row]:
    first_line = 1
    header: list[str] = []
    kept = {*columns, *optional}
    try:
        for values in reader:
            where, first_line = f"{path}, line {first_line}", reader.line_num + 1
            if not header:
                header = [name.strip() for name in values]
                missing = [name for name in columns if name not in header]
                if missing:
                    raise TraceError(f"{where}: no column {', '.join(missing)}; it has {', '.join(header)[:1000]}")
            elif values:
                if len(values) != len(header):
                    raise TraceError(f"{where}: {len(values)} fields, and {len(header)} columns")
                yield Row(where, {name: value for name, value in zip(header, values, strict=True) if name in kept})
    except csv.Error as error:
        raise TraceError(f"{path}, line {first_line}: {error}") from error
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
