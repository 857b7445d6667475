"""The SQLite database that holds a session's text, written by one process at a time. Functions here block.

It is in WAL mode with synchronous=FULL, so that commits survive a killed process and a power failure. While it is open,
there are files with `-wal` and `-shm` beside it, and one with `-lock`, by which a session owns it.
"""

import glob
import os
import secrets
import sqlite3
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

from streamrag.errors import SessionLogError, SessionLogInUseError
from streamrag.sessions.log.contents import (
    SCHEMA,
    LogContents,
    SessionHeader,
    read_contents,
    read_header_rows,
    write_contents,
)
from streamrag.sessions.log.lock import FileLock, is_same
from streamrag.support.files import sync

APPLICATION_ID = 0x73726C67
FORMAT_VERSION = 1
MAX_FILE_BYTES = 256 << 20
"""Most bytes of a log, for writing and reading. Its texts take up to four times as much in memory."""
MAX_VALUE_BYTES = 16_000_000
"""Most bytes of one value: a chunk has at most a million characters."""
MAX_WAL_BYTES = 1 << 20
"""Size from which the WAL is copied into the database and truncated. Until then it may contain deleted text."""
BUSY_S = 1.0
"""Longest wait for another program that uses the database."""
PAGE_BYTES = 4096

CREATION = (
    "journal_mode=MEMORY",
    f"page_size={PAGE_BYTES}",
    "auto_vacuum=INCREMENTAL",
    f"application_id={APPLICATION_ID}",
    f"user_version={FORMAT_VERSION}",
)
CONNECTION = (
    "trusted_schema=OFF",
    "cell_size_check=ON",
    "secure_delete=ON",
    "synchronous=FULL",
    "wal_autocheckpoint=0",
    "mmap_size=0",
    "temp_store=MEMORY",
)
COMPACTION = ("incremental_vacuum", "wal_checkpoint(TRUNCATE)")
SIDECARS = ("-wal", "-shm", "-journal")


class LogFile:
    """A log that this process owns from `open` to `close`. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))  # write to the target of a link, and keep the link
        self._lock = FileLock(_beside(self.path, "-lock"), self.path)
        self._connection: sqlite3.Connection | None = None
        self._statuses: dict[Path, os.stat_result] = {}
        """Status of the database and the files beside it, to notice that they were replaced."""
        self._contents: LogContents | None = None

    def open(self) -> LogContents | None:
        """Lock the log, and return its contents. If the file is missing or empty, create it empty and return None. Also
        removes the unfinished files of killed processes. After an error, the log is closed.

        :raises SessionLogError: another session has the log, or the log is damaged or unreadable. It is not changed.
        """
        try:
            with _translated(self.path):
                self._lock.take()
                _remove_unfinished(self.path)
                if _is_free(self.path):
                    os.close(os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))
                    return None
                self._statuses = {self.path: self.path.stat()}
                self._connection = self._connect()
                self._contents = read_contents(self._connection)
        except BaseException:
            self._disconnect()  # without compaction, which would change a damaged database
            self._lock.release()
            raise
        return self._contents

    def write(self, contents: LogContents) -> None:
        """Replace the contents of the log, and wait until they are on disk. If no database is open, create it; else
        write only the differences, and copy a large WAL into the database.

        :raises OSError, SessionLogError: writing failed, or the log was removed or replaced by another program.
        """
        try:
            self._lock.take()
            if self._connection is None:
                self._create(contents)
            elif not self._is_ours():
                self._disconnect()
                raise SessionLogError("the file was removed or replaced by somebody else")
            else:
                write_contents(self._connection, contents, self._contents)
                self._contents = contents
                wal = _beside(self.path, "-wal")
                if wal.exists() and wal.stat().st_size > MAX_WAL_BYTES:
                    _execute(self._connection, COMPACTION)
        except sqlite3.Error as error:
            is_full = getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
            full = f"No space left on the disk, or the log has reached its limit of {MAX_FILE_BYTES >> 20} MiB"
            raise SessionLogError(full if is_full else str(error)) from error

    def touch(self, at_s: float) -> None:
        """Set the file's time to when the session was last used, on the wall clock."""
        with suppress(OSError):
            os.utime(self.path, (at_s, at_s))

    def remove(self) -> None:
        """Delete the log, which need not be open, and release the lock. A file that was replaced, is not regular, or
        cannot be removed is left without an error.

        :raises SessionLogInUseError: another session uses the log, which is not deleted.
        """
        try:
            self._lock.take()
            if stat.S_ISREG(self.path.lstat().st_mode) and (self._connection is None or self._is_ours()):
                self.path.unlink()
                _remove_sidecars(self.path)
        except SessionLogInUseError:
            raise
        except OSError:
            return  # it does not exist, or cannot be removed
        finally:
            self.close()

    def close(self) -> None:
        """Compact and close the database, if it is open, and release the lock. Errors of SQLite are ignored."""
        if self._connection is not None and self._is_ours():
            with suppress(sqlite3.Error):
                _execute(self._connection, COMPACTION)
        self._disconnect()
        self._lock.release()

    def _create(self, contents: LogContents) -> None:
        """Create the database under another name, rename it when it is complete, and connect to it. Raise
        SessionLogError if the log's path has a file that is neither empty nor ours."""
        if not _is_free(self.path) and not self._is_ours():
            raise SessionLogError("the file was replaced by somebody else")
        unfinished = self.path.with_name(f".writing-{secrets.token_hex(4)}-{self.path.name}")
        os.close(os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600))
        try:
            with closing(sqlite3.connect(unfinished, isolation_level=None)) as connection:
                _execute(connection, CREATION)
                for statement in SCHEMA:
                    connection.execute(statement)
                write_contents(connection, contents, None)
                _execute(connection, ("journal_mode=WAL",))
            sync(unfinished)
            _remove_sidecars(self.path)  # those of a removed database must not be applied to this one
            unfinished.replace(self.path)
        finally:
            _remove_unfinished(self.path)
        with suppress(OSError):  # some file systems cannot sync folders, and need not
            sync(self.path.parent)
        self._contents, self._statuses = contents, {self.path: self.path.stat()}
        self._connection = self._connect()

    def _connect(self) -> sqlite3.Connection:
        """Return a connection, and record the status of the files beside the database. Raises as the module's
        `_connect`, which checks that the database is the log of a session."""
        connection = _connect(self.path)
        beside = (_beside(self.path, suffix) for suffix in SIDECARS)
        self._statuses |= {path: path.lstat() for path in beside if path.exists()}
        return connection

    def _is_ours(self) -> bool:
        return self.path in self._statuses and is_same(self._statuses[self.path], self.path)

    def _disconnect(self) -> None:
        """Close the connection, if there is one. If the database was removed or replaced, first delete the files beside
        it that `_connect` recorded and that are still the same files, because SQLite would leave them."""
        if self._connection is None:
            return
        if not self._is_ours():  # if the database was removed or replaced, SQLite leaves the files beside it
            for path, status in self._statuses.items():
                if is_same(status, path):
                    path.unlink()
        self._connection.close()
        self._connection, self._statuses = None, {}


def read_header(path: Path) -> SessionHeader:
    """Return the header of a log, which another process may have open; leave the file's times as they were.

    :raises SessionLogError: the file cannot be read, or is not a log.
    """
    with _translated(path):
        status = path.stat()
        try:
            with closing(_connect(path)) as connection:
                return read_header_rows(connection)
        finally:  # SQLite may have recovered the WAL of a killed process, which does not count as using the session
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


def _connect(path: Path) -> sqlite3.Connection:
    """Return a connection, for any thread, to the database of a log, with our settings. Closes it after an error.

    :raises SessionLogError: the database is not that of a log, is too large, or is of a newer version.
    :raises OSError, sqlite3.Error: the file cannot be opened.
    """
    _check_files(path)
    connection = sqlite3.connect(path, timeout=BUSY_S, isolation_level=None, check_same_thread=False)
    try:
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        _execute(connection, CONNECTION)
        application_id, version, mode = (
            connection.execute(f"PRAGMA {name}").fetchone()[0]
            for name in ("application_id", "user_version", "journal_mode")
        )
        if application_id != APPLICATION_ID or mode != "wal":
            raise SessionLogError(f"{path} is no log of a session: it is another program's database")
        if version > FORMAT_VERSION:
            raise SessionLogError(f"{path} was written by a newer streamrag: update this one")
        schema = {sql for (sql,) in connection.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if schema != set(SCHEMA):
            raise SessionLogError(f"{path} is no log of a session: it has other tables. Nothing was changed")
        _execute(connection, (f"max_page_count={MAX_FILE_BYTES // PAGE_BYTES}",))
    except BaseException:
        connection.close()
        raise
    return connection


def _check_files(path: Path) -> None:
    """Raise SessionLogError if the database or a file beside it is not regular, if there is a journal, or above twice
    `MAX_FILE_BYTES`: SQLite would follow links, wait for pipes, and read without end."""
    num_bytes = path.stat().st_size
    if not stat.S_ISREG(path.stat().st_mode):
        raise SessionLogError(f"{path} cannot be a session's log: it is no regular file")
    for suffix in SIDECARS:
        with suppress(FileNotFoundError):
            status = _beside(path, suffix).lstat()
            num_bytes += status.st_size
            if suffix == "-journal" or not stat.S_ISREG(status.st_mode):
                raise SessionLogError(f"{path}{suffix} is not of a session's log: move it away. Nothing was changed")
    if num_bytes > 2 * MAX_FILE_BYTES:
        raise SessionLogError(f"{path} has more than {2 * MAX_FILE_BYTES >> 20} MiB, the limit for reading a log")


@contextmanager
def _translated(path: Path) -> Iterator[None]:
    """Translate OSError, sqlite3.Error and ValueError in the block into a SessionLogError that says what is wrong."""
    try:
        yield
    except SessionLogError:
        raise
    except OSError as error:
        raise SessionLogError(f"{path} cannot be read: {error.strerror or error}") from error
    except (sqlite3.Error, ValueError) as error:
        code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
        if code == sqlite3.SQLITE_NOTADB:
            message = f"{path} is no log of a session. Nothing was changed"
        elif isinstance(error, sqlite3.OperationalError) and code != sqlite3.SQLITE_CORRUPT:
            message = f"{path} cannot be read: {error}"
        else:
            message = f"{path} is damaged: {error}. Nothing was changed. Move the file away to start a new log"
        raise SessionLogError(message) from error


def _execute(connection: sqlite3.Connection, pragmas: tuple[str, ...]) -> None:
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}").fetchall()


def _is_free(path: Path) -> bool:
    """Whether there is no file at `path`, or an empty regular one."""
    with suppress(FileNotFoundError):
        status = path.stat()
        return stat.S_ISREG(status.st_mode) and not status.st_size
    return True


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _remove_sidecars(path: Path) -> None:
    for suffix in SIDECARS:
        _beside(path, suffix).unlink(missing_ok=True)


def _remove_unfinished(path: Path) -> None:
    """Remove the unfinished databases of killed processes. The caller has the lock."""
    for unfinished in path.parent.glob(f".writing-????????-{glob.escape(path.name)}"):
        unfinished.unlink(missing_ok=True)
        _remove_sidecars(unfinished)
