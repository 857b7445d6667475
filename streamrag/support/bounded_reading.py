"""Read files and JSON within limits, and as plain values: reading never imports, calls or downloads anything."""

import codecs
import errno
import io
import itertools
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import fields
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, TypeVar

from streamrag.errors import MissingDependencyError

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 30  # decompressed bytes of a trace or a result
MAX_SMALL_FILE_BYTES = 16 << 20  # bytes of a file that a person wrote, or of metadata
MAX_LINE_BYTES = 16 << 20
MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF16_LE: "utf-16le", codecs.BOM_UTF16_BE: "utf-16be"}
MAX_DEPTH = 32  # levels of lists and objects in JSON
MAX_INTEGER = (1 << 63) - 1  # such as a time in nanoseconds; convertible to a float

COMPRESSED_OTHERWISE = {".7z", ".br", ".bz2", ".lz4", ".lzma", ".rar", ".xz", ".zip"}
"""Suffixes of compressed formats that we neither read nor write."""

READ_BYTES = 1 << 12  # of zstd, they can decompress to 128 MiB, and of gzip to 4 MiB
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def open_regular(path: str | os.PathLike[str]) -> io.BufferedReader:
    """Open a regular file for reading; refuse links, and pipes and devices, whose reading may block or never end.

    :raises OSError: the file cannot be opened, or is not a regular file.
    """
    try:  # opening a pipe must not wait for its writer
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, "it is a link", os.fspath(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return os.fdopen(file, "rb")


class DamagedError(ValueError):
    """Compressed data is corrupt, not merely truncated."""


class DecompressedFile:
    """The decompressed content of a file, block by block; the suffix selects gzip, zstd or no compression.

    After iteration, `is_torn` says whether a compressed stream was truncated. Iteration raises:

    :raises OSError: the file cannot be read.
    :raises DamagedError: its compressed data is corrupt.
    :raises ValueError: it has more than `max_bytes`, or an unsupported compression.
    :raises MissingDependencyError: zstandard is not installed.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.path = path
        self._max_bytes = max_bytes
        self.is_torn = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield the content in blocks. Raises ValueError beyond `max_bytes`, or for damaged data."""
        num_bytes = 0
        with open(self.path, "rb") as file:
            for block in self._blocks(file):
                num_bytes += len(block)
                if num_bytes > self._max_bytes:
                    raise ValueError(f"it has more than {self._max_bytes >> 20} MiB, the limit for such a file")
                yield block

    def _blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        """Return an iterator over the blocks, decompressed if .gz or .zst; raise ValueError for another compression."""
        match self.path.suffix.lower():
            case ".gz":  # not with the gzip module, which cannot tell a truncated file from its end
                return self._decode(file, lambda: zlib.decompressobj(wbits=31), zlib.error)
            case ".zst":
                zstandard = import_zstandard()
                return self._decode(file, lambda: zstandard.ZstdDecompressor().decompressobj(), zstandard.ZstdError)
            case suffix if suffix in COMPRESSED_OTHERWISE:
                raise ValueError(f"{suffix} is not supported: decompress it, or use gzip (.gz) or zstd (.zst)")
            case _:
                return iter(lambda: file.read(READ_BYTES), b"")

    def _decode(self, file: IO[bytes], make_decoder: Callable[[], Any], damaged: type[Exception]) -> Iterator[bytes]:
        """Decompress gzip members or zstd frames, or raise DamagedError; set `is_torn` if the last is incomplete."""
        decoder = None
        while block := file.read(READ_BYTES):
            while block:
                decoder = decoder or make_decoder()
                try:
                    content = decoder.decompress(block)
                except damaged as error:
                    raise DamagedError(error) from error
                block, decoder = decoder.unused_data, None if decoder.eof else decoder
                yield content
        self.is_torn = decoder is not None


def import_zstandard() -> Any:
    """Return the module `zstandard`. Raises MissingDependencyError if it is not installed."""
    try:
        import zstandard
    except ImportError as error:
        raise MissingDependencyError("zstandard", "pip install zstandard") from error
    return zstandard


class MarkedText:
    """A converter of text to UTF-8 without byte order mark, from UTF-16 if the mark says so, block by block."""

    def __init__(self) -> None:
        self._beginning: bytes | None = b""
        self._decoder: codecs.IncrementalDecoder | None = None

    def convert(self, block: bytes, *, is_last: bool = False) -> bytes:
        """Return the next block, converted; raise ValueError for invalid UTF-16."""
        if self._beginning is not None:
            block = self._beginning + block
            if not is_last and any(mark != block and mark.startswith(block) for mark in MARKS):
                self._beginning = block
                return b""
            self._beginning = None
            if block.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
                self._decoder = codecs.getincrementaldecoder("utf-16")()
            block = block.removeprefix(codecs.BOM_UTF8)
        return self._decoder.decode(block, is_last).encode() if self._decoder else block


def split_lines(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """Yield lines in UTF-8 without byte order mark; the last may lack its newline.

    Raises ValueError for a line of more than `MAX_LINE_BYTES`, or for invalid UTF-16 behind its mark.
    """
    line, text = bytearray(), MarkedText()
    for block in itertools.chain(map(text.convert, blocks), (text.convert(b"", is_last=True) for _ in range(1))):
        for part in io.BytesIO(block):
            line += part
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(f"it has a line of more than {MAX_LINE_BYTES >> 20} MiB, the limit for a line")
            if line.endswith(b"\n"):
                yield bytes(line)
                line.clear()
    if line:
        yield bytes(line)


def read_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_SMALL_FILE_BYTES) -> bytes:
    """Return a file's content, decompressed if .gz or .zst; raise OSError, or ValueError if damaged or too big."""
    unpacked = DecompressedFile(Path(path), max_bytes)
    content = b"".join(unpacked)
    if unpacked.is_torn:
        raise DamagedError("its compressed data ends too early")
    return content


def parse_json(text: bytes | str, *, is_strict: bool = True) -> Any:
    """Parse JSON of bounded depth and digits, or raise ValueError; lone surrogates become U+FFFD. Unless strict,
    numbers that are too large, or not finite, become None."""
    if isinstance(text, bytes):
        text = MarkedText().convert(text, is_last=True).decode()
    try:
        number = partial(_number, is_strict=is_strict)
        value = json.loads(text, parse_int=partial(number, is_int=True), parse_float=number, parse_constant=number)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH or _SURROGATE.search(text):
        return _cleaned(value)
    return value


def as_dataclass(kind: type[T], values: Any) -> T:
    """Return a `kind` with these fields, checked by its annotations; raise ValueError for a wrong or unknown one."""
    from pydantic import ValidationError

    unknown = values.keys() - {each.name for each in fields(kind)} if isinstance(values, dict) else ()  # type: ignore[arg-type]
    if unknown:
        raise ValueError(f"it has {sorted(unknown)[0][:40]!r}, which is not known")
    try:
        instance: T = _adapter(kind).validate_python(values)  # type: ignore[arg-type]
        return instance
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")  # raised by a validator of ours
        where = ".".join(map(str, first["loc"]))
        raise ValueError(str(cause) if cause else f"{where}: {first['msg'].lower()}") from error


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _number(digits: str, *, is_int: bool = False, is_strict: bool) -> float | None:
    """Return the number. If it has more than 64 bits, or is no finite float, return None or, if strict, raise
    ValueError."""
    is_long = is_int and (len(digits) > 20 or abs(int(digits)) > MAX_INTEGER)
    value = math.inf if is_long else int(digits) if is_int else float(digits)
    if math.isfinite(value):
        return value
    if is_strict:
        raise ValueError(f"a number has {len(digits)} digits" if is_int else f"{digits[:40]} is not a finite number")
    return None


def _cleaned(value: Any, num_levels: int = MAX_DEPTH) -> Any:
    """Return JSON values with U+FFFD for lone surrogates, in names too; raise ValueError if nested too deeply."""
    if isinstance(value, str):
        return without_lone_surrogates(value)
    if not isinstance(value, list | dict):
        return value
    if not num_levels:
        raise ValueError("it is nested too deeply")
    if isinstance(value, list):
        return [_cleaned(each, num_levels - 1) for each in value]
    return {without_lone_surrogates(name): _cleaned(each, num_levels - 1) for name, each in value.items()}


def without_lone_surrogates(text: str) -> str:
    """Return `text` with U+FFFD for lone surrogates, which cannot be encoded as UTF-8. Tokenizers do the same."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
