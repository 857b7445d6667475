"""Figures as the studies of lanes write them."""

from collections.abc import Iterable, Iterator, Sequence

from studies.paper.markdown import table


def study_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a Markdown table with all columns to the left, for a study's page."""
    return table(head, rows, num_left=len(head))


def decimal(value: float, num_decimals: int = 2) -> str:
    """Return a figure without a leading zero: at most two decimals from 1 on, one from 10 on, none from 100 on."""
    most = next((most for limit, most in ((1, 9), (10, 2), (100, 1)) if value < limit), 0)
    return f"{value:.{min(num_decimals, most)}f}".removeprefix("0")


def without_repeats(rows: Iterable[Sequence[str]], num: int) -> Iterator[list[str]]:
    """Yield the rows of a table; of the first `num` columns, cells that repeat the row above stay empty."""
    above: Sequence[str] = ()
    for row in rows:
        num_same = next((n for n in range(num) if list(row[: n + 1]) != list(above[: n + 1])), num)
        yield [*[""] * num_same, *row[num_same:]]
        above = row
