"""The SQL statements that search a table, and the conversion of rows to chunks."""

from collections.abc import Iterable, Mapping, Sequence
from math import isfinite
from typing import Any, TypeAlias
from unicodedata import normalize

from psycopg import sql

from streamrag.core import Chunk, Skipped
from streamrag.core.retrieval import MAX_COUNT
from streamrag.core.text import readable
from streamrag.errors import ConfigurationError
from streamrag.sources.passage_reader import PassageReader
from streamrag.sources.postgres.arguments import storable
from streamrag.sources.postgres.link import Connection
from streamrag.sources.postgres.table import OPERATORS, PassageTable, identifier
from streamrag.support.messages import short_repr

MAX_TEXT_CHARS = 20_000
MAX_TITLE_CHARS = 500
MAX_URI_CHARS = 2_000
"""Limits of the fields, which the server applies: rows are untrusted."""
MIN_NORM, MAX_NORM = 1e-18, 1e19
"""Range of vector lengths whose squares float32 can represent."""
_SELECT = f"""
    SELECT left({{text}}::text, {MAX_TEXT_CHARS + 1}), left({{uri}}::text, {MAX_URI_CHARS + 1}),
        left({{title}}::text, {MAX_TITLE_CHARS}), {{passage}}, {{score}} AS score
    FROM {{rows}} WHERE {{where}} ORDER BY {{order}} LIMIT {{k}}"""
_TRUE = sql.SQL("true")

NUM_SAMPLED_ROWS = 10_000  # number of rows whose dimensions are counted
MAX_QUERY_CHARS = 10_000  # characters of a query whose words are searched
Row: TypeAlias = tuple[Any, ...]
"""Text, uri, title, passage, and distance or rank."""


class Search:
    """The statements that search one table with one filter.

    where: values by column; see `PgVectorSource`.

    :raises ConfigurationError: a key of `where` is not the name of a column.
    """

    def __init__(self, table: PassageTable, where: Mapping[str, Any], k: int) -> None:
        self._table, self._k = table, k
        self._from = identifier(*table.parts)
        self._columns = {field: identifier(column) for field, column in table.columns.items()}
        schema, kind = table.vector_type
        self._vector = sql.SQL("%s::{}").format(identifier(schema, kind))
        operator = sql.SQL("OPERATOR({}.{})").format(identifier(schema), sql.SQL(OPERATORS[table.metric]))
        self._distance = sql.SQL("{} {} {}").format(self._columns["embedding"], operator, self._vector)
        self._conditions = self._vector_conditions(schema)
        self._filter, self._values = _filter(where)

    def _vector_conditions(self, schema: str) -> list[sql.Composable]:
        """Return the SQL conditions under which a row's distance is defined; none where the column's type ensures that.

        pgvector fails on vectors of another dimension, and sums squares as float32, which very short and very long
        vectors overflow.
        """
        column = self._columns["embedding"]
        conditions: list[sql.Composable] = []
        if self._table.dimension is None:
            dimensions = identifier(schema, "vector_dims")
            conditions.append(sql.SQL("{0}({1}) = {0}({2})").format(dimensions, column, self._vector))
        if self._table.metric == "cosine" and self._table.vector_type[1] == "vector":
            norm, limits = identifier(schema, "vector_norm"), (sql.Literal(MIN_NORM), sql.Literal(MAX_NORM))
            conditions.append(sql.SQL("{}({}) BETWEEN {} AND {}").format(norm, column, *limits))
        return conditions

    async def nearest(self, connection: Connection, vector: str, *, is_exact: bool) -> list[Row]:
        """Return the rows nearest to the vector, with their distances; NULL, and last in exact search, if undefined."""
        score: sql.Composable = self._distance
        if self._conditions:  # as a CASE, because the server may reorder conditions of WHERE
            score = sql.SQL("CASE WHEN {} THEN {} END").format(sql.SQL(" AND ").join(self._conditions), self._distance)
        # Only an ORDER BY with the bare distance uses an index, which holds very short vectors in their right place.
        order = sql.SQL("score") if is_exact else self._distance
        num_before, num_behind = 1 + (self._table.dimension is None), 0 if is_exact else 1
        values = [*[vector] * num_before, *self._values, *[vector] * num_behind]
        return await self._fetch(connection, self._select(score, self._from, order), values)

    async def dimensions(self, connection: Connection) -> dict[int, int]:
        """Return how many of the first 10,000 matching rows have each dimension; {} if the column's type has one."""
        if self._table.dimension is not None:
            return {}
        column = self._columns["embedding"]
        statement = sql.SQL(
            "SELECT {function}({column}), count(*) "
            "FROM (SELECT {column} FROM {table} WHERE {where} LIMIT {most}) AS first GROUP BY 1 ORDER BY 2 DESC LIMIT 9"
        ).format(
            function=identifier(self._table.vector_type[0], "vector_dims"),
            column=column,
            table=self._from,
            where=self._where(sql.SQL("{} IS NOT NULL").format(column)),
            most=sql.Literal(NUM_SAMPLED_ROWS),
        )
        return dict(await self._fetch(connection, statement, self._values))

    async def words(self, connection: Connection, query: str, configuration: str) -> list[Row]:
        """Return the rows with any of the query's words, best first by PostgreSQL's rank.

        configuration: a text search configuration; "" for the server's default.
        """
        name: sql.Composable = sql.SQL("get_current_ts_config()")
        if configuration:
            name = sql.SQL("{}::regconfig").format(sql.Literal(configuration.replace("%", "%%")))
        lexemes: sql.Composable | None = self._columns["words"] if self._table.words_is_column else None
        lexemes = lexemes or sql.SQL("to_tsvector({}, {})").format(name, self._columns["text"])
        search = "(SELECT replace(plainto_tsquery({}, %s)::text, ' & ', ' | ')::tsquery AS query) search"
        statement = self._select(
            sql.SQL("ts_rank({}, search.query)").format(lexemes),
            sql.SQL("{}, {}").format(self._from, sql.SQL(search).format(name)),
            sql.SQL("score DESC"),
            condition=sql.SQL("{} @@ search.query").format(lexemes),
        )
        return await self._fetch(
            connection, statement, [storable(readable(normalize("NFKC", query[:MAX_QUERY_CHARS]))), *self._values]
        )

    async def estimate(self, connection: Connection) -> int:
        """Return the server's estimate of the number of matching rows. Fails if a name or a permission is wrong."""
        statement = sql.SQL("EXPLAIN (FORMAT JSON) SELECT {} FROM {} WHERE {}").format(
            sql.SQL(", ").join(self._columns.values()), self._from, self._where()
        )
        ((plan,),) = await self._fetch(connection, statement, self._values)
        return int(plan[0]["Plan"]["Plan Rows"])

    def _select(
        self, score: sql.Composable, rows: sql.Composable, order: sql.Composable, condition: sql.Composable = _TRUE
    ) -> sql.Composed:
        """Return the statement for the first `k` of `rows` in `order`, with the columns of a `Row`."""
        fields = {field: self._columns.get(field, sql.NULL) for field in ("text", "uri", "title", "passage")}
        parts = {"score": score, "rows": rows, "where": self._where(condition), "order": order}
        return sql.SQL(_SELECT).format(**fields, **parts, k=sql.Literal(self._k))

    def _where(self, condition: sql.Composable = _TRUE) -> sql.Composed:
        """Return the condition that text and uri are there, `condition` holds, and the caller's filter matches."""
        tests = [sql.SQL("{} IS NOT NULL").format(self._columns[field]) for field in ("text", "uri")]
        return sql.SQL(" AND ").join([*tests, condition, *self._filter])

    async def _fetch(self, connection: Connection, statement: sql.Composed, values: Sequence[Any]) -> list[Row]:
        return await (await connection.execute(statement, values)).fetchall()


class Rows:
    """A converter of one query's rows to chunks."""

    def __init__(self, name: str, metric: str) -> None:
        self._metric = metric
        self._reader = PassageReader(name)
        self.skip_blank = self._reader.skip_blank
        self._cut: dict[tuple[str, int], bool] = {}
        """Truncated passages, by uri and passage, and whether they have been reported."""

    def nearest(self, rows: Iterable[Row]) -> tuple[Chunk, ...]:
        """Return scored chunks of the rows of defined distance, best first, and of equal score by uri and passage."""
        valid = (row for row in rows if row[4] is not None and isfinite(row[4]))  # vectors of zeros have no direction
        chunks = [self._chunk(row, 1 - row[4] if self._metric == "cosine" else -row[4]) for row in valid]
        return tuple(sorted(chunks, key=lambda chunk: (-(chunk.score or 0.0), chunk.uri, chunk.passage)))

    def by_words(self, rows: Iterable[Row]) -> tuple[Chunk, ...]:
        """Return chunks in the order of the rows."""
        return tuple(self._chunk(row, row[4]) for row in rows)

    def _chunk(self, row: Row, score: float) -> Chunk:
        """Convert a row, shortened to the limits, without an invalid number; note a truncated text for `newly_cut`."""
        text, uri, title, passage, _ = row
        fields = {"text": text[:MAX_TEXT_CHARS], "uri": uri[:MAX_URI_CHARS], "title": title, "score": score}
        if passage is not None and 0 <= passage <= MAX_COUNT:
            fields["passage"] = passage
        chunk = self._reader.chunk(fields)
        if len(text) > MAX_TEXT_CHARS:
            self._cut.setdefault((chunk.uri, chunk.passage), False)
        return chunk

    def newly_cut(self) -> list[Skipped]:
        """Return a `Skipped` for each truncated passage, once."""
        new = sorted(place for place, is_reported in self._cut.items() if not is_reported)
        self._cut.update(dict.fromkeys(new, True))
        reason = f"has over {MAX_TEXT_CHARS:,} characters, and the rest was left out"
        return [Skipped(uri, f"passage {passage} {reason}") for uri, passage in new]


def _filter(where: Mapping[str, Any]) -> tuple[list[sql.Composed], list[Any]]:
    """Return conditions and values of a filter: None for NULL, a list for any of it; ConfigurationError if invalid."""
    tests, values = [], []
    for column, value in where.items():
        if not isinstance(column, str) or not column or "\0" in column:
            raise ConfigurationError(f"where has {short_repr(column)} in place of a column's name")
        if value is None:
            tests.append(sql.SQL("{} IS NULL").format(identifier(column)))
        elif not isinstance(value, list | tuple | set | frozenset):
            tests.append(sql.SQL("{} = %s").format(identifier(column)))
            values.append(value)
        else:
            or_null = " OR {0} IS NULL" if None in value else ""  # NULL is equal to nothing
            tests.append(sql.SQL(f"({{0}} = ANY(%s){or_null})").format(identifier(column)))
            values.append([each for each in value if each is not None])
    return tests, values
