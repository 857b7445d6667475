"""What a caller may name: a table, its columns, the rungs of a ladder."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

from streamrag.errors import ConfigurationError
from streamrag.sources.options import is_growing
from streamrag.support.messages import short

if TYPE_CHECKING:
    from psycopg import sql

DEFAULT_COLUMNS = {
    "text": "text",
    "uri": "uri",
    "title": "title",
    "passage": "passage",
    "embedding": "embedding",
    "words": "words",
}
"""Where the fields of a chunk stand. `words` holds the lexemes of the text, a tsvector."""

NEEDED = ("text", "uri", "embedding")

TableName: TypeAlias = str | tuple[str, str]


def table_parts(table: TableName) -> tuple[str, ...]:
    """Schema and name, or the name only.

    :raises ConfigurationError: it names none.

    >>> table_parts("docs.passages"), table_parts(("my.schema", "my.table"))
    (('docs', 'passages'), ('my.schema', 'my.table'))
    """
    parts = tuple(table.split(".")) if isinstance(table, str) else table
    is_name = isinstance(parts, tuple) and 1 <= len(parts) <= 2
    if not is_name or not all(isinstance(part, str) and part and "\0" not in part for part in parts):
        raise ConfigurationError(
            f"PostgreSQL: table={short(table)} must be a name, schema.name, or a tuple of both if they have dots"
        )
    return parts


def identifier(*parts: str) -> "sql.Identifier":
    """For a statement that is run with a list of values, be it empty: there, a % in a name must be doubled."""
    from psycopg import sql

    return sql.Identifier(*(part.replace("%", "%%") for part in parts))


def checked_columns(columns: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """The caller's columns.

    :raises ConfigurationError: a field that no chunk has, or no name.
    """
    chosen = dict(columns or {})
    for field, column in chosen.items():
        if field not in DEFAULT_COLUMNS:
            raise ConfigurationError(
                f"PostgreSQL: columns has {short(field)}, and a chunk has {', '.join(DEFAULT_COLUMNS)}"
            )
        is_left_out = column is None and field not in NEEDED
        if not is_left_out and not (isinstance(column, str) and column and "\0" not in column):
            raise ConfigurationError(f"PostgreSQL: columns[{field!r}]={short(column)} must be a column's name")
    return chosen


def checked_ladder(ladder: Sequence[int] | None) -> tuple[int, ...] | None:
    """The caller's rungs.

    :raises ConfigurationError: they do not grow, or are no whole numbers.
    """
    if ladder is None:
        return None
    if not is_growing(ladder, 1):
        raise ConfigurationError(
            f"PostgreSQL: ladder={short(ladder)} must be growing whole numbers from 1, or () for exact search only"
        )
    return tuple(map(int, ladder))
