"""Inspect a table with vectors: its columns, its indexes, and the embedder that filled it. All of it is untrusted.

psycopg quotes the identifiers, values are parameters, and objects of the extension are qualified with its schema, so
that no foreign name, value or search_path becomes SQL.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from psycopg import sql
from psycopg.rows import namedtuple_row
from pydantic import BaseModel, Field, FiniteFloat, StrictInt, ValidationError

from streamrag.errors import IndexMissingError, VectorIndexError
from streamrag.sources.index.embedder import EmbedderIdentity
from streamrag.sources.postgres.arguments import DEFAULT_COLUMNS, NEEDED, TableName, table_parts
from streamrag.sources.postgres.link import Address, Connection
from streamrag.support.messages import short_repr

KINDS = {
    "text": ("a text", {"S"}),
    "passage": ("a whole number", {"int2", "int4", "int8"}),
    "embedding": ("a vector or halfvec of pgvector", {"vector", "halfvec"}),
    "words": ("a tsvector", {"tsvector"}),
}
"""Allowed types, or categories of types, of columns; other columns are read as text."""
OPERATORS = {"cosine": "<=>", "l2": "<->", "ip": "<#>", "l1": "<+>"}
"""pgvector's distance operators, by metric as in the names of its operator classes."""
RECORD_FORMAT = 1
MAX_COMMENT_CHARS = 4_000
_CONFIGURATION = re.compile(r"to_tsvector\('((?:[^']|'')+)'::regconfig")


def identifier(*parts: str) -> sql.Identifier:
    """Return an identifier for a statement that is run with parameters, in which % must be doubled."""
    return sql.Identifier(*(part.replace("%", "%%") for part in parts))


@dataclass(frozen=True, slots=True)
class Ladder:
    """An approximate index of a table, whose search a setting widens."""

    setting: str
    """The setting that widens its search: `hnsw.ef_search` or `ivfflat.probes`."""
    most: int
    """The highest value of the setting."""
    iterative: str = ""
    """The value of its `iterative_scan`, which continues a search until enough rows pass the filter."""

    def settings(self, rung: int) -> dict[str, str]:
        """Return the server settings of a rung: its value and, if the server can scan iteratively, that mode."""
        settings = {self.setting: str(rung)}
        if self.iterative:
            settings[f"{self.setting.partition('.')[0]}.iterative_scan"] = self.iterative
        return settings


@dataclass(frozen=True, slots=True)
class PassageTable:
    """A table that can be searched."""

    parts: tuple[str, ...]
    columns: Mapping[str, str]
    """The column of each field of a chunk."""
    vector_type: tuple[str, str]
    """Schema and name of the type of its vectors."""
    dimension: int | None
    metric: str
    ladder: Ladder | None
    words: str | None
    """Text search configuration of its full-text index; None if it has no such index."""
    words_is_column: bool
    made_with: EmbedderIdentity | None
    """The embedder in its comment, if streamrag made it."""

    @property
    def name(self) -> str:
        """Qualified name, for messages."""
        return ".".join(self.parts)


_COLUMNS = """
    SELECT a.attname AS name, n.nspname AS type_schema, t.typname AS kind, t.typcategory::text AS category,
        a.atttypmod AS modifier, coalesce(pg_get_expr(d.adbin, d.adrelid), '') AS expression
    FROM pg_catalog.pg_attribute a
    JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
    JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = %s::oid AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum"""

_INDEXES = """
    SELECT m.amname AS method, o.opcname AS operators, a.attname AS column, c.reloptions AS options,
        pg_get_expr(i.indexprs, i.indrelid) AS expression
    FROM pg_catalog.pg_index i
    JOIN pg_catalog.pg_class c ON c.oid = i.indexrelid
    JOIN pg_catalog.pg_am m ON m.oid = c.relam
    JOIN pg_catalog.pg_opclass o ON o.oid = i.indclass[0]
    LEFT JOIN pg_catalog.pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0] AND i.indkey[0] > 0
    WHERE i.indrelid = %s::oid AND i.indisvalid AND i.indisready AND i.indpred IS NULL
    ORDER BY m.amname = 'hnsw' DESC, c.relname"""

_ABOUT = """
    SELECT to_regclass(%s)::oid, obj_description(to_regclass(%s), 'pg_class'),
        (SELECT extversion FROM pg_catalog.pg_extension WHERE extname = 'vector')"""


async def inspect_table(
    connection: Connection, address: Address, table: TableName, columns: Mapping[str, str | None]
) -> PassageTable:
    """Return the description of a table, by its columns, indexes and comment.

    columns: the caller's column of each field.

    :raises IndexMissingError: there is no such table.
    :raises VectorIndexError: a column is missing or of a wrong type, or pgvector is not installed.
    """
    parts = table_parts(table)
    name = ".".join(parts)
    quoted = sql.Identifier(*parts).as_string(connection)
    ((oid, comment, version),) = await fetch(connection, _ABOUT, quoted, quoted)
    if version is None:
        raise VectorIndexError(f"{address}: no pgvector there. An administrator installs it:  CREATE EXTENSION vector")
    if oid is None:
        raise IndexMissingError(
            f"{address} has no table {name} that this user may see. Fill one with:  "
            f"streamrag index build FOLDER --to DSN --table {name}"
        )
    cursor = connection.cursor(row_factory=namedtuple_row)
    existing: dict[str, Any] = {row[0]: row for row in await (await cursor.execute(_COLUMNS, [oid])).fetchall()}
    indexes = await (await cursor.execute(_INDEXES, [oid])).fetchall()
    selected = _select_columns(f"{address}: table {name}", columns, existing)
    vectors = existing[selected["embedding"]]
    ladder, metric = _ladder(indexes, vectors.name, [int(number) for number in re.findall(r"\d+", version)[:2]])
    words, is_column = _words(indexes, selected, existing)
    return PassageTable(
        parts=parts,
        columns=selected,
        vector_type=(vectors.type_schema, vectors.kind),
        dimension=vectors.modifier if vectors.modifier > 0 else None,
        metric=metric,
        ladder=ladder,
        words=words,
        words_is_column=is_column,
        made_with=read_record(comment),
    )


async def fetch(connection: Connection, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """Run a trusted statement, and return its rows."""
    return await (await connection.execute(query.encode(), values)).fetchall()


def _select_columns(table: str, columns: Mapping[str, str | None], existing: Mapping[str, Any]) -> dict[str, str]:
    """Return each field's column, if any; raise VectorIndexError if a named or needed one is missing or mistyped."""
    selected: dict[str, str] = {}
    for field, default in DEFAULT_COLUMNS.items():
        column = columns.get(field, default)
        is_required = field in columns or field in NEEDED
        if column is None or (column not in existing and not is_required):
            continue
        if column not in existing:
            raise VectorIndexError(
                f"{table} has no column {short_repr(column)} for a chunk's {field}: it has "
                f"{', '.join(list(existing)[:20])}. Name it, as in columns={{{field!r}: ...}}"
            )
        must_be, kinds = KINDS.get(field, ("", set()))
        if kinds and not kinds & {existing[column].kind, existing[column].category}:
            if field == "words" and field not in columns:
                continue  # an unrelated column that has this name by chance
            raise VectorIndexError(
                f"{table}: column {short_repr(column)} is {existing[column].kind}, and a chunk's {field} must be "
                f"{must_be}"
            )
        selected[field] = column
    return selected


def _ladder(indexes: Sequence[Any], column: str, version: list[int]) -> tuple[Ladder | None, str]:
    """Return the approximate index of the column, preferably HNSW, and its metric; else None and "cosine"."""
    is_iterative = version >= [0, 8]
    for index in indexes:
        metric = next((metric for metric in OPERATORS if f"_{metric}_ops" in index.operators), None)
        if index.column != column or metric is None:
            continue
        if index.method == "hnsw":
            return Ladder("hnsw.ef_search", 1_000, "strict_order" if is_iterative else ""), metric
        if index.method == "ivfflat":
            lists = (re.fullmatch(r"lists=(\d{1,6})", each) for each in index.options or ())
            most = next((int(match[1]) for match in lists if match), 100)
            return Ladder("ivfflat.probes", most, "relaxed_order" if is_iterative else ""), metric
    return None, "cosine"


def _words(indexes: Sequence[Any], columns: Mapping[str, str], existing: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return a full-text index's configuration, None without index, and whether to search the column of lexemes."""
    column = re.escape(columns["text"])
    text_expression = re.compile(rf"""{_CONFIGURATION.pattern}, \(?"?{column}"?\)?(?:::text)?\)""")
    for index in indexes:
        if index.method not in ("gin", "gist"):
            continue
        if index.column is not None and index.column == columns.get("words"):
            match = _CONFIGURATION.search(existing[index.column].expression)
            return (match[1].replace("''", "'") if match else ""), True
        if match := text_expression.fullmatch(index.expression or ""):
            return match[1].replace("''", "'"), False
    return None, "words" in columns


class _Record(BaseModel):
    """The embedder of a table that streamrag filled."""

    format: int = RECORD_FORMAT
    embedder: Annotated[str, Field(strict=True)]
    dimension: StrictInt
    probe: tuple[FiniteFloat, ...]


class _Comment(BaseModel):
    streamrag: _Record


def record_of(embedder: EmbedderIdentity) -> str:
    """Return the comment of a table that is filled with this embedder."""
    record = _Record(embedder=embedder.name, dimension=embedder.dimension, probe=embedder.probe)
    return _Comment(streamrag=record).model_dump_json()


def read_record(comment: str | None) -> EmbedderIdentity | None:
    """Parse the embedder in a comment; return None if it is not a record. It is only compared, never loaded."""
    if not comment or len(comment) > MAX_COMMENT_CHARS:
        return None
    try:
        record = _Comment.model_validate_json(comment).streamrag
    except ValidationError:
        return None
    return EmbedderIdentity(record.embedder[:200], record.dimension, record.probe)
