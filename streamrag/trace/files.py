"""Reading and writing the lines of trace files: plain, gzip or zstd by suffix, with torn ends told from damage."""

import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Self

from streamrag.errors import MissingDependencyError, TraceError
from streamrag.support.bounded_reading import (
    COMPRESSED_OTHERWISE,
    DamagedError,
    DecompressedFile,
    import_zstandard,
    split_lines,
)
from streamrag.support.files import atomic_replace


class LineWriter:
    """A trace file opened for appending. Its methods block, and are not thread-safe.

    Each writer adds a gzip member or zstd frame; readers see one stream.

    :raises MissingDependencyError: zstandard is not installed.
    :raises TraceError: the file's suffix is of another compression.
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
        """Write a line, including its newline, to the buffer."""
        if self._compressed is None:  # lazy, so that opening and closing a file does not change it
            self._compressed = self._compress()
        self._compressed.write(line)

    def _compress(self) -> Any:
        """Return the stream to write to: a new gzip member, a new zstd frame, or the file itself."""
        if self._suffix == ".gz":
            return gzip.GzipFile("", "wb", fileobj=self._file, mtime=0)
        if self._zstandard:
            return self._zstandard.ZstdCompressor().stream_writer(self._file, closefd=False)
        return self._file

    def flush(self) -> None:
        """Flush all lines to the operating system, so that they can be decoded from the file."""
        if self._compressed is not None:
            self._compressed.flush()  # a sync flush in gzip, the end of a block in zstd
        self._file.flush()

    def fileno(self) -> int:
        return self._file.fileno()

    def abandon(self) -> None:
        """Close the file without finishing the compressed stream, which stays torn."""
        self._file.close()

    def close(self) -> None:
        """Finish the compressed stream, and close the file, even if the stream cannot be finished."""
        try:
            if self._compressed is not None:
                self._compressed.close()
        finally:
            self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()


class LineReader:
    """An iterable of a trace file's complete lines, without newlines.

    After the iteration, `is_torn` is whether the last line was incomplete or the compressed stream was truncated, as
    after a killed program.

    :raises TraceError: during iteration: the file cannot be read, is damaged, or exceeds a limit.
    :raises MissingDependencyError: during iteration: zstandard is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_torn = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield the complete lines without newlines; set `is_torn` if the end of the file is incomplete."""
        for line in self.lines():
            if line.endswith(b"\n"):
                yield line[:-1]
            else:
                self.is_torn = True

    def lines(self) -> Iterator[bytes]:
        """Yield all lines with newlines, the last one perhaps incomplete; set `is_torn` for a truncated stream only.

        Raises TraceError if the file cannot be read, is damaged, or exceeds a limit, and MissingDependencyError.
        """
        path, num_lines = self._path, 0
        unpacked = DecompressedFile(path)
        try:
            for line in split_lines(unpacked):
                num_lines += line.endswith(b"\n")
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
            raise TraceError(f"{path}, after line {num_lines}: {error}; split it into several files") from error
        self.is_torn |= unpacked.is_torn


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Replace the file atomically by these lines, with newlines; raise OSError if it cannot be written."""
    with atomic_replace(path) as unfinished, LineWriter(unfinished) as writer:
        for line in lines:
            writer.write(line)
