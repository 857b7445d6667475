"""What a table with vectors is like: its columns, its indexes, and what made it. Nothing of it is trusted.

Identifiers are quoted by psycopg, values are parameters, and what the extension made is named with its schema: no name,
value or search_path of a stranger's becomes SQL.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from streamrag.errors import IndexMissingError, StreamRagError, VectorIndexError
from streamrag.sources.embedding import Loaded
from streamrag.sources.postgres.link import Address
from streamrag.sources.postgres.names import (
    DEFAULT_COLUMNS,
    NEEDED,
    TableName,
    table_parts,
)
from streamrag.support.messages import is_number, is_whole, short

if TYPE_CHECKING:
    from streamrag.sources.postgres.link import Connection

KINDS = {
    "text": ("a text", {"S"}),
    "passage": ("a whole number", {"int2", "int4", "int8"}),
    "embedding": ("a vector or halfvec of pgvector", {"vector", "halfvec"}),
    "words": ("a tsvector", {"tsvector"}),
}
"""Types that columns must have, or categories of types; the others are read as text."""

OPERATORS = {"cosine": "<=>", "l2": "<->", "ip": "<#>", "l1": "<+>"}
"""pgvector's distances, by what the names of its operator classes have."""

RECORD_FORMAT = 1
MAX_COMMENT_CHARS = 4_000

_CONFIGURATION = re.compile(r"to_tsvector\('((?:[^']|'')+)'::regconfig")


@dataclass(frozen=True, slots=True)
class Ladder:
    """The approximate index of a table."""

    setting: str
    """What makes it look further: `hnsw.ef_search` or `ivfflat.probes`."""
    most: int
    iterative: str = ""
    """The value of its `iterative_scan`, with which it goes on until it has enough rows that fit a filter."""


@dataclass(frozen=True, slots=True)
class Table:
    """A table that can be searched."""

    parts: tuple[str, ...]
    columns: Mapping[str, str]
    """Those that it has, by the field of a chunk that they hold."""
    vector_type: tuple[str, str]
    """Schema and name."""
    dimension: int | None
    metric: str
    ladder: Ladder | None
    words: str | None
    """Text search configuration of its index of words; None if it has no such index."""
    words_is_column: bool
    made_with: Loaded | None
    """What its comment says about the embedder, if streamrag made it."""

    @property
    def name(self) -> str:
        """For messages."""
        return ".".join(self.parts)


async def inspect_table(
    connection: "Connection", address: Address, table: TableName, columns: Mapping[str, str | None]
) -> Table:
    """What the table is like; `columns` is the caller's.

    :raises IndexMissingError: there is no such table.
    :raises VectorIndexError: it has no such column, or one of a wrong type; there is no pgvector; it may not be read.
    """
    from psycopg import sql

    parts = table_parts(table)
    name = ".".join(parts)
    at = await _rows(connection, "SELECT to_regclass(%s)::oid", [sql.Identifier(*parts).as_string(connection)])
    (extension,) = await _rows(
        connection, "SELECT (SELECT extversion FROM pg_catalog.pg_extension WHERE extname = 'vector')", []
    )
    if extension[0] is None:
        raise VectorIndexError(
            f"{address} has no pgvector there. Its administrator installs it with:  CREATE EXTENSION vector"
        )
    oid = at[0][0]
    if oid is None:
        raise IndexMissingError(
            f"{address} has no table {name} that this user may see. Fill one with:  "
            f"streamrag index build FOLDER --to DSN --table {name}"
        )
    found = await _rows(connection, _COLUMNS, [oid])
    types = {column: (schema, kind, category, modifier) for column, schema, kind, category, modifier, _ in found}
    expressions = {column: expression or "" for column, *_, expression in found}
    chosen = _chosen(address, name, columns, types)
    schema, kind, _, modifier = types[chosen["embedding"]]
    indexes = await _rows(connection, _INDEXES, [oid])
    ladder, metric = _ladder(indexes, chosen["embedding"], _version(extension[0]))
    words, is_column = _words(indexes, chosen, expressions, types)
    (comment,) = await _rows(connection, "SELECT obj_description(%s::oid, 'pg_class')", [oid])
    return Table(
        parts=parts,
        columns=chosen,
        vector_type=(schema, kind),
        dimension=modifier if modifier > 0 else None,
        metric=metric,
        ladder=ladder,
        words=words,
        words_is_column=is_column,
        made_with=read_record(comment[0]),
    )


async def _rows(connection: "Connection", query: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
    return await (await connection.execute(query.encode(), values)).fetchall()


_COLUMNS = """
    SELECT a.attname, n.nspname, t.typname, t.typcategory::text, a.atttypmod, pg_get_expr(d.adbin, d.adrelid)
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


def _chosen(
    address: Address, name: str, columns: Mapping[str, str | None], types: Mapping[str, tuple[str, str, str, int]]
) -> dict[str, str]:
    """The columns to read. What the caller did not name may be missing, unless a chunk needs it."""
    chosen: dict[str, str] = {}
    for field, default in DEFAULT_COLUMNS.items():
        column = columns.get(field, default)
        if column is None:
            continue
        if column in types:
            chosen[field] = column
        elif field in columns or field in NEEDED:
            raise VectorIndexError(
                f"{address}: table {name} has no column {short(column)} for a chunk's {field}: it has "
                f"{', '.join(list(types)[:20])}. Name it, as in columns={{{field!r}: ...}}"
            )
    for field, (wanted, kinds) in KINDS.items():
        if field not in chosen:
            continue
        _, kind, category, _ = types[chosen[field]]
        if kind not in kinds and category not in kinds:
            if field == "words" and field not in columns:
                del chosen[field]  # it is something else that happens to be called so
                continue
            raise VectorIndexError(
                f"{address}: column {short(chosen[field])} of table {name} is {kind}, and a chunk's "
                f"{field} must be {wanted}"
            )
    return chosen


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", text)[:2])


def _ladder(indexes: Sequence[tuple[Any, ...]], column: str, version: tuple[int, ...]) -> tuple[Ladder | None, str]:
    """The approximate index of the column, HNSW if there are several, and the metric: cosine if there is none."""
    is_iterative = version >= (0, 8)
    for method, operators, indexed, options, _ in indexes:
        metric = next((metric for metric in OPERATORS if f"_{metric}_ops" in operators), None)
        if indexed != column or metric is None:
            continue
        if method == "hnsw":
            return Ladder("hnsw.ef_search", 1_000, "strict_order" if is_iterative else ""), metric
        if method == "ivfflat":
            lists = next((int(each[6:]) for each in options or () if re.fullmatch(r"lists=\d{1,6}", each)), 100)
            return Ladder("ivfflat.probes", lists, "relaxed_order" if is_iterative else ""), metric
    return None, "cosine"


def _words(
    indexes: Sequence[tuple[Any, ...]],
    chosen: Mapping[str, str],
    expressions: Mapping[str, str],
    types: Mapping[str, tuple[str, str, str, int]],
) -> tuple[str | None, bool]:
    """The text search configuration of an index of words, and whether it is over the column of lexemes."""
    for method, _, indexed, _, expression in indexes:
        if method not in ("gin", "gist"):
            continue
        if indexed is not None and indexed == chosen.get("words"):
            found = _CONFIGURATION.search(expressions[indexed])
            return (found[1].replace("''", "'") if found else ""), True
        column = re.escape(chosen["text"])
        whole = re.fullmatch(rf"""{_CONFIGURATION.pattern}, \(?"?{column}"?\)?(?:::text)?\)""", expression or "")
        if whole:
            return whole[1].replace("''", "'"), False
    return None, "words" in chosen


def record_of(loaded: Loaded) -> str:
    """What the comment of a table says that streamrag fills."""
    record = {
        "format": RECORD_FORMAT,
        "embedder": loaded.name,
        "dimension": loaded.dimension,
        "probe": loaded.probe,
    }
    return json.dumps({"streamrag": record})


def read_record(comment: str | None) -> Loaded | None:
    """The embedder that a comment tells of; None if it is not one of ours. It is compared, and never loaded."""
    if not comment or len(comment) > MAX_COMMENT_CHARS:
        return None
    try:
        record = json.loads(comment)["streamrag"]
        dimension, probe, name = record["dimension"], record["probe"], record["embedder"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    if not is_whole(dimension) or not isinstance(probe, list) or not all(map(is_number, probe)):
        return None
    return Loaded(str(name)[:200], dimension, tuple(map(float, probe)))


def at_start(address: Address, error: Exception) -> StreamRagError:
    """What the driver raised while a table was looked at."""
    import psycopg

    if isinstance(error, StreamRagError):
        return error
    explained = address.explained(error)
    if isinstance(error, psycopg.ProgrammingError | psycopg.DataError):
        return VectorIndexError(str(explained))
    return explained
