"""A table with vectors: its columns, its indexes, and what made it. Nothing of it is trusted.

Identifiers are quoted by psycopg, values are parameters, and what the extension made is named with its schema: no name,
value or search_path of somebody else's becomes SQL.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import psycopg
from psycopg import sql
from pydantic import BaseModel, Field, FiniteFloat, StrictInt, ValidationError

from streamrag.errors import IndexMissingError, StreamRagError, VectorIndexError
from streamrag.sources.index.embedder import EmbedderIdentity
from streamrag.sources.postgres.arguments import DEFAULT_COLUMNS, NEEDED, TableName, table_parts
from streamrag.sources.postgres.link import Address, Connection
from streamrag.support.messages import short

KINDS = {
    "text": ("a text", {"S"}),
    "passage": ("a whole number", {"int2", "int4", "int8"}),
    "embedding": ("a vector or halfvec of pgvector", {"vector", "halfvec"}),
    "words": ("a tsvector", {"tsvector"}),
}
"""Types that columns must have, or categories of types; the others are read as text."""

OPERATORS = {"cosine": "<=>", "l2": "<->", "ip": "<#>", "l1": "<+>"}
"""pgvector's distances, by parts of the names of its operator classes."""

RECORD_FORMAT = 1
MAX_COMMENT_CHARS = 4_000

_CONFIGURATION = re.compile(r"to_tsvector\('((?:[^']|'')+)'::regconfig")


def identifier(*parts: str) -> sql.Identifier:
    """Return an identifier for a statement that is run with values, be it none: there a % in a name is doubled."""
    return sql.Identifier(*(part.replace("%", "%%") for part in parts))


@dataclass(frozen=True, slots=True)
class Ladder:
    """The approximate index of a table."""

    setting: str
    """The setting that makes it look further: `hnsw.ef_search` or `ivfflat.probes`."""
    most: int
    iterative: str = ""
    """The value of its `iterative_scan`, with which it goes on until it has enough rows that fit a filter."""

    def rungs(self, values: Sequence[int]) -> list[int]:
        """Return these values of the setting, none above `most`."""
        return sorted({min(value, self.most) for value in values})

    def settings(self, rung: int) -> dict[str, str]:
        """Return the server's settings for a value of `setting`."""
        settings = {self.setting: str(rung)}
        if self.iterative:
            settings[f"{self.setting.partition('.')[0]}.iterative_scan"] = self.iterative
        return settings


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be searched."""

    parts: tuple[str, ...]
    columns: Mapping[str, str]
    """The columns that it has, by the field of a chunk that they hold."""
    vector_type: tuple[str, str]
    """Schema and name."""
    dimension: int | None
    metric: str
    ladder: Ladder | None
    words: str | None
    """Text search configuration of its index of words; None if it has no such index."""
    words_is_column: bool
    made_with: EmbedderIdentity | None
    """The embedder in its comment, if streamrag made it."""

    @property
    def name(self) -> str:
        """The name for messages."""
        return ".".join(self.parts)


class _Column(NamedTuple):
    name: str
    schema: str
    """The schema of its type."""
    kind: str
    category: str
    modifier: int
    expression: str


class _Index(NamedTuple):
    method: str
    operators: str
    column: str | None
    options: list[str] | None
    expression: str | None


_COLUMNS = """
    SELECT a.attname, n.nspname, t.typname, t.typcategory::text, a.atttypmod,
        coalesce(pg_get_expr(d.adbin, d.adrelid), '')
    FROM pg_catalog.pg_attribute a
    JOIN pg_catalog.pg_type t ON t.oid = a.atttypid
    JOIN pg_catalog.pg_namespace n ON n.oid = t.typnamespace
    LEFT JOIN pg_catalog.pg_attrdef d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
    WHERE a.attrelid = %s::oid AND a.attnum > 0 AND NOT a.attisdropped
    ORDER BY a.attnum"""

_INDEXES = """
    SELECT m.amname, o.opcname, a.attname, c.reloptions, pg_get_expr(i.indexprs, i.indrelid)
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
) -> Table:
    """Return what the table is like; `columns` is the caller's.

    :raises IndexMissingError: there is no such table.
    :raises VectorIndexError: it has no such column, or one of a wrong type; there is no pgvector; it may not be read.
    """
    parts = table_parts(table)
    name = ".".join(parts)
    quoted = sql.Identifier(*parts).as_string(connection)
    ((oid, comment, version),) = await fetch(connection, _ABOUT, quoted, quoted)
    if version is None:
        raise VectorIndexError(
            f"{address} has no pgvector there. Its administrator installs it with:  CREATE EXTENSION vector"
        )
    if oid is None:
        raise IndexMissingError(
            f"{address} has no table {name} that this user may see. Fill one with:  "
            f"streamrag index build FOLDER --to DSN --table {name}"
        )
    there = {row[0]: _Column(*row) for row in await fetch(connection, _COLUMNS, oid)}
    indexes = [_Index(*row) for row in await fetch(connection, _INDEXES, oid)]
    named = _columns_to_read(f"{address}: ", name, columns, there)
    vectors = there[named["embedding"]]
    ladder, metric = _ladder(indexes, vectors.name, _version(version))
    words, is_column = _words(indexes, named, there)
    return Table(
        parts=parts,
        columns=named,
        vector_type=(vectors.schema, vectors.kind),
        dimension=vectors.modifier if vectors.modifier > 0 else None,
        metric=metric,
        ladder=ladder,
        words=words,
        words_is_column=is_column,
        made_with=read_record(comment),
    )


async def fetch(connection: Connection, query: str, *values: Any) -> list[tuple[Any, ...]]:
    """Return the rows that a statement of our own gives."""
    return await (await connection.execute(query.encode(), values)).fetchall()


def _columns_to_read(
    where: str, table: str, columns: Mapping[str, str | None], there: Mapping[str, _Column]
) -> dict[str, str]:
    """Return the columns by field. Those that the caller did not name may be missing, unless a chunk needs them."""
    named: dict[str, str] = {}
    for field, default in DEFAULT_COLUMNS.items():
        column = columns.get(field, default)
        is_wanted = field in columns or field in NEEDED
        if column is None or (column not in there and not is_wanted):
            continue
        if column not in there:
            raise VectorIndexError(
                f"{where}table {table} has no column {short(column)} for a chunk's {field}: it has "
                f"{', '.join(list(there)[:20])}. Name it, as in columns={{{field!r}: ...}}"
            )
        must_be, kinds = KINDS.get(field, ("", set()))
        if kinds and not kinds & {there[column].kind, there[column].category}:
            if field == "words" and field not in columns:
                continue  # it is something else that happens to be called so
            raise VectorIndexError(
                f"{where}column {short(column)} of table {table} is {there[column].kind}, and a chunk's {field} must "
                f"be {must_be}"
            )
        named[field] = column
    return named


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _ladder(indexes: Sequence[_Index], column: str, version: tuple[int, ...]) -> tuple[Ladder | None, str]:
    """Return the approximate index of the column, HNSW if there are several, and its metric; else None and cosine."""
    is_iterative = version >= (0, 8)
    for index in indexes:
        metric = next((metric for metric in OPERATORS if f"_{metric}_ops" in index.operators), None)
        if index.column != column or metric is None:
            continue
        if index.method == "hnsw":
            return Ladder("hnsw.ef_search", 1_000, "strict_order" if is_iterative else ""), metric
        if index.method == "ivfflat":
            lists = (re.fullmatch(r"lists=(\d{1,6})", each) for each in index.options or ())
            most = next((int(found[1]) for found in lists if found), 100)
            return Ladder("ivfflat.probes", most, "relaxed_order" if is_iterative else ""), metric
    return None, "cosine"


def _words(
    indexes: Sequence[_Index], named: Mapping[str, str], there: Mapping[str, _Column]
) -> tuple[str | None, bool]:
    """Return the text search configuration of an index of words, and whether it is over the column of lexemes."""
    column = re.escape(named["text"])
    of_text = re.compile(rf"""{_CONFIGURATION.pattern}, \(?"?{column}"?\)?(?:::text)?\)""")
    for index in indexes:
        if index.method not in ("gin", "gist"):
            continue
        if index.column is not None and index.column == named.get("words"):
            found = _CONFIGURATION.search(there[index.column].expression)
            return (found[1].replace("''", "'") if found else ""), True
        if found := of_text.fullmatch(index.expression or ""):
            return found[1].replace("''", "'"), False
    return None, "words" in named


# -------------------------------------------------------------------------------------------------- what made a table


class _Record(BaseModel):
    """The comment of a table that streamrag fills, below the key "streamrag"."""

    format: int = RECORD_FORMAT
    embedder: Annotated[str, Field(strict=True)]
    dimension: StrictInt
    probe: tuple[FiniteFloat, ...]


class _Comment(BaseModel):
    streamrag: _Record


def record_of(embedder: EmbedderIdentity) -> str:
    """Return the comment of a table that this embedder's vectors fill."""
    record = {"format": RECORD_FORMAT, "embedder": embedder.name, "dimension": embedder.dimension}
    return json.dumps({"streamrag": {**record, "probe": embedder.probe}})


def read_record(comment: str | None) -> EmbedderIdentity | None:
    """Return the embedder in a comment; None if it is not one of ours. It is compared, and never loaded."""
    if not comment or len(comment) > MAX_COMMENT_CHARS:
        return None
    try:
        record = _Comment.model_validate_json(comment).streamrag
    except ValidationError:
        return None
    return EmbedderIdentity(record.embedder[:200], record.dimension, record.probe)


def at_start(address: Address, error: Exception) -> StreamRagError:
    """Return an error of the driver, while a table was looked at, as an error of ours."""
    explained = address.explained(error)
    if isinstance(error, psycopg.ProgrammingError | psycopg.DataError):
        return VectorIndexError(str(explained))
    return explained
