"""Connections to a PostgreSQL server: a pool, transactions that only read, and errors that do not tell the password."""

import asyncio
from collections.abc import Awaitable, Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

from streamrag.errors import ConfigurationError, MissingDependencyError, SourceError
from streamrag.support.messages import message_of
from streamrag.support.tasks import cancel_regardless, is_cancelled

if TYPE_CHECKING:
    import psycopg
    import psycopg_pool

    Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]

INSTALL = "pip install 'streamrag[postgres]'"

SECRETS = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
"""What of a DSN is in no message."""

MAX_WAITING = 1_000
"""Searches that wait for a connection; further ones are refused."""

GRACE_S = 5.0
"""A server stops a statement whose time is up. One that does not even do that is given up after this much longer."""

MAX_MESSAGE_CHARS = 500

T = TypeVar("T")


class StatementTimeoutError(SourceError):
    """The server stopped a statement: its time was up, or somebody there stopped it."""


def require_psycopg() -> None:
    """:raises MissingDependencyError: the driver or its pool is not installed. Imports nothing."""
    for module in ("psycopg", "psycopg_pool"):
        if not find_spec(module):
            raise MissingDependencyError(module.replace("_", "-"), INSTALL)
    try:
        import psycopg  # noqa: F401 - which needs libpq too
    except ImportError as error:
        raise MissingDependencyError("psycopg with libpq", INSTALL) from error


class EncodingError(SourceError):
    """A text cannot be translated between UTF-8 and the database's encoding."""


class Address:
    """Where a server is. Its text, which messages and logs may have, has no password.

    dsn: what libpq takes: `postgresql://user@host/database` or `host=... dbname=...`.

    :raises ConfigurationError: it is no such text.
    """

    def __init__(self, dsn: str) -> None:
        require_psycopg()
        import psycopg
        from psycopg.conninfo import conninfo_to_dict, make_conninfo

        if not isinstance(dsn, str):
            raise ConfigurationError("PostgreSQL: dsn must be a str, as in postgresql://user@host/database")
        try:
            parts = conninfo_to_dict(dsn)
        except psycopg.Error:  # whose message has the text, and so the password
            raise ConfigurationError(
                "PostgreSQL: the dsn cannot be read, and is not shown since it may hold a password. It must be "
                "postgresql://user@host/database or host=... dbname=...; in the former, write special characters of a "
                "password as %40 and so on"
            ) from None
        host, port, database = (str(parts.get(name) or "") for name in ("host", "port", "dbname"))
        if "://" in dsn and ("@" in host + database or (port and not port.replace(",", "").isdecimal())):
            raise ConfigurationError(
                "PostgreSQL: the dsn cannot be read: an @ in its host or database, or a port that is no number. "
                "Write special characters of its password as %40 (@), %2F (/), %3A (:)"
            )
        self._secrets = [str(value) for name, value in parts.items() if value and name in SECRETS]
        where = host or "its default address"
        self._text = f"PostgreSQL at {where}{f':{port}' if port else ''}{f', database {database}' if database else ''}"
        parts.setdefault("connect_timeout", "10")
        parts.setdefault("fallback_application_name", "streamrag")
        self._conninfo = make_conninfo("", **{**parts, "client_encoding": "utf8"})

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def without_password(self, text: str) -> str:
        """What a server or the driver says, for a message."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return " ".join(text.split())[:MAX_MESSAGE_CHARS]

    async def connect(self, *, autocommit: bool = False) -> "Connection":
        """A connection of its own.

        :raises SourceError: there is none to be had.
        """
        import psycopg

        try:
            return await psycopg.AsyncConnection.connect(self._conninfo, autocommit=autocommit, prepare_threshold=None)
        except (psycopg.Error, OSError) as error:
            raise self.explained(error) from None

    def new_pool(self, num_connections: int, timeout_s: float) -> "psycopg_pool.AsyncConnectionPool[Connection]":
        """A pool, not yet open. It connects when a connection is asked for, and checks one that was idle."""
        import psycopg_pool

        return psycopg_pool.AsyncConnectionPool(
            self._conninfo,
            # Statements that are not prepared are planned for their values, and work behind PgBouncer.
            kwargs={"prepare_threshold": None},
            min_size=0,
            max_size=num_connections,
            max_waiting=MAX_WAITING,
            timeout=timeout_s,
            reconnect_timeout=timeout_s,
            configure=_read_only,
            check=psycopg_pool.AsyncConnectionPool.check_connection,
            name="streamrag",
            open=False,
        )

    def explained(self, error: BaseException) -> SourceError:
        """What the driver raised, as an error of ours."""
        import psycopg
        import psycopg_pool

        said = self.without_password(message_of(error))
        match error:
            case SourceError():
                return error
            case psycopg_pool.TooManyRequests():
                return SourceError(f"{self}: {MAX_WAITING} searches wait for a connection: allow more num_connections")
            case psycopg_pool.PoolClosed():
                return SourceError(f"{self}: the source is closed")
            case psycopg_pool.PoolTimeout():
                return SourceError(
                    f"{self}: {said}. All of them are in use (then allow more num_connections), or the server is down"
                )
            case psycopg.errors.QueryCanceled():
                return StatementTimeoutError(f"{self} stopped the search: {said}")
            case psycopg.errors.InsufficientPrivilege():
                return SourceError(f"{self}: {said}. Ask its owner:  GRANT SELECT ON TABLE ... TO ...")
            case TimeoutError():
                return SourceError(f"{self} does not answer")
            case UnicodeError() | psycopg.errors.CharacterNotInRepertoire() | psycopg.errors.UntranslatableCharacter():
                return EncodingError(f"{self}: a text does not fit the database's encoding, which is not UTF-8: {said}")
        return SourceError(f"{self}: {type(error).__name__}: {said}")


async def _read_only(connection: "Connection") -> None:
    await connection.set_read_only(True)


class Link:
    """Runs what reads a database, each in a transaction and a task of its own.

    Settings hold for their transaction only, so that a connection comes back to the pool as it was.
    """

    def __init__(self, address: Address, *, num_connections: int, pool_timeout_s: float) -> None:
        self._address = address
        self._num_connections = num_connections
        self._pool_timeout_s = pool_timeout_s
        self._pool: psycopg_pool.AsyncConnectionPool[Connection] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Open the pool; it connects later."""
        self._pool = self._address.new_pool(self._num_connections, self._pool_timeout_s)
        await self._pool.open()

    async def run(
        self, work: "Callable[[Connection], Awaitable[T]]", settings: dict[str, str], *, timeout_s: float
    ) -> T:
        """What `work` returns; `settings` are the server's, for it only. Cancelling this cancels it in the server.

        :raises StatementTimeoutError: it takes longer than `timeout_s`, waiting for a connection not counted.
        :raises SourceError: it fails otherwise, or this is closed.
        """
        if self._pool is None:
            raise SourceError(f"{self._address}: the source is closed")
        settings = {**settings, "statement_timeout": f"{max(1, round(timeout_s * 1000))}ms"}
        task = asyncio.create_task(self._run(self._pool, work, settings, timeout_s), name="streamrag postgres")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            await cancel_regardless([task])
            if not is_cancelled():
                raise SourceError(f"{self._address}: the source is closed") from None
            raise

    async def _run(
        self,
        pool: "psycopg_pool.AsyncConnectionPool[Connection]",
        work: "Callable[[Connection], Awaitable[T]]",
        settings: dict[str, str],
        timeout_s: float,
    ) -> T:
        import psycopg

        try:
            async with asyncio.timeout(self._pool_timeout_s + timeout_s + GRACE_S), pool.connection() as connection:
                names = ", ".join(["set_config(%s, %s, true)"] * len(settings))
                values = [text for setting in settings.items() for text in setting]
                await connection.execute(f"SELECT {names}".encode(), values)
                return await work(connection)
        except (psycopg.Error, OSError, UnicodeError, TimeoutError) as error:
            raise self._address.explained(error) from None

    async def aclose(self) -> None:
        """Stop what is under way, and disconnect. Does nothing when not started."""
        pool, self._pool = self._pool, None
        if pool:
            await cancel_regardless([*self._tasks])
            await pool.close()
