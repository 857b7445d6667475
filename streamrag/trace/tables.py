"""Rows of other programs' CSV files, with their line numbers."""

import csv
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from streamrag.errors import TraceError

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


def read_csv(path: Path, columns: Iterable[str]) -> list[Row]:
    """All rows of a CSV file that has these columns, and may have more.

    :raises TraceError: the file cannot be read, lacks a column, or has a row of another length.
    """
    columns = tuple(columns)
    try:
        with path.open(encoding="utf-8-sig", newline="") as file, _fields_of_any_size():
            reader = csv.reader(file, strict=True)
            return list(_rows(path, reader, columns))
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise TraceError(f"{path} is not UTF-8: {error.reason} at byte {error.start}") from error


def _rows(path: Path, reader: Any, columns: tuple[str, ...]) -> Iterator[Row]:
    first_line = 1
    header: list[str] = []
    try:
        for values in reader:
            where, first_line = f"{path}, line {first_line}", reader.line_num + 1
            if not header:
                header = [name.strip() for name in values]
                missing = [name for name in columns if name not in header]
                if missing:
                    raise TraceError(f"{where}: no column {', '.join(missing)}; it has {', '.join(header)}")
            elif values:
                if len(values) != len(header):
                    raise TraceError(f"{where}: {len(values)} fields, and {len(header)} columns")
                yield Row(where, dict(zip(header, values, strict=True)))
    except csv.Error as error:
        raise TraceError(f"{path}, line {first_line}: {error}") from error
    if not header:
        raise TraceError(f"{path} is empty")


@contextmanager
def _fields_of_any_size() -> Iterator[None]:
    """The csv module's limit, 128 KiB, holds for the whole process; a page may be larger."""
    before = csv.field_size_limit(sys.maxsize)
    try:
        yield
    finally:
        csv.field_size_limit(before)
