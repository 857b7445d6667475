"""Bytes of a trace file: plain, gzip or zstd by suffix; a torn end is told from damage."""

import gzip
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from streamrag.errors import MissingDependencyError, TraceError
from streamrag.files import replacing

__all__ = ["LineReader", "LineWriter", "replace_file"]

READ_BYTES = 1 << 20
INSTALL = "pip install 'streamrag[trace]'"


class LineWriter:
    """Appends to a trace file. Blocking; not for two threads at once.

    Each one adds a gzip member or zstd frame of its own, which readers take for one stream.

    :raises MissingDependencyError: zstandard is not installed.
    :raises OSError: the file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self._suffix = path.suffix
        self._zstandard = _import_zstandard() if path.suffix == ".zst" else None
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
        """Of the file."""
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

    :raises TraceError: when read: the file cannot be read, or its compressed data is damaged.
    :raises MissingDependencyError: when read: zstandard is not installed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self.is_torn = False

    def __iter__(self) -> Iterator[bytes]:
        rest = b""
        num_lines = 0
        try:
            with self._path.open("rb") as file:
                for block in self._blocks(file):
                    *lines, rest = (rest + block).split(b"\n")
                    num_lines += len(lines)
                    yield from lines
        except OSError as error:
            raise TraceError(f"{self._path} cannot be read: {error.strerror or error}") from error
        except _DamagedError as error:
            raise TraceError(
                f"{self._path} is damaged after line {num_lines}: its compressed data cannot be decoded ({error})"
            ) from error
        self.is_torn |= bool(rest)

    def _blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        match self._path.suffix:
            case ".gz":  # by hand: the gzip module keeps back what it has of a member that is cut off
                return self._decode(file, lambda: zlib.decompressobj(wbits=31), zlib.error)
            case ".zst":
                zstandard = _import_zstandard()
                return self._decode(file, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError)
            case _:
                return iter(lambda: file.read(READ_BYTES), b"")

    def _decode(self, file: IO[bytes], make_decoder: Callable[[], Any], damaged: type[Exception]) -> Iterator[bytes]:
        """Members or frames, one after the other."""
        decoder = None
        while block := file.read(READ_BYTES):
            while block:
                decoder = decoder or make_decoder()
                try:
                    yield decoder.decompress(block)
                except damaged as error:
                    raise _DamagedError(error) from error
                block = decoder.unused_data if decoder.eof else b""
                decoder = None if decoder.eof else decoder
        self.is_torn = decoder is not None


class _DamagedError(Exception):
    """Compressed data that is wrong, as opposed to cut off."""


def _import_zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError("zstandard", INSTALL) from None
    return zstandard


def replace_file(path: Path, lines: Iterable[bytes]) -> None:
    """Write these lines, newlines included, to `path`, which is the old file or the whole new one at any time.

    :raises OSError: it cannot be written.
    """
    with replacing(path) as unfinished, LineWriter(unfinished) as writer:
        for line in lines:
            writer.write(line)
