"""Temporary folders that are removed even if their owner was killed: the next program removes them."""

import errno
import fcntl
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
import weakref
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

OWNER = ".owner"  # a file in each folder that its owner keeps locked; the kernel unlocks it when the owner ends
HELD_FOR_S, HELD_TICK_S = 60, 0.05


class ScratchFolder:
    """A private temporary folder, named `streamrag-KIND-` and eight characters. Raises OSError if it cannot be made."""

    def __init__(self, kind: str) -> None:
        owner = None
        while owner is None:
            self.path = Path(tempfile.mkdtemp(prefix=f"streamrag-{kind}-"))
            owner = _create_and_lock(self.path / OWNER)
        self._owner = owner
        self._remove = weakref.finalize(self, _remove, self.path, owner, os.getpid())

    def remove(self) -> None:
        """Remove the folder with its content, ignoring errors. Happens at exit otherwise."""
        self._remove()


def _remove(path: Path, owner: int, process_id: int) -> None:
    """Remove the folder and unlock it, unless this process is a fork of its owner."""
    if os.getpid() == process_id:  # not in a fork
        shutil.rmtree(path, ignore_errors=True)
        os.close(owner)


def remove_left_behind(kind: str) -> None:
    """Remove this user's folders of this kind whose owners have ended. May block for a moment."""
    name = re.compile(re.escape(f"streamrag-{kind}-") + r"[a-z0-9_]{8}")  # as mkdtemp names them
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in entries:
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                _remove_if_left_behind(Path(entry.path).absolute())


def _create_and_lock(path: Path) -> int | None:
    """Create, lock and return the open file; None if another program, which removes the folder, was faster."""
    with suppress(FileNotFoundError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            is_locked = _lock(file, path)
        except OSError:  # locks are not supported here, so no program removes the folder
            is_locked = True
        if is_locked:
            return file
        os.close(file)
    return None


def _lock(file: int, path: Path) -> bool:
    """Try to lock an open file or folder; return whether that succeeds and `path` still names the file or folder.
    Raises OSError if the file system has no locks."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), path.lstat())
    except (BlockingIOError, FileNotFoundError):
        return False


def _is_same(file: int, path: Path) -> bool:
    with suppress(OSError):
        return os.path.samestat(os.fstat(file), path.lstat())
    return False


def _remove_if_left_behind(folder: Path) -> None:
    """Remove `folder` if it and its lock file belong to this user, and no process holds the lock."""
    try:
        if folder.lstat().st_uid != os.geteuid():
            return
        file = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # not such a folder, or removed meanwhile
        return
    try:
        with suppress(OSError):  # locks are not supported here: whether the owner lives is unknown
            if _lock(file, folder / OWNER):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(file)


@contextmanager
def locked_folder(beside: Path, prefix: str, *, kept: Collection[str] = ()) -> Iterator[Path]:
    """Give a locked folder in `beside`, named `prefix` and eight digits; it is removed at the end unless renamed.

    Folders of this prefix and user that no process has locked are removed first.

    kept: names of files that stay if the block raises, provided that all exist and none is empty. The next call reuses
        their folder.

    :raises OSError: the folder cannot be created.
    """
    path, owner = _reuse_or_remove(beside, prefix, kept) or _make_locked(beside, prefix)
    try:
        yield path
    except BaseException:
        if _is_same(owner, path) and not _clear(path, kept):
            path.rmdir()
        raise
    else:
        if _is_same(owner, path):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(owner)


def _make_locked(beside: Path, prefix: str) -> tuple[Path, int]:
    """Return a new folder, `prefix` and eight digits, with its open lock; try again if another program removes it."""
    while True:
        path = beside / f"{prefix}{secrets.token_hex(4)}"
        path.mkdir()
        owner = _open_folder(path)
        if owner is None:  # another program removed it before it was locked
            continue
        try:
            if _lock(owner, path):
                return path, owner
        except OSError:  # locks are not supported here, so no program removes the folder
            return path, owner
        os.close(owner)


def _reuse_or_remove(beside: Path, prefix: str, kept: Collection[str]) -> tuple[Path, int] | None:
    """Lock and return the first abandoned folder that has the `kept` files, or None; remove other abandoned ones."""
    name = re.compile(re.escape(prefix) + r"[0-9a-f]{8}")
    with os.scandir(beside) as entries:
        candidates = [Path(entry.path) for entry in entries if name.fullmatch(entry.name)]
    reused = None
    for path in candidates:
        owner = _open_folder(path)
        if owner is None:
            continue
        with suppress(OSError):  # locks are not supported here: whether the owner lives is unknown
            if os.fstat(owner).st_uid == os.geteuid() and _lock(owner, path):
                if reused is None and _clear(path, kept):
                    reused = path, owner
                    continue
                shutil.rmtree(path, ignore_errors=True)
        os.close(owner)
    return reused


def _clear(folder: Path, kept: Collection[str]) -> bool:
    """Empty `folder`, but keep `kept` if all are regular files with content; return whether they were kept."""
    is_kept = bool(kept) and all(_has_content(folder / name) for name in kept)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif not (is_kept and path.name in kept):
            path.unlink()
    return is_kept


def _has_content(path: Path) -> bool:
    """Whether `path` is a regular file, no link, that is not empty."""
    with suppress(OSError):
        status = path.lstat()
        return stat.S_ISREG(status.st_mode) and status.st_size > 0
    return False


@contextmanager
def folder_lock(folder: Path) -> Iterator[None]:
    """Lock `folder` during the block, even if it is renamed: no other program locks it or removes it as abandoned.

    Blocks the thread while it waits. Where there are no such locks, or no such folder, the block runs without one.

    :raises OSError: another program has held it for a minute.
    """
    for _ in range(int(HELD_FOR_S / HELD_TICK_S)):
        owner = _open_folder(folder)
        try:
            with suppress(OSError):  # locks are not supported here
                if owner is not None and not _lock(owner, folder):
                    time.sleep(HELD_TICK_S)
                    continue
            yield
            return
        finally:
            if owner is not None:
                os.close(owner)
    raise OSError(errno.EBUSY, "it is held by another program", str(folder))


def _open_folder(path: Path) -> int | None:
    """Return the open folder; None if there is none, or it is a link."""
    with suppress(OSError):  # removed meanwhile, a link, or not a folder
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None
