"""Replace files and folders atomically: completely or not at all, even on a full disk."""

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

AT_FDCWD = -100
RENAME_EXCHANGE = RENAME_SWAP = 2  # flags of Linux and of macOS


def cache_folder() -> Path:
    """Return this user's folder for files that can be made again; raise RuntimeError if the user has no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "streamrag"


def write_atomic(path: Path, content: str | bytes) -> None:
    """Replace a file in one step, unsynced, text as UTF-8; an OSError leaves it unchanged, as ConfigurationError."""
    try:
        with atomic_replace(path) as unfinished:
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror or error}") from error


@contextmanager
def atomic_replace(path: Path, *, is_private: bool = False) -> Iterator[Path]:
    """Give an empty file to write. It replaces `path` when the block succeeds, and is removed otherwise.

    Only this user can read the file until it replaces an existing one, whose mode it then takes, and whose owner where
    permitted. If `path` is a link, its target is replaced. If `path` is not a regular file, such as `/dev/stdout`, it
    is given itself.

    is_private: never let other users read the file, and replace `path` itself even if it is a link.

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
            with suppress(PermissionError):  # only root may change the owner
                os.chown(unfinished, old.st_uid, old.st_gid)
            unfinished.chmod(stat.S_IMODE(old.st_mode))  # after chown, which clears mode bits
        unfinished.replace(real)
    finally:
        unfinished.unlink(missing_ok=True)


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """Give a folder to fill. It is renamed to `path` when the block succeeds, else removed. Creates missing parents.

    :raises ConfigurationError: `path` exists and is not empty.
    :raises OSError: the folder cannot be created.
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


def exchange_folders(one: Path, other: Path) -> None:
    """Swap the names of two folders atomically, so that both names always exist.

    On systems and file systems without an atomic exchange (such as NFS), use three renames. If these are interrupted,
    the folder `other` remains beside it as `.NAME.old-` and eight digits.

    :raises OSError: the exchange failed; both folders are unchanged.
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
    """Exchange two folders atomically; return False where this is not supported, raise OSError for other failures."""
    exchange = _load_exchange()
    if exchange is None:
        return False
    if exchange(os.fsencode(one), os.fsencode(other)) == 0:
        return True
    number = ctypes.get_errno()
    if number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.ENOTSUP):
        return False
    raise OSError(number, os.strerror(number), str(other))


def _load_exchange() -> Callable[[bytes, bytes], int] | None:
    """Return the system's function that swaps two paths, 0 for success; None if it has none."""
    library = ctypes.CDLL(None, use_errno=True)
    if sys.platform == "darwin":
        swap = getattr(library, "renamex_np", None)
        return swap and (lambda one, other: swap(one, other, RENAME_SWAP))
    exchange = getattr(library, "renameat2", None)
    return exchange and (lambda one, other: exchange(AT_FDCWD, one, AT_FDCWD, other, RENAME_EXCHANGE))


def sync(path: Path) -> None:
    """Wait until a file's content, or a folder's entries, are on the disk."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(file)
    finally:
        os.close(file)
