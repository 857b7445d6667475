"""Files that are written whole or not at all, such as on a disk that is full."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from streamrag.errors import ConfigurationError

__all__ = ["replacing", "write_whole"]


def write_whole(path: Path, content: str | bytes) -> None:
    """Write a file, text in UTF-8. At any time `path` is what it was before, or the whole new file.

    :raises ConfigurationError: it cannot be written; `path` is what it was before.
    """
    try:
        with replacing(path) as unfinished:
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name of a file to write, which replaces `path` when the block ends well, and is removed when it does not.

    Where `path` is a link, what it names is replaced. What is no file, such as `/dev/stdout`, is to be written itself.

    :raises OSError: the folder cannot be written to.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
        yield real
        return
    unfinished = real.with_name(f".writing-{os.getpid()}-{real.name}")
    try:
        yield unfinished
        unfinished.replace(real)
    finally:
        unfinished.unlink(missing_ok=True)
