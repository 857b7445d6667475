"""Files and folders that are written whole or not at all, such as on a disk that is full."""

import ctypes
import errno
import os
import secrets
import shutil
import stat
import sys
import tempfile
from collections.abc import Callable, Iterator
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
def replacing(path: Path, *, is_private: bool = False) -> Iterator[Path]:
    """Give the name of a file to write, which replaces `path` when the block ends well, and is removed otherwise.

    The file is there, and empty. Only this user can read it until it replaces a file, whose mode it then has, and owner
    where that is allowed. Where `path` is a link, what it names is replaced. What is no file, such as `/dev/stdout`, is
    to be written itself.

    is_private: whether only this user may ever read it, and whatever has the name is replaced itself, a link too.

    :raises OSError: the folder cannot be written to.
    """
    real = path if is_private else Path(os.path.realpath(path))
    if not is_private and real.exists() and not real.is_file():
        yield real
        return
    old = real.stat() if not is_private and real.exists() else None
    unfinished = real.with_name(f".writing-{secrets.token_hex(4)}-{real.name}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    os.close(os.open(unfinished, flags, 0o600 if old or is_private else 0o666))
    try:
        yield unfinished
        if old:
            with suppress(PermissionError):  # only root gives files away
                os.chown(unfinished, old.st_uid, old.st_gid)
            unfinished.chmod(stat.S_IMODE(old.st_mode))  # last, for chown takes bits away
        unfinished.replace(real)
    finally:
        unfinished.unlink(missing_ok=True)


# ------------------------------------------------------------------------------------------------------ whole folders


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill, which is called `path` when the block ends well, and is removed when it does not.

    :raises ConfigurationError: `path` exists and is not empty.
    :raises OSError: it cannot be made.
    """
    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise ConfigurationError(f"{path} exists. Remove it, use what is in it, or name another folder")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{path.name}.", dir=path.parent))
    try:
        yield unfinished
        unfinished.chmod(0o755)  # mkdtemp's is private
        unfinished.replace(path)
    except BaseException:
        shutil.rmtree(unfinished)
        raise


AT_FDCWD = -100
RENAME_EXCHANGE = RENAME_SWAP = 2
"""Flags of Linux and of macOS."""


def exchange_folders(one: Path, other: Path) -> None:
    """Swap the names of two folders at one moment: at any time, both names exist.

    Where the system or the file system cannot do that (NFS, for one), three renames do it; if those are interrupted,
    what was `other` is left beside it as `.NAME.old-` and eight digits.

    :raises OSError: it failed; both are as they were.
    """
    if _exchange_at_once(one, other):
        return
    aside = other.with_name(f".{other.name}.old-{secrets.token_hex(4)}")
    other.rename(aside)
    try:
        one.rename(other)
    except BaseException:
        aside.rename(other)
        raise
    aside.rename(one)


def _exchange_at_once(one: Path, other: Path) -> bool:
    rename = _renaming()
    if rename is None:
        return False
    if rename(os.fsencode(one), os.fsencode(other)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _renaming() -> Callable[[bytes, bytes], int] | None:
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        swap = getattr(library, "renamex_np", None)
        return swap and (lambda one, other: swap(one, other, RENAME_SWAP))
    exchange = getattr(library, "renameat2", None)
    return exchange and (lambda one, other: exchange(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE))


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's names, are on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
