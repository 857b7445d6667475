"""The file that a session's text is kept in: JSON lines, written by one process at a time. All of it blocks.

    {"format": "streamrag-session", "version": 1, "system": "...", "window_tokens": 32000, "num_appended": 16, ...}
    {"number": 17, "text": "...", "uri": "..."}
    {"dropped": 17}

At any time the file is whole, but for a last line that a killed writer did not finish. What went out of the window is
taken out by writing the file anew beside itself and renaming it.
"""

import fcntl
import glob
import json
import os
import secrets
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from streamrag.core import Chunk
from streamrag.errors import SessionLogError
from streamrag.files import sync
from streamrag.reading import as_dataclass, lines_of, parse_json
from streamrag.retrieving import MAX_COUNT
from streamrag.sessions.buffer import Numbered

FORMAT = "streamrag-session"
VERSION = 1

MAX_CHARACTERS = 1_000_000
"""Of one chunk's texts: a line of it is one that is read again."""
MAX_LINE_BYTES = 16_000_000
"""A character that is no ASCII takes up to twelve."""

SLACK_BYTES = 1 << 20
"""What a log may have grown by, beside what it had when it was last written anew, before it is again."""

Count = Annotated[int, Field(ge=0, lt=1 << 53)]


@dataclass(frozen=True, slots=True)
class Header:
    """How a session is made again, and what it had counted when its log was last written anew."""

    system: str
    window_tokens: Annotated[int, Field(ge=1)]
    slide_share: Annotated[float, Field(gt=0, lt=1)]
    owner: str = ""
    num_appended: Count = 0
    num_dropped: Count = 0
    num_slid: Count = 0
    format: Literal["streamrag-session"] = "streamrag-session"
    version: Literal[1] = 1


@dataclass(frozen=True, slots=True)
class Logged:
    """What a log holds."""

    header: Header
    chunks: list[Numbered]
    num_appended: int
    num_dropped: int
    is_torn: bool
    """Whether its last line was not finished; that is left out."""


@dataclass(frozen=True, slots=True)
class _Appended:
    number: Annotated[int, Field(ge=1, lt=1 << 53)]
    text: str
    uri: str = ""
    title: str = ""
    passage: Annotated[int, Field(ge=0, le=MAX_COUNT)] = 0
    score: float | None = None


@dataclass(frozen=True, slots=True)
class _Dropped:
    dropped: Annotated[int, Field(ge=1, lt=1 << 53)]


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

    def append(self, entries: Iterable[Numbered | int]) -> None:
        """Write chunks, or the numbers of those that were dropped, and wait until they are on the disk.

        :raises OSError, SessionLogError: nothing was written.
        """
        assert self._file is not None
        if not _is_same(self._file, self.path):
            raise SessionLogError(f"{self.path} was removed or replaced by somebody else")
        try:
            num_bytes = _write(self._file, map(_line_of, entries))
            os.fsync(self._file)
        except BaseException:
            os.ftruncate(self._file, self._num_bytes)
            raise
        self._num_bytes += num_bytes

    def write_anew(self, header: Header, chunks: Iterable[Numbered]) -> None:
        """Have the file hold just these, once they are on the disk; until then it is what it was.

        :raises OSError, SessionLogError: it is what it was.
        """
        if self._file is None or (self.path.exists() and not _is_same(self._file, self.path)):
            raise SessionLogError(f"{self.path} was replaced by somebody else")
        unfinished = self.path.with_name(f".writing-{secrets.token_hex(4)}-{self.path.name}")
        file = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # before anybody can find it by the log's name
            num_bytes = _write(file, (_json(asdict(header)), *map(_line_of, chunks)))
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
        """Take the file away, also one that is not open, unless another process has it; and close it."""
        with suppress(OSError, SessionLogError):
            self._file = self._locked() if self._file is None else self._file
            if _is_same(self._file, self.path):
                self.path.unlink()
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
                raise SessionLogError(
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
            return _header(path, file.readline(MAX_LINE_BYTES))
    except OSError as error:
        raise SessionLogError(f"{path} cannot be read: {error.strerror or error}") from error


def read(path: Path, blocks: Iterator[bytes]) -> Logged | None:
    """What the blocks of this file hold; None if that is nothing.

    :raises SessionLogError: they are damaged, or no log.
    """
    chunks: dict[int, Chunk] = {}
    header: Header | None = None
    is_torn = False
    num_lines = newest = num_dropped = 0
    try:
        for line in lines_of(blocks, MAX_LINE_BYTES):
            num_lines += 1
            if header is None:
                header = _header(path, line)
                num_dropped = header.num_dropped
                continue
            if not line.endswith(b"\n"):
                is_torn = True
                break
            entry = _entry(line)
            if isinstance(entry, _Dropped):
                num_dropped += 1
                chunks.pop(entry.dropped, None)
                continue
            if entry.number <= newest:
                raise ValueError(f"chunk {entry.number} stands behind chunk {newest}")
            newest = entry.number
            chunks[entry.number] = Chunk(entry.text, entry.uri, entry.title, entry.passage, entry.score)
    except SessionLogError:
        raise
    except ValueError as error:
        raise SessionLogError(
            f"{path}, line {num_lines}, is damaged: {error}. Nothing was changed. Move the file away to begin anew, or "
            "take that line out"
        ) from error
    if header is None:
        return None
    numbered = [Numbered(number, chunk) for number, chunk in chunks.items()]
    return Logged(header, numbered, max(header.num_appended, newest), num_dropped, is_torn)


def _header(path: Path, line: bytes) -> Header:
    try:
        values = parse_json(line)
        if not line.endswith(b"\n") or not isinstance(values, dict) or values.get("format") != FORMAT:
            raise ValueError("its first line does not say so")
        if isinstance(version := values.get("version"), int) and version > VERSION:
            raise SessionLogError(f"{path} was written by a newer streamrag: update this one")
        return as_dataclass(Header, values)
    except SessionLogError:
        raise
    except ValueError as error:
        raise SessionLogError(f"{path} is no log of a session: {error}. Nothing was changed") from error


def _entry(line: bytes) -> _Appended | _Dropped:
    values = parse_json(line)
    if not isinstance(values, dict):
        raise ValueError("it is no JSON object")
    return as_dataclass(_Dropped, values) if "dropped" in values else as_dataclass(_Appended, values)


def _line_of(entry: Numbered | int) -> bytes:
    if isinstance(entry, int):
        return _json({"dropped": entry})
    values = {name: getattr(entry.chunk, name) for name in ("uri", "title", "passage", "score")}
    given = {
        name: value for name, value in values.items() if value not in ("", None) and (name, value) != ("passage", 0)
    }
    return _json({"number": entry.number, "text": entry.chunk.text, **given})


def _json(values: dict[str, Any]) -> bytes:
    return json.dumps(values, separators=(",", ":")).encode() + b"\n"


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
