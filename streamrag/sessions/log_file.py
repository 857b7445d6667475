"""The file that a session's text is kept in: lines as `log_lines` has them, written by one process at a time. Blocking.

At any time the file is whole, but for a last line that a killed writer did not finish. What went out of the window is
taken out by writing the file anew beside itself and renaming it.
"""

import fcntl
import glob
import os
import secrets
import stat
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from streamrag.errors import SessionLogError, SessionLogInUseError
from streamrag.sessions.log_lines import MAX_LINE_BYTES, Entry, Header, Logged, header_of, line_of, read
from streamrag.support.files import sync

SLACK_BYTES = 1 << 20
"""What a log may have grown by, beside what it had when it was last written anew, before it is again."""


class LogFile:
    """One log, open from `open` to `close`. For one thread at a time."""

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path))  # what a link names is written, and the link stays
        self._file: int | None = None
        self._num_bytes = self._num_written_anew = 0

    @property
    def has_grown(self) -> bool:
        """Whether it is time to write it anew."""
        return self._num_bytes > 2 * self._num_written_anew + SLACK_BYTES

    def open(self) -> Logged | None:
        """Take it for this process, and read it; None if it is new. Nothing in it is changed.

        :raises SessionLogError: it cannot be opened, another process has it, or it is damaged.
        """
        try:
            self._file = self._locked()
            for unfinished in self.path.parent.glob(f".writing-????????-{glob.escape(self.path.name)}"):
                unfinished.unlink(missing_ok=True)  # of a process that was killed: whoever writes has the lock
            with os.fdopen(os.dup(self._file), "rb") as file:
                return read(self.path, iter(lambda: file.read(1 << 16), b""))
        except OSError as error:
            self.close()
            raise SessionLogError(f"{self.path} cannot be opened: {error.strerror or error}") from error
        except BaseException:
            self.close()
            raise

    def append(self, entries: Iterable[Entry]) -> None:
        """Write these behind the others, and wait until they are on the disk.

        :raises OSError, SessionLogError: nothing was written.
        """
        assert self._file is not None
        if not _is_same(self._file, self.path):
            raise SessionLogError("the file was removed or replaced by somebody else")
        try:
            num_bytes = _write(self._file, map(line_of, entries))
            os.fsync(self._file)
        except BaseException:
            os.ftruncate(self._file, self._num_bytes)
            raise
        self._num_bytes += num_bytes

    def write_anew(self, header: Header, entries: Iterable[Entry]) -> None:
        """Have the file hold just these, once they are on the disk; until then it is what it was.

        :raises OSError, SessionLogError: it is what it was.
        """
        if self._file is None or (self.path.exists() and not _is_same(self._file, self.path)):
            raise SessionLogError("the file was replaced by somebody else")
        unfinished = self.path.with_name(f".writing-{secrets.token_hex(4)}-{self.path.name}")
        file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before anybody can find it by the log's name
            num_bytes = _write(file, map(line_of, (header, *entries)))
            os.fsync(file)
            unfinished.replace(self.path)
        except BaseException:
            os.close(file)
            unfinished.unlink(missing_ok=True)
            raise
        os.close(self._file)
        self._file = file
        self._num_bytes = self._num_written_anew = num_bytes
        with suppress(OSError):  # a file system that cannot do that for folders does it by itself
            sync(self.path.parent)

    def touch(self, at_s: float) -> None:
        """The session was last used then, on the wall clock: so says the file's time."""
        with suppress(OSError):
            os.utime(self.path, (at_s, at_s))

    def remove(self) -> None:
        """Take the file away, also one that is not open, and close it.

        :raises SessionLogInUseError: another process has it; it stays.
        """
        try:
            self._file = self._locked() if self._file is None else self._file
            if _is_same(self._file, self.path):
                self.path.unlink()
        except SessionLogInUseError:
            raise
        except (OSError, SessionLogError):
            return  # it is none, or cannot be taken away
        finally:
            self.close()

    def close(self) -> None:
        """Let others have it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _locked(self) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
        while True:
            file = os.open(self.path, flags, 0o600)
            try:
                if not stat.S_ISREG(os.fstat(file).st_mode):
                    raise SessionLogError(f"{self.path} cannot be a session's log: it is no regular file")
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is_same(file, self.path):
                    return file
            except BlockingIOError:
                os.close(file)
                raise SessionLogInUseError(
                    f"{self.path} is the log of a session that is open, here or in another process: close that first"
                ) from None
            except BaseException:
                os.close(file)
                raise
            os.close(file)  # it was written anew meanwhile


def read_header(path: Path) -> Header:
    """How the session of this log is made again.

    :raises SessionLogError: it cannot be read, or is none.
    """
    try:
        with path.open("rb") as file:
            return header_of(path, file.readline(MAX_LINE_BYTES))
    except OSError as error:
        raise SessionLogError(f"{path} cannot be read: {error.strerror or error}") from error


def _write(file: int, lines: Iterable[bytes]) -> int:
    num_bytes = 0
    lines = iter(lines)
    while some := list(islice(lines, 256)):
        left = memoryview(b"".join(some))
        num_bytes += len(left)
        while left:
            left = left[os.write(file, left) :]
    return num_bytes


def _is_same(file: int, path: Path) -> bool:
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file), path.stat())
    return False
