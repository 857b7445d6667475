"""Checks of the caller's arguments: the driver, and the names of the table and its columns. Needs no driver."""

from collections.abc import Mapping
from typing import TypeAlias

from streamrag.errors import ConfigurationError, MissingDependencyError, SourceError, install_line, require_modules
from streamrag.support.messages import short_repr

DEFAULT_COLUMNS = {name: name for name in ("text", "uri", "title", "passage", "embedding", "words")}
"""Default column of each field of a chunk. `words` holds the lexemes of the text, a tsvector."""
NEEDED = ("text", "uri", "embedding")
TableName: TypeAlias = str | tuple[str, str]


class StatementTimeoutError(SourceError):
    """The server cancelled a statement, because of its timeout or by an administrator."""


def require_psycopg() -> None:
    """Raise MissingDependencyError if psycopg, its pool or libpq is not installed."""
    require_modules("embed", "psycopg", "psycopg_pool")
    try:
        import psycopg  # noqa: F401 - loads libpq
    except ImportError as error:
        raise MissingDependencyError("psycopg with libpq", install_line("embed")) from error


def table_parts(table: TableName) -> tuple[str, ...]:
    """Split a table name into schema and name, or the name alone.

    :raises ConfigurationError: it is not the name of a table.

    >>> table_parts("docs.passages"), table_parts(("my.schema", "my.table"))
    (('docs', 'passages'), ('my.schema', 'my.table'))
    """
    parts = tuple(table.split(".")) if isinstance(table, str) else table
    if not isinstance(parts, tuple) or not 1 <= len(parts) <= 2 or not all(map(_is_name, parts)):
        raise ConfigurationError(
            f"table={short_repr(table)} must be a name, schema.name, or a tuple of both if they have dots"
        )
    return parts


def storable(text: str) -> str:
    """Return the text without NUL and lone surrogates, which PostgreSQL cannot store."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


def checked_columns(columns: Mapping[str, str | None] | None) -> dict[str, str | None]:
    """Return the caller's column of each field; raise ConfigurationError for an unknown field or an invalid name."""
    checked = dict(columns or {})
    for field, column in checked.items():
        if field not in DEFAULT_COLUMNS:
            raise ConfigurationError(f"columns has {short_repr(field)}, and a chunk has {', '.join(DEFAULT_COLUMNS)}")
        if not _is_name(column) and (column is not None or field in NEEDED):
            raise ConfigurationError(f"columns[{field!r}]={short_repr(column)} must be a column's name")
    return checked


def _is_name(value: object) -> bool:
    return isinstance(value, str) and bool(value) and "\0" not in value
