"""Tables in Markdown pages, renewed from results files.

Each table stands behind a comment with its name, `<!-- table: NAME -->`, between two empty lines.
"""

import re
from collections.abc import Iterable, Mapping, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, num_left: int = 1) -> str:
    """Return a Markdown table, the first columns to the left, the others to the right."""
    rule = ["---" if column < num_left else "---:" for column in range(len(head))]
    lines = [head, rule, *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with its tables renewed.

    :raises ValueError: the page has no comment, or several, with the name of a table.
    """
    for name, text in tables.items():
        pattern = rf"(<!-- table: {re.escape(name)} -->\n\n)(?:\|.*\n)*\n?"
        page, count = re.subn(pattern, lambda match, text=text: f"{match[1]}{text}\n", page)  # type: ignore[misc]
        if count != 1:
            raise ValueError(f"the page has {count} comments with the name {name!r} where one belongs")
    return page
