"""Files that are written whole or not at all, such as on a disk that is full."""

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from streamrag.errors import ConfigurationError


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

    The file is there, and empty. Only this user can read it until it replaces a file, whose mode it then has, and owner
    where that is allowed. Where `path` is a link, what it names is replaced. What is no file, such as `/dev/stdout`, is
    to be written itself.

    :raises OSError: the folder cannot be written to.
    """
    real = Path(os.path.realpath(path))
    if real.exists() and not real.is_file():
        yield real
        return
    old = real.stat() if real.exists() else None
    unfinished = real.with_name(f".writing-{secrets.token_hex(4)}-{real.name}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(unfinished, flags, 0o600 if old else 0o666))
    try:
        yield unfinished
        if old:
            with suppress(PermissionError):  # only root gives files away
                os.chown(unfinished, old.st_uid, old.st_gid)
            unfinished.chmod(stat.S_IMODE(old.st_mode))  # last, for chown takes bits away
        unfinished.replace(real)
    finally:
        unfinished.unlink(missing_ok=True)
