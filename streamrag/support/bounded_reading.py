"""Read untrusted files within limits and as plain values.

Reading never imports, calls or downloads anything, and memory stays bounded whatever a file decompresses to.
"""

import errno
import io
import json
import math
import os
import re
import stat
import zlib
from collections.abc import Callable, Generator, Iterator
from dataclasses import fields
from functools import cache
from pathlib import Path
from typing import IO, Any, NoReturn, TypeVar

from streamrag.errors import require_modules

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 30  # decompressed bytes of a trace or a result
MAX_SMALL_FILE_BYTES = 16 << 20  # bytes of a file that a person wrote, or of metadata
MAX_LINE_BYTES = 16 << 20
MAX_JSON_BYTES = 512 << 20  # bytes of one JSON text, and of the memory that its characters take
MAX_VALUES = 5_000_000  # values in one JSON text; a value with a unique name takes 200 bytes of memory
MAX_DEPTH = 32
MAX_INTEGER = (1 << 63) - 1  # such as a time in nanoseconds; convertible to a float

COMPRESSED_OTHERWISE = {".7z", ".br", ".bz2", ".lz4", ".lzma", ".rar", ".xz", ".zip"}
"""Suffixes of compressed formats that we neither read nor write."""

READ_BYTES = 1 << 16
UNPACKED_BYTES = 1 << 20
ZSTD_READ_BYTES = 256  # a 128 KiB block can be compressed to 4 bytes, so this decompresses to 8 MiB at most

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_FOUR_BYTES = re.compile(rb"[\xf0-\xff]|\\u[dD][89a-fA-F]")  # in UTF-8 or JSON, a character of 4 bytes in memory
_CALLERS_PIPE = re.compile(r"/dev/(stdin|fd/\d+)|/proc/self/fd/\d+")  # a shell's `<(command)`: nobody else can name it


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> io.BufferedReader:
    """Open a regular file for reading; refuse pipes and devices, whose reading may block or never end.

    Pipes that the caller's own shell opened are allowed. Without `follow_links`, `path` itself must not be a link.

    :raises OSError: the file cannot be opened, or is not a regular file.
    """
    if _CALLERS_PIPE.fullmatch(os.fspath(path)):
        return open(path, "rb")
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # opening a pipe must not wait for its writer
    try:
        file = os.open(path, flags if follow_links else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow_links:
            raise OSError(errno.ELOOP, "it is a link", os.fspath(path)) from error
        raise
    mode = os.fstat(file).st_mode
    if not stat.S_ISREG(mode):
        os.close(file)
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))
    return os.fdopen(file, "rb")


class DamagedError(ValueError):
    """Compressed data is corrupt, not merely truncated."""


class DecompressedFile:
    """The decompressed content of a file, block by block; the suffix selects gzip, zstd or no compression.

    After iteration, `is_torn` says whether a compressed stream was truncated. Iteration raises:

    :raises OSError: the file cannot be read (see `open_regular`).
    :raises DamagedError: its compressed data is corrupt.
    :raises ValueError: it has more than `max_bytes`, or an unsupported compression.
    :raises MissingDependencyError: zstandard is not installed.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES, *, follow_links: bool = True) -> None:
        self.path = path
        self._follow_links = follow_links
        self._max_bytes = max_bytes
        self.is_torn = False

    def __iter__(self) -> Iterator[bytes]:
        """Yield the content in blocks. Raises ValueError beyond `max_bytes`, or for damaged data."""
        num_bytes = 0
        with open_regular(self.path, follow_links=self._follow_links) as file:
            for block in self._blocks(file):
                num_bytes += len(block)
                if num_bytes > self._max_bytes:
                    raise ValueError(f"it has more than {_size(self._max_bytes)}, the limit for such a file")
                yield block

    def _blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        """Return an iterator over the blocks, decompressed if .gz or .zst; raise ValueError for another compression."""
        match self.path.suffix.lower():
            case ".gz":  # not with the gzip module, which withholds the last data of a truncated member
                return self._decode(file, lambda: zlib.decompressobj(wbits=31), _inflate, zlib.error)
            case ".zst":
                zstandard = import_zstandard()
                new = zstandard.ZstdDecompressor
                return self._decode(file, lambda: new().decompressobj(), _unzstd, zstandard.ZstdError)
            case suffix if suffix in COMPRESSED_OTHERWISE:
                raise ValueError(f"{suffix} is not supported: decompress it, or use gzip (.gz) or zstd (.zst)")
            case _:
                return iter(lambda: file.read(READ_BYTES), b"")

    def _decode(
        self,
        file: IO[bytes],
        make_decoder: Callable[[], Any],
        unpack: Callable[[Any, bytes], Generator[bytes, None, bytes]],
        damaged: type[Exception],
    ) -> Iterator[bytes]:
        """Decompress gzip members or zstd frames, or raise DamagedError; set `is_torn` if the last is incomplete."""
        decoder = None
        while block := file.read(READ_BYTES):
            while block:
                decoder = decoder or make_decoder()
                try:
                    block = yield from unpack(decoder, block)
                except damaged as error:
                    raise DamagedError(error) from error
                decoder = None if decoder.eof else decoder
        self.is_torn = decoder is not None


def _inflate(decoder: Any, block: bytes) -> Generator[bytes, None, bytes]:
    """Yield `block` decompressed, in bounded pieces, and return the bytes after the end of the member."""
    while True:
        piece = decoder.decompress(block, UNPACKED_BYTES)
        yield piece
        block = decoder.unconsumed_tail
        if decoder.eof or not (block or len(piece) == UNPACKED_BYTES):
            return bytes(decoder.unused_data)


def _unzstd(decoder: Any, block: bytes) -> Generator[bytes, None, bytes]:
    """Decompress and return as `_inflate` does. zstandard has no output limit, so its input is fed in small pieces."""
    for start in range(0, len(block), ZSTD_READ_BYTES):
        piece = block[start : start + ZSTD_READ_BYTES]
        yield decoder.decompress(piece)
        if decoder.eof:
            return bytes(decoder.unused_data) + block[start + len(piece) :]
    return b""


def import_zstandard() -> Any:
    """Return the module `zstandard`. Raises MissingDependencyError if it is not installed."""
    require_modules("trace", "zstandard")
    import zstandard

    return zstandard


def split_lines(blocks: Iterator[bytes], max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield lines with newlines, which the last may lack; raise ValueError if one, or all in memory, are too long."""
    parts: list[bytes] = []
    num_bytes = total_bytes = 0
    for block in blocks:
        for part in io.BytesIO(block):
            parts.append(part)
            num_bytes += len(part)
            if part.endswith(b"\n"):
                line = b"".join(parts)
                total_bytes += memory_bytes(line)
                if total_bytes > MAX_FILE_BYTES:
                    raise ValueError(f"its text takes more than {_size(MAX_FILE_BYTES)} of memory")
                yield line
                parts, num_bytes = [], 0
        if num_bytes > max_line_bytes:
            raise ValueError(f"it has a line of more than {_size(max_line_bytes)}, the limit for a line")
    if num_bytes:
        yield b"".join(parts)


def memory_bytes(text: bytes | str) -> int:
    """Return an upper bound of the memory that `text` takes as a str: its widest character sets the width of all."""
    text = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if _FOUR_BYTES.search(text):
        return 4 * len(text)
    return len(text) * (1 if text.isascii() and b"\\u" not in text else 2)


def read_bytes(
    path: str | os.PathLike[str], max_bytes: int = MAX_SMALL_FILE_BYTES, *, follow_links: bool = True
) -> bytes:
    """Return a file's content, decompressed if .gz or .zst; raise OSError, or ValueError if damaged or too big."""
    unpacked = DecompressedFile(Path(path), max_bytes, follow_links=follow_links)
    content = b"".join(unpacked)
    if unpacked.is_torn:
        raise DamagedError("its compressed data ends too early")
    return content


def parse_json(text: bytes | str, max_values: int = MAX_VALUES) -> Any:
    """Parse JSON of bounded size, depth and digits, or raise ValueError; lone surrogates become U+FFFD."""
    if memory_bytes(text) > MAX_JSON_BYTES:
        raise ValueError(f"its text takes more than {_size(MAX_JSON_BYTES)} of memory")
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if sum(map(text.count, ",[{")) > max_values:
        raise ValueError(f"it holds more than {max_values:,} values")
    try:
        value = json.loads(text, parse_int=_parse_int, parse_float=_parse_float, parse_constant=_reject_constant)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _is_too_deep(value):
        raise ValueError("it is nested too deeply")
    return _replace_surrogates(value) if _SURROGATE.search(text) else value


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


def _parse_int(digits: str) -> int:
    if len(digits) > 20 or abs(int(digits)) > MAX_INTEGER:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _parse_float(digits: str) -> float:
    """Return the number; raise ValueError if it is too large for a float."""
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _reject_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _is_too_deep(value: Any) -> bool:
    """Whether lists and objects are nested more than `MAX_DEPTH` deep."""
    level = [value]
    for _ in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
    return bool(level)


def _replace_surrogates(value: Any) -> Any:
    """Return JSON values with U+FFFD for lone surrogates, in names too."""
    match value:
        case str():
            return without_lone_surrogates(value)
        case list():
            return [_replace_surrogates(each) for each in value]
        case dict():
            return {without_lone_surrogates(name): _replace_surrogates(each) for name, each in value.items()}
    return value


def without_lone_surrogates(text: str) -> str:
    """Return `text` with U+FFFD for lone surrogates, which cannot be encoded as UTF-8. Tokenizers do the same."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes} bytes"
