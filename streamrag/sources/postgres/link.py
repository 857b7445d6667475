"""Connections to a PostgreSQL server: a pool, read-only transactions, and errors that never show the password."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import psycopg
import psycopg_pool
from psycopg.conninfo import conninfo_to_dict, make_conninfo

from streamrag.errors import ConfigurationError, SourceError, StreamRagError, VectorIndexError
from streamrag.sources.postgres.arguments import StatementTimeoutError
from streamrag.support.messages import message_of
from streamrag.support.tasks import cancel_and_wait, is_cancelled

Connection: TypeAlias = psycopg.AsyncConnection[tuple[Any, ...]]
SECRETS = {"password", "sslpassword", "oauth_client_secret", "scram_client_key", "scram_server_key"}
"""Parts of a DSN that messages never show."""
MAX_WAITING = 1_000  # most searches that wait for a connection; further ones fail
GRACE_S = 5.0  # seconds beyond the statement timeout after which an unresponsive server counts as failed
MAX_MESSAGE_CHARS = 500
T = TypeVar("T")


class Address:
    """The address of a server. `str()` of it, for messages and logs, has no password.

    dsn: a connection string of libpq: `postgresql://user@host/database` or `host=... dbname=...`.

    :raises ConfigurationError: the dsn is invalid.
    """

    def __init__(self, dsn: str) -> None:
        try:
            parts = conninfo_to_dict(dsn)
        except psycopg.Error:  # its message quotes the dsn with the password
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
        self.conninfo = make_conninfo("", **{**parts, "client_encoding": "utf8"})

    def __str__(self) -> str:
        return self._text

    def __repr__(self) -> str:
        return f"<{self._text}>"

    def without_password(self, text: str) -> str:
        """Return a text of the server or the driver without secrets, shortened to 500 characters."""
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return " ".join(text.split())[:MAX_MESSAGE_CHARS]

    async def connect(self, *, autocommit: bool = False) -> Connection:
        """Open a connection outside the pool.

        :raises SourceError: the server cannot be reached, or refuses the connection.
        """
        try:
            return await psycopg.AsyncConnection.connect(self.conninfo, autocommit=autocommit, prepare_threshold=None)
        except (psycopg.Error, OSError) as error:
            raise self.explained(error) from None

    def explained(self, error: BaseException) -> SourceError:
        """Return a SourceError for a driver's error, without secrets and with any remedy; a SourceError unchanged.

        A statement that the server cancelled is a StatementTimeoutError.
        """
        message = self.without_password(message_of(error))
        match error:
            case SourceError():
                return error
            case psycopg_pool.TooManyRequests():
                return SourceError(f"{self}: {MAX_WAITING} searches wait for a connection: allow more num_connections")
            case psycopg_pool.PoolClosed():
                return SourceError(f"{self}: the source is closed")
            case psycopg_pool.PoolTimeout():
                remedy = "All of them are in use (then allow more num_connections), or the server is down"
                return SourceError(f"{self}: {message}. {remedy}")
            case psycopg.errors.QueryCanceled():
                return StatementTimeoutError(f"{self} stopped the search: {message}")
            case psycopg.errors.InsufficientPrivilege():
                return SourceError(f"{self}: {message}. Ask its owner:  GRANT SELECT ON TABLE ... TO ...")
            case TimeoutError():
                return SourceError(f"{self} does not answer")
            case UnicodeError() | psycopg.errors.CharacterNotInRepertoire() | psycopg.errors.UntranslatableCharacter():
                return SourceError(f"{self}: a text does not fit the database's encoding, not UTF-8: {message}")
        return SourceError(f"{self}: {type(error).__name__}: {message}")

    def explained_at_start(self, error: Exception) -> StreamRagError:
        """Translate an error of the driver while a table is inspected or filled."""
        explained = self.explained(error)
        is_refusal = isinstance(error, psycopg.ProgrammingError | psycopg.DataError)
        return VectorIndexError(str(explained)) if is_refusal else explained


async def _read_only(connection: Connection) -> None:
    await connection.set_read_only(True)


class Link:
    """A connection pool that runs each function in its own read-only transaction and task.

    Settings apply to their transaction only, so that a connection returns to the pool unchanged.
    """

    def __init__(self, address: Address, *, num_connections: int, pool_timeout_s: float) -> None:
        self._address = address
        self._num_connections = num_connections
        self._pool_timeout_s = pool_timeout_s
        self._pool: psycopg_pool.AsyncConnectionPool[Connection] | None = None
        self._tasks: set[asyncio.Task[Any]] = set()

    async def start(self) -> None:
        """Open the pool, which connects on demand and checks idle connections before use."""
        self._pool = psycopg_pool.AsyncConnectionPool(
            self._address.conninfo,
            # Unprepared statements are planned for their values, and work behind PgBouncer.
            kwargs={"prepare_threshold": None},
            min_size=0,
            max_size=self._num_connections,
            max_waiting=MAX_WAITING,
            timeout=self._pool_timeout_s,
            reconnect_timeout=self._pool_timeout_s,
            configure=_read_only,
            check=psycopg_pool.AsyncConnectionPool.check_connection,
            name="streamrag",
            open=False,
        )
        await self._pool.open()

    async def run(self, work: Callable[[Connection], Awaitable[T]], settings: dict[str, str], *, timeout_s: float) -> T:
        """Run `work` in a transaction with these server settings, and return its result.

        Cancelling the call cancels the statement in the server. Errors of `work` propagate, but those of the driver,
        the network or the encoding of texts become one of these:

        :raises StatementTimeoutError: a statement took longer than `timeout_s`.
        :raises SourceError: there was any other such error, or the pool is closed or was closed meanwhile.
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
            await cancel_and_wait([task])
            if not is_cancelled():
                raise SourceError(f"{self._address}: the source is closed") from None
            raise

    async def _run(
        self,
        pool: psycopg_pool.AsyncConnectionPool[Connection],
        work: Callable[[Connection], Awaitable[T]],
        settings: dict[str, str],
        timeout_s: float,
    ) -> T:
        """Return the result of `work` in one transaction with these settings. Raises as `run`, also if unanswered."""
        try:
            async with asyncio.timeout(self._pool_timeout_s + timeout_s + GRACE_S), pool.connection() as connection:
                names = ", ".join(["set_config(%s, %s, true)"] * len(settings))
                values = [text for setting in settings.items() for text in setting]
                await connection.execute(f"SELECT {names}".encode(), values)
                return await work(connection)
        except (psycopg.Error, OSError, UnicodeError, TimeoutError) as error:
            raise self._address.explained(error) from None

    async def aclose(self) -> None:
        """Cancel running transactions and disconnect. Does nothing when not started."""
        pool, self._pool = self._pool, None
        if pool:
            await cancel_and_wait([*self._tasks])
            await pool.close()
