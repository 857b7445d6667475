"""Bytes of a trace file: plain, gzip or zstd by suffix; a torn end is told from damage."""

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from streamrag.errors import MissingDependencyError, TraceError
from streamrag.support.bounded_reading import COMPRESSED_OTHERWISE, DamagedError, Unpacked, import_zstandard, lines_of
from streamrag.support.files import replacing

MAX_LINES = 2_000_000
"""Lines of a trace: in memory, each takes some hundreds of bytes beside its texts."""
REMEDY = "make several files of it"


class LineWriter:
    """Appends to a trace file. Blocking; not for two threads at once.

    Each one adds a gzip member or zstd frame of its own, which readers take for one stream.

    :raises MissingDependencyError: zstandard is not installed.
    :raises TraceError: the file's name promises another compression.
    :raises OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._suffix = path.suffix.lower()
        if self._suffix in COMPRESSED_OTHERWISE:
            raise TraceError(f"{path}: traces are written as .jsonl, .jsonl.gz or .jsonl.zst, not as {path.suffix}")
        self._zstandard = import_zstandard() if self._suffix == ".zst" else None
        self._compressed: Any = None
        self._file = path.open("ab")

    def write(self, line: bytes) -> None:
        """Write a line, newline included. It may stay in a buffer until `flush`."""
        if self._compressed is None:  # not sooner: what was opened and closed again must be as it was
            self._compressed = self._compress()
        self._compressed.write(line)

    def _compress(self) -> Any:
        if self._suffix == ".gz":
            return gzip.GzipFile("", "wb", fileobj=self._file, mtime=0)
        if self._zstandard:
            return self._zstandard.ZstdCompressor().stream_writer(self._file, closefd=False)
        return self._file

    def flush(self) -> None:
        """Hand all that was written to the operating system, decodable as it is."""
        if self._compressed is not None:
            self._compressed.flush()  # a sync flush in gzip, a block's end in zstd
        self._file.flush()

    def fileno(self) -> int:
        """The file's descriptor."""
        return self._file.fileno()

    def abandon(self) -> None:
        """Close the file as it is, without the end of the compressed stream."""
        self._file.close()

    def close(self) -> None:
        """Write what is left, and the end of the compressed stream."""
        try:
            if self._compressed is not None:
                self._compressed.close()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


class LineReader:
    """The whole lines of a trace file, without their newlines.

    Once they have been read, `is_torn` says whether something came after them that is no whole line, or a compressed
    stream ended too early: what is left by a program that was killed.

    :raises TraceError: when read: the file cannot be read, is damaged, or has more than a trace may have.
    :raises MissingDependencyError: when read: zstandard is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_torn = False

    def __iter__(self) -> Iterator[bytes]:
        unpacked = Unpacked(self._path)
        for line in _lines_of(unpacked):
            if line.endswith(b"\n"):
                yield line[:-1]
            else:
                self.is_torn = True
        self.is_torn |= unpacked.is_torn


def numbered_lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """The lines of a file that another program made, with their newlines, from number 1.

    :raises TraceError: when read: the file cannot be read, is damaged or cut off, or has more than a trace may have.
    :raises MissingDependencyError: when read: zstandard is not installed.
    """
    unpacked = Unpacked(path)
    yield from enumerate(_lines_of(unpacked), start=1)
    if unpacked.is_torn:
        raise TraceError(f"{path} is damaged: its compressed data ends too early")


def _lines_of(unpacked: Unpacked) -> Iterator[bytes]:
    path, num_lines = unpacked.path, 0
    try:
        for line in lines_of(iter(unpacked)):
            num_lines += line.endswith(b"\n")
            if num_lines > MAX_LINES:
                raise ValueError(f"it has more than {MAX_LINES:,} lines")
            yield line
    except OSError as error:
        raise TraceError(f"{path} cannot be read: {error.strerror or error}") from error
    except DamagedError as error:
        raise TraceError(
            f"{path} is damaged after line {num_lines}: its compressed data cannot be decoded ({error})"
        ) from error
    except MissingDependencyError:
        raise
    except ValueError as error:
        raise TraceError(f"{path}, after line {num_lines}: {error}; {REMEDY}") from error


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write these lines, newlines included, to `path`, which is the old file or the whole new one at any time.

    :raises OSError: it cannot be written.
    """
    with replacing(path) as unfinished, LineWriter(unfinished) as writer:
        for line in lines:
            writer.write(line)
