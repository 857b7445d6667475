"""A CSV of events, as programs and spreadsheets write it."""

import csv
import re
from collections.abc import Iterator

from streamrag_bench.advice.events import LogLine

NAMES = ("query", "event", "seconds")
SEPARATORS = {",": "commas", ";": "semicolons", "\t": "tabs", "|": "vertical bars"}
_EVENT = re.compile(r"\s*(question|chunks?(:.*)?|end)\s*", re.IGNORECASE)
_DIRECTIVE = re.compile(r'"?sep=(.)"?[,;\t]*', re.IGNORECASE)  # Excel's


class EventTable:
    """A reader of the rows of a table with three columns, without or with a heading, which also may have others."""

    def __init__(self, first_row: str) -> None:
        directive = _DIRECTIVE.fullmatch(first_row)
        self.separator = directive[1] if directive else _separator(first_row)
        self._columns: tuple[int, ...] = ()  # of `NAMES`, found in the first row
        self._num_columns = 0  # of the heading

    def continues(self, row: str) -> bool:
        """Whether a cell with several lines does not end in this row."""
        try:
            _cells(row, self.separator)
        except csv.Error as error:
            return "unexpected end of data" in str(error)
        return False

    def events(self, row: str) -> Iterator[LogLine]:
        """Yield the event in a row, if any. Raises csv.Error, ValidationError, or what wrong values raise."""
        cells = _cells(row, self.separator)
        if not any(cells) or _DIRECTIVE.fullmatch(row):
            return  # spreadsheets write empty rows, too
        names = [cell.lower() for cell in cells]
        if set(NAMES) <= set(names):
            self._columns, self._num_columns = tuple(map(names.index, NAMES)), len(names)
        elif not self._columns and names[-1].endswith("seconds"):
            self._columns = (0, 1, 2)
        else:
            self._columns = self._columns or (0, 1, 2)
            has_row_name = len(cells) - 1 == self._num_columns and cells[-1]  # R's, which have no heading
            yield self._event(cells[1:] if has_row_name else cells)

    def _event(self, cells: list[str]) -> LogLine:
        if others := [cell for cell in cells[3:] if cell] if not self._num_columns else []:
            raise ValueError(f"it has more than three columns, separated by {self.separator!r}: {others[0]!r:.50}")
        query, event, seconds = (cells[column] for column in self._columns)
        name, colon, tokens = event.lower().partition(":")
        values = {"query": query, "event": "chunks" if name == "chunk" else name, "seconds": _number(seconds)}
        return LogLine.model_validate({**values, "tokens": (tokens,) if colon else None})


def _separator(row: str) -> str:
    """Return the separator with which a row is a heading or an event; a comma if there is none."""
    for separator in SEPARATORS:
        try:
            cells = _cells(row, separator)
        except csv.Error:
            continue
        is_heading = cells[-1].lower().endswith("seconds") or "seconds" in map(str.lower, cells)
        if len(cells) >= 3 and (is_heading or _EVENT.fullmatch(cells[1])):
            return separator
    return ","


def _cells(row: str, separator: str) -> list[str]:
    return [cell.strip() for cell in next(csv.reader([row], delimiter=separator, skipinitialspace=True, strict=True))]


def _number(text: str) -> str:
    """Return a number with a decimal point, from one with a decimal comma, or with separated thousands."""
    text = re.sub(r"(?<=\d)[\s'\u2019](?=\d)", "", text)
    if text.count(",") == 1 and text.rfind(".") < text.find(","):
        return text.replace(".", "").replace(",", ".")
    return text.replace(",", "")
