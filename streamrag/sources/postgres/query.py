"""The SQL that searches a table, and its rows as chunks."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, TypeAlias

from streamrag.core import Chunk, Skipped
from streamrag.errors import ConfigurationError
from streamrag.retrieving import MAX_COUNT
from streamrag.sources.passage_like import PassageReader
from streamrag.sources.postgres.names import identifier
from streamrag.sources.postgres.table import OPERATORS, Table
from streamrag.support.messages import short

if TYPE_CHECKING:
    from psycopg import sql

    from streamrag.sources.postgres.link import Connection

MAX_TEXT_CHARS = 20_000
MAX_TITLE_CHARS = 500
MAX_URI_CHARS = 2_000
"""More of a field is not sent by the server: rows are anybody's."""

MIN_NORM, MAX_NORM = 1e-18, 1e19
"""Lengths of vectors of which float32 can hold the square."""

NUM_LOOKED_AT = 10_000
"""Rows of which it is looked at whether their vectors have the embedder's dimension."""

MAX_QUERY_CHARS = 10_000
"""The beginning of a query, whose words are searched."""


def storable(text: str) -> str:
    """The text as PostgreSQL can hold it: without NUL, and without halves of a character."""
    return text.replace("\0", "").encode("utf-8", "replace").decode()


Row: TypeAlias = tuple[Any, ...]
"""Text, uri, title, passage, and a distance or rank."""


class Search:
    """The statements for one table, and one filter.

    where: values by column; see `PgVectorSource`.

    :raises ConfigurationError: it names no column.
    """

    def __init__(self, table: Table, where: Mapping[str, Any], k: int) -> None:
        from psycopg import sql

        self._table, self._k = table, k
        self._from = identifier(*table.parts)
        self._columns = {field: identifier(column) for field, column in table.columns.items()}
        schema, kind = table.vector_type
        self._vector = sql.SQL("%s::{}").format(identifier(schema, kind))
        operator = sql.SQL("OPERATOR({}.{})").format(identifier(schema), sql.SQL(OPERATORS[table.metric]))
        self._distance = sql.SQL("{} {} {}").format(self._columns["embedding"], operator, self._vector)
        self._are_like = self._conditions(identifier(schema, "vector_dims"), identifier(schema, "vector_norm"))
        self._filter, self._values = _filter(where)

    def _conditions(self, dimensions: "sql.Composable", norm: "sql.Composable") -> "list[sql.Composable]":
        """What must hold of a row's vector, so that its distance is one.

        pgvector fails on vectors of another dimension. It adds up squares as float32, which hold none of a very short
        or long vector: the cosine would be anything.
        """
        from psycopg import sql

        column = self._columns["embedding"]
        conditions: list[sql.Composable] = []
        if self._table.dimension is None:
            conditions.append(sql.SQL("{0}({1}) = {0}({2})").format(dimensions, column, self._vector))
        if self._table.metric == "cosine" and self._table.vector_type[1] == "vector":
            conditions.append(
                sql.SQL("{}({}) BETWEEN {} AND {}").format(norm, column, sql.Literal(MIN_NORM), sql.Literal(MAX_NORM))
            )
        return conditions

    async def nearest(self, connection: "Connection", vector: str, *, is_exact: bool) -> list[tuple[Any, ...]]:
        """The rows nearest to the vector, with distances: NULL for a row that has none. Exact search finds it last."""
        from psycopg import sql

        score = self._distance
        if self._are_like:  # as a CASE: of conditions of the statement, the server chooses the order
            like = sql.SQL(" AND ").join(self._are_like)
            score = sql.SQL("CASE WHEN {} THEN {} END").format(like, self._distance)
        # An index is used for the bare distance only. It has very short vectors where they belong.
        order = sql.SQL("score") if is_exact else self._distance
        num_before, num_behind = 1 + (self._table.dimension is None), 0 if is_exact else 1
        values = [*[vector] * num_before, *self._values, *[vector] * num_behind]
        return await self._fetch(connection, self._select(score, sql_from=self._from, order=order), values)

    async def dimensions(self, connection: "Connection") -> dict[int, int]:
        """How many of the first rows have vectors of which dimension, most first; none if the column has one."""
        from psycopg import sql

        if self._table.dimension is not None:
            return {}
        column, function = self._columns["embedding"], identifier(self._table.vector_type[0], "vector_dims")
        statement = sql.SQL(
            "SELECT {function}({column}), count(*) "
            "FROM (SELECT {column} FROM {table} WHERE {where} LIMIT {most}) AS first GROUP BY 1 ORDER BY 2 DESC LIMIT 9"
        ).format(
            function=function,
            column=column,
            table=self._from,
            where=self._where(sql.SQL("{} IS NOT NULL").format(column)),
            most=sql.Literal(NUM_LOOKED_AT),
        )
        return dict(await self._fetch(connection, statement, self._values))

    async def words(self, connection: "Connection", query: str, configuration: str) -> list[tuple[Any, ...]]:
        """The rows with most of the query's words, with PostgreSQL's rank. Any of them will do."""
        from psycopg import sql

        name = (
            sql.SQL("{}::regconfig").format(sql.Literal(configuration.replace("%", "%%")))
            if configuration
            else sql.SQL("get_current_ts_config()")
        )
        lexemes = self._columns["words"] if self._table.words_is_column else None
        lexemes_of = lexemes or sql.SQL("to_tsvector({}, {})").format(name, self._columns["text"])
        asked = sql.SQL("(SELECT replace(plainto_tsquery({}, %s)::text, ' & ', ' | ')::tsquery AS query) asked").format(
            name
        )
        statement = self._select(
            sql.SQL("ts_rank({}, asked.query)").format(lexemes_of),
            sql_from=sql.SQL("{}, {}").format(self._from, asked),
            also=sql.SQL("{} @@ asked.query").format(lexemes_of),
            order=sql.SQL("score DESC"),
        )
        return await self._fetch(connection, statement, [storable(query)[:MAX_QUERY_CHARS], *self._values])

    async def estimate(self, connection: "Connection") -> int:
        """The server's guess at the number of rows that fit the filter. Finds what is wrong with names and rights."""
        from psycopg import sql

        statement = sql.SQL("EXPLAIN (FORMAT JSON) SELECT {} FROM {} WHERE {}").format(
            sql.SQL(", ").join(self._columns.values()), self._from, self._where(None)
        )
        ((plan,),) = await self._fetch(connection, statement, self._values)
        return int(plan[0]["Plan"]["Plan Rows"])

    def _select(
        self,
        score: "sql.Composable",
        *,
        sql_from: "sql.Composable",
        order: "sql.Composable",
        also: "sql.Composable | None" = None,
    ) -> "sql.Composed":
        from psycopg import sql

        columns = self._columns
        fields = [
            sql.SQL("left({}::text, {})").format(columns["text"], sql.Literal(MAX_TEXT_CHARS + 1)),
            sql.SQL("left({}::text, {})").format(columns["uri"], sql.Literal(MAX_URI_CHARS + 1)),
            sql.SQL("left({}::text, {})").format(columns["title"], sql.Literal(MAX_TITLE_CHARS))
            if "title" in columns
            else sql.NULL,
            columns.get("passage", sql.NULL),
            sql.SQL("{} AS score").format(score),
        ]
        return sql.SQL("SELECT {} FROM {} WHERE {} ORDER BY {} LIMIT {}").format(
            sql.SQL(", ").join(fields),
            sql_from,
            self._where(also),
            order,
            sql.Literal(self._k),
        )

    def _where(self, also: "sql.Composable | None") -> "sql.Composed":
        from psycopg import sql

        tests = [sql.SQL("{} IS NOT NULL").format(self._columns[field]) for field in ("text", "uri")]
        return sql.SQL(" AND ").join([*tests, *([also] if also else []), *self._filter])

    async def _fetch(
        self, connection: "Connection", statement: "sql.Composed", values: Sequence[Any]
    ) -> list[tuple[Any, ...]]:
        return await (await connection.execute(statement, values)).fetchall()


class Rows:
    """Makes chunks of one query's rows."""

    def __init__(self, name: str, metric: str) -> None:
        self._metric = metric
        self._reader = PassageReader(name)
        self._cut: set[tuple[str, int]] = set()
        self._told: set[tuple[str, int]] = set()

    def nearest(self, rows: Iterable[tuple[Any, ...]]) -> tuple[Chunk, ...]:
        """Best first; equals by their place, so that their order does not change from stage to stage."""
        found = [row for row in rows if row[4] is not None and isfinite(row[4])]  # vectors of zeros have no direction
        chunks = [self._chunk(row, self._similarity(row[4])) for row in found]
        return tuple(sorted(chunks, key=lambda chunk: (-(chunk.score or 0.0), chunk.uri, chunk.passage)))

    def by_words(self, rows: Iterable[tuple[Any, ...]]) -> tuple[Chunk, ...]:
        """In their order."""
        return tuple(self._chunk(row, row[4]) for row in rows)

    def _similarity(self, distance: float) -> float:
        return 1 - distance if self._metric == "cosine" else -distance

    def _chunk(self, row: tuple[Any, ...], score: float) -> Chunk:
        text, uri, title, passage, _ = row
        fields = {"text": text[:MAX_TEXT_CHARS], "uri": uri[:MAX_URI_CHARS], "title": title, "score": score}
        if passage is not None and 0 <= passage <= MAX_COUNT:
            fields["passage"] = passage
        chunk = self._reader.chunk(fields)
        if len(text) > MAX_TEXT_CHARS:
            self._cut.add((chunk.uri, chunk.passage))
        return chunk

    def newly_cut(self) -> list[Skipped]:
        """A `Skipped` for each passage of which only the beginning was taken, once."""
        cut = self._cut - self._told
        self._told |= cut
        return [
            Skipped(uri, f"passage {passage} has over {MAX_TEXT_CHARS:,} characters, and the rest was left out")
            for uri, passage in sorted(cut)
        ]


def _filter(where: Mapping[str, Any]) -> "tuple[list[sql.Composed], list[Any]]":
    from psycopg import sql

    tests, values = [], []
    for column, value in where.items():
        if not isinstance(column, str) or not column or "\0" in column:
            raise ConfigurationError(f"PostgreSQL: where has {short(column)} in place of a column's name")
        if value is None:
            tests.append(sql.SQL("{} IS NULL").format(identifier(column)))
            continue
        if not isinstance(value, list | tuple | set | frozenset):
            tests.append(sql.SQL("{} = %s").format(identifier(column)))
            values.append(value)
            continue
        or_null = " OR {0} IS NULL" if None in value else ""  # which is equal to nothing, itself included
        tests.append(sql.SQL(f"({{0}} = ANY(%s){or_null})").format(identifier(column)))
        values.append([each for each in value if each is not None])
    return tests, values
