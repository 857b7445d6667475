"""A lock on a session's log, across processes."""

import fcntl
import os
from contextlib import suppress
from pathlib import Path

from streamrag.errors import SessionLogInUseError


class FileLock:
    """A lock on a separate file: closing any handle of the database itself would release this process's locks on it."""

    def __init__(self, path: Path, log_path: Path) -> None:
        self._path = path
        self._log_path = log_path
        self._file: int | None = None

    def take(self) -> None:
        """Take the lock without waiting, unless this object has it. A lock whose file was removed is taken anew.

        :raises SessionLogInUseError: another session has the lock, in this process or in another.
        """
        if self._file is not None and not is_same(os.fstat(self._file), self._path):
            os.close(self._file)  # the file was removed, so the lock is void
            self._file = None
        while self._file is None:
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
            file = os.open(self._path, flags, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if is_same(os.fstat(file), self._path):  # else the previous owner removed it before we locked it
                    self._file = file
            except BlockingIOError:
                message = "is the log of a session that is open, here or in another process: close that first"
                raise SessionLogInUseError(f"{self._log_path} {message}") from None
            finally:
                if self._file is None:
                    os.close(file)

    def release(self) -> None:
        """Release the lock, if this object has it, and remove its file, unless that is another one by now."""
        if self._file is not None:
            with suppress(OSError):
                if is_same(os.fstat(self._file), self._path):
                    self._path.unlink()
            os.close(self._file)
            self._file = None


def is_same(status: os.stat_result, path: Path) -> bool:
    """Whether `path` is the same file as the one with this status."""
    with suppress(OSError):
        return os.path.samestat(status, path.lstat())
    return False
