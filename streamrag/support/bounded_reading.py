"""Read files that somebody else may have made: within limits, and as plain values.

No file makes us import, call or download anything, and memory is bounded, whatever a file unpacks to.
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

from streamrag.errors import MissingDependencyError

T = TypeVar("T")

MAX_FILE_BYTES = 1 << 30
"""Bytes of a trace or a result, unpacked."""
MAX_SMALL_FILE_BYTES = 16 << 20
"""Bytes of what a person writes, or of what only says how something was made."""
MAX_LINE_BYTES = 16 << 20
MAX_JSON_BYTES = 512 << 20
"""Bytes of one JSON text, and of the memory that its characters take."""
MAX_VALUES = 5_000_000
"""Values in one JSON text; one with a name of its own takes 200 bytes of memory."""
MAX_DEPTH = 32
MAX_DIGITS = 18
"""Digits of a whole number: it is less than 2 ** 63, and a float holds its size."""

COMPRESSED_OTHERWISE = {".7z", ".br", ".bz2", ".lz4", ".lzma", ".rar", ".xz", ".zip"}
"""Suffixes of files in formats that are neither read nor written here."""

READ_BYTES = 1 << 16
UNPACKED_BYTES = 1 << 20
ZSTD_READ_BYTES = 256
"""A block of 128 KiB can take 4 bytes, so this unpacks to 8 MiB at most."""

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_FOUR_BYTES = re.compile(rb"[\xf0-\xff]|\\u[dD][89a-fA-F]")
"""The beginning of a character that takes four in memory, in UTF-8 or JSON."""


_OF_THE_CALLER = re.compile(r"/dev/(stdin|fd/\d+)|/proc/self/fd/\d+")
"""Paths that a shell makes of `<(command)`: a pipe that no file of others can be called."""


def open_regular(path: str | os.PathLike[str], *, follow_links: bool = True) -> io.BufferedReader:
    """Open a file for reading: what hangs or never ends, as pipes and devices do, is refused.

    Only what the caller's own shell has opened may be a pipe. Without `follow_links`, the file's own name is no link.

    :raises OSError: it cannot be opened, or is something else.
    """
    if _OF_THE_CALLER.fullmatch(os.fspath(path)):
        return open(path, "rb")
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC  # which does not wait for a pipe's other end
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
        raise OSError(errno.EINVAL, "it is no regular file", os.fspath(path))
    return os.fdopen(file, "rb")


class DamagedError(ValueError):
    """Compressed data that is wrong, as opposed to cut off."""


class Unpacked:
    """The content of a file, gzip or zstd by its suffix, block by block.

    Once it has been read, `is_torn` says whether a compressed stream ended too early.

    :raises OSError: when read: the file cannot be read, as `open_regular` says.
    :raises DamagedError: when read: its compressed data is wrong.
    :raises ValueError: when read: it has more than `max_bytes`, or is compressed in another way.
    :raises MissingDependencyError: when read: zstandard is not installed.
    """

    def __init__(self, path: Path, max_bytes: int = MAX_FILE_BYTES, *, follow_links: bool = True) -> None:
        self.path = path
        self._follow_links = follow_links
        self._max_bytes = max_bytes
        self.is_torn = False

    def __iter__(self) -> Iterator[bytes]:
        num_bytes = 0
        with open_regular(self.path, follow_links=self._follow_links) as file:
            for block in self._blocks(file):
                num_bytes += len(block)
                if num_bytes > self._max_bytes:
                    raise ValueError(f"it has more than {_size(self._max_bytes)}, which is the most that is read of it")
                yield block

    def _blocks(self, file: IO[bytes]) -> Iterator[bytes]:
        match self.path.suffix.lower():
            case ".gz":  # by hand: the gzip module keeps back what it has of a member that is cut off
                return self._decode(file, lambda: zlib.decompressobj(wbits=31), _inflate, zlib.error)
            case ".zst":
                zstandard = import_zstandard()
                new = zstandard.ZstdDecompressor
                return self._decode(file, lambda: new().decompressobj(), _unzstd, zstandard.ZstdError)
            case suffix if suffix in COMPRESSED_OTHERWISE:
                raise ValueError(f"{suffix} is not read: unpack it, or pack it with gzip (.gz) or zstd (.zst)")
            case _:
                return iter(lambda: file.read(READ_BYTES), b"")

    def _decode(
        self,
        file: IO[bytes],
        make_decoder: Callable[[], Any],
        unpack: Callable[[Any, bytes], Generator[bytes, None, bytes]],
        damaged: type[Exception],
    ) -> Iterator[bytes]:
        """Members or frames, one after the other."""
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
    """Yields what `block` unpacks to, in bounded pieces; returns what comes after the end of the member."""
    while True:
        piece = decoder.decompress(block, UNPACKED_BYTES)
        yield piece
        block = decoder.unconsumed_tail
        if decoder.eof or not (block or len(piece) == UNPACKED_BYTES):
            return bytes(decoder.unused_data)


def _unzstd(decoder: Any, block: bytes) -> Generator[bytes, None, bytes]:
    """Unpack as `_inflate` does. The decoder cannot be told how much to give, only be given little."""
    for start in range(0, len(block), ZSTD_READ_BYTES):
        piece = block[start : start + ZSTD_READ_BYTES]
        yield decoder.decompress(piece)
        if decoder.eof:
            return bytes(decoder.unused_data) + block[start + len(piece) :]
    return b""


def import_zstandard() -> Any:
    """Return the module `zstandard`.

    :raises MissingDependencyError: it is not installed.
    """
    try:
        import zstandard
    except ImportError:
        raise MissingDependencyError("zstandard", "pip install 'streamrag[trace]'") from None
    return zstandard


def lines_of(blocks: Iterator[bytes], max_line_bytes: int = MAX_LINE_BYTES) -> Iterator[bytes]:
    """Yield the lines in these blocks, with their newlines, which the last may not have.

    :raises ValueError: a line has more than `max_line_bytes`, or the texts of all of them more than `MAX_FILE_BYTES`.
    """
    begun: list[bytes] = []
    num_bytes = all_bytes = 0
    for block in blocks:
        for line in io.BytesIO(block):
            begun.append(line)
            num_bytes += len(line)
            if line.endswith(b"\n"):
                whole = b"".join(begun)
                all_bytes += memory_bytes(whole)
                if all_bytes > MAX_FILE_BYTES:
                    raise ValueError(f"its texts take more than {_size(MAX_FILE_BYTES)} of memory")
                yield whole
                begun, num_bytes = [], 0
        if num_bytes > max_line_bytes:
            raise ValueError(f"it has a line of more than {_size(max_line_bytes)}, the most that is read")
    if num_bytes:
        yield b"".join(begun)


def memory_bytes(text: bytes | str) -> int:
    """Return the most bytes that these characters take in memory: a rare one makes all of its string as wide."""
    text = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    if _FOUR_BYTES.search(text):
        return 4 * len(text)
    return len(text) * (1 if text.isascii() and b"\\u" not in text else 2)


def read_bytes(
    path: str | os.PathLike[str], max_bytes: int = MAX_SMALL_FILE_BYTES, *, follow_links: bool = True
) -> bytes:
    """Return the whole content of a file, unpacked if its name ends in .gz or .zst.

    :raises OSError: the file cannot be read.
    :raises ValueError: it is larger than that, or its compressed data is damaged or cut off.
    """
    unpacked = Unpacked(Path(path), max_bytes, follow_links=follow_links)
    content = b"".join(unpacked)
    if unpacked.is_torn:
        raise DamagedError("its compressed data ends too early")
    return content


def parse_json(text: bytes | str, max_values: int = MAX_VALUES) -> Any:
    """Return the value of a JSON text: finite numbers of 18 digits at most, no deep nests, U+FFFD for lone surrogates.

    :raises ValueError: it is something else.
    """
    if memory_bytes(text) > MAX_JSON_BYTES:
        raise ValueError(f"its texts take more than {_size(MAX_JSON_BYTES)} of memory")
    if isinstance(text, bytes):
        text = text.decode("utf-8")
    if sum(map(text.count, ",[{")) > max_values:
        raise ValueError(f"it holds more than {max_values:,} values")
    try:
        value = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_refuse)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(value) > MAX_DEPTH:
        raise ValueError("it is nested too deeply")
    return _mended(value) if _SURROGATE.search(text) else value


def as_dataclass(kind: type[T], values: Any) -> T:
    """Return a `kind` of these plain values, each of the type that its field says; what it does not know is an error.

    :raises ValueError: they are something else; the message names the field.
    """
    from pydantic import ValidationError

    unknown = values.keys() - {each.name for each in fields(kind)} if isinstance(values, dict) else ()  # type: ignore[arg-type]
    if unknown:
        raise ValueError(f"it has {sorted(unknown)[0][:40]!r}, which is not known")
    try:
        made: T = _adapter(kind).validate_python(values)  # type: ignore[arg-type]
        return made
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        cause = first.get("ctx", {}).get("error")  # of a check of our own
        where = ".".join(map(str, first["loc"]))
        raise ValueError(str(cause) if cause else f"{where}: {first['msg'].lower()}") from error


@cache
def _adapter(kind: Any) -> Any:
    from pydantic import TypeAdapter

    return TypeAdapter(kind)


def _whole(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number has {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise ValueError(f"the number {digits[:40]} is too large")
    return value


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def _depth(value: Any) -> int:
    """At most `MAX_DEPTH` + 1: no deeper is looked."""
    level = [value]
    for depth in range(MAX_DEPTH + 1):
        level = [
            inner
            for outer in level
            if isinstance(outer, dict | list)
            for inner in (outer.values() if isinstance(outer, dict) else outer)
        ]
        if not level:
            return depth
    return MAX_DEPTH + 1


def _mended(value: Any) -> Any:
    match value:
        case str():
            return without_lone_surrogates(value)
        case list():
            return [_mended(each) for each in value]
        case dict():
            return {without_lone_surrogates(name): _mended(each) for name, each in value.items()}
    return value


def without_lone_surrogates(text: str) -> str:
    """The same text, with U+FFFD for halves of surrogate pairs, which have no UTF-8. Tokenizers do the same."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 20} MiB" if num_bytes >= 1 << 20 else f"{num_bytes} bytes"
