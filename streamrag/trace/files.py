"""Lines of trace files as bytes: plain, gzip or zstd by suffix; a torn end is told from damage."""

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


class LineWriter:
    """An open trace file that lines are appended to. Blocks; not for two threads at once.

    Each writer adds a gzip member or zstd frame of its own, which readers take for one stream.

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
        """Return the file's descriptor."""
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

    After they have been read, `is_torn` says whether the last line was not whole, or a compressed stream ended too
    early, as a program that was killed leaves a file.

    :raises TraceError: when read: the file cannot be read, is damaged, or has more than a trace may have.
    :raises MissingDependencyError: when read: zstandard is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_torn = False
        self.is_cut_off = False
        """Whether a compressed stream ended too early."""

    def __iter__(self) -> Iterator[bytes]:
        for line in self.lines():
            if line.endswith(b"\n"):
                yield line[:-1]
            else:
                self.is_torn = True
        self.is_torn |= self.is_cut_off

    def lines(self) -> Iterator[bytes]:
        """Yield all lines, with their newlines, also the last one if it is not whole."""
        path, num_lines = self._path, 0
        unpacked = Unpacked(path)
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
            raise TraceError(f"{path}, after line {num_lines}: {error}; make several files of it") from error
        self.is_cut_off = unpacked.is_torn


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write these lines, newlines included, to `path`, which is at any time the old file or the whole new one.

    :raises OSError: it cannot be written.
    """
    with replacing(path) as unfinished, LineWriter(unfinished) as writer:
        for line in lines:
            writer.write(line)
