"""Folders that the next program removes if their owner was killed, in the temporary folder and elsewhere."""

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

OWNER = ".owner"
"""A file in each folder that its owner keeps locked. The kernel unlocks it when the owner ends, however that ends."""


HELD_FOR_S, HELD_TICK_S = 60, 0.05


class ScratchFolder:
    """A folder of one's own in the temporary folder, named `streamrag-KIND-` and eight characters.

    :raises OSError: it cannot be made.
    """

    def __init__(self, kind: str) -> None:
        while True:
            self.path = Path(tempfile.mkdtemp(prefix=_prefix(kind)))
            owner = _create_and_lock(self.path / OWNER)
            if owner is not None:
                break
        self._owner = owner
        self._remove = weakref.finalize(self, _remove, self.path, owner, os.getpid())

    def remove(self) -> None:
        """Remove the folder and what is in it; what cannot be removed stays. At the latest it is done at exit."""
        self._remove()


def _remove(path: Path, owner: int, process_id: int) -> None:
    if os.getpid() == process_id:  # not in a fork
        shutil.rmtree(path, ignore_errors=True)
        os.close(owner)


def remove_left_behind(kind: str) -> None:
    """Remove the folders of this kind and user whose owners are dead. May block for a moment."""
    name = re.compile(re.escape(_prefix(kind)) + r"[a-z0-9_]{8}")  # as mkdtemp makes them
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:  # it cannot be listed: nothing is removed
        for entry in entries:
            if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                _remove_if_left_behind(Path(entry.path).absolute())


def _prefix(kind: str) -> str:
    return f"streamrag-{kind}-"


def _create_and_lock(path: Path) -> int | None:
    """The open file; None if another program found the folder before it was locked, and removes it."""
    with suppress(FileNotFoundError):
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            is_locked = _lock(file, path)
        except OSError:  # there are no locks here: nobody can get this one and take the folder for left behind
            is_locked = True
        if is_locked:
            return file
        os.close(file)
    return None


def _lock(file: int, path: Path) -> bool:
    """Whether it is ours now, and is still what stands at `path`.

    :raises OSError: files cannot be locked here.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return os.path.samestat(os.fstat(file), os.stat(path, follow_symlinks=False))
    except (BlockingIOError, FileNotFoundError):
        return False


def _remove_if_left_behind(folder: Path) -> None:
    """Remove it if the folder and the lock in it are this user's, and no process holds the lock."""
    try:
        if os.stat(folder, follow_symlinks=False).st_uid != os.geteuid():
            return
        file = os.open(folder / OWNER, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:  # not one of ours, or gone by now
        return
    try:
        with suppress(OSError):  # there are no locks here: nothing is sure
            if _lock(file, folder / OWNER):
                shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(file)


# ---------------------------------------------------------------------------------------------- in a folder of the user


@contextmanager
def locked_folder(beside: Path, prefix: str, *, kept: Collection[str] = ()) -> Iterator[Path]:
    """A folder of this prefix and eight characters in `beside`, gone at the end unless it was renamed.

    It is locked itself, for it holds nothing but what it is made for. Those of this prefix and user that nobody has
    locked were left behind, and are removed first.

    With `kept`, files of these names stay when the block raises, if all are there and none is empty, in a folder that
    the next one is given, with them.

    :raises OSError: it cannot be made.
    """
    path, owner = _take_over_or_remove(beside, prefix, kept) or _make_locked(beside, prefix)
    try:
        yield path
    except BaseException:
        if _is_still(owner, path) and not _empty(path, kept):
            path.rmdir()
        raise
    else:
        if _is_still(owner, path):
            shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(owner)


def _make_locked(beside: Path, prefix: str) -> tuple[Path, int]:
    while True:
        path = beside / f"{prefix}{secrets.token_hex(4)}"
        path.mkdir()
        owner = _open_folder(path)
        try:
            if owner is not None and _lock(owner, path):
                return path, owner
        except OSError:  # there are no locks here, so nobody takes it for left behind
            assert owner is not None
            return path, owner
        if owner is not None:  # another program found it before it was locked
            os.close(owner)


def _take_over_or_remove(beside: Path, prefix: str, kept: Collection[str]) -> tuple[Path, int] | None:
    """The first folder that was left behind with what is kept, now locked; the others are removed."""
    name = re.compile(re.escape(prefix) + r"[0-9a-f]{8}")
    with os.scandir(beside) as entries:
        left = [Path(entry.path) for entry in entries if name.fullmatch(entry.name)]
    taken = None
    for path in left:
        owner = _open_folder(path)
        if owner is None:
            continue
        with suppress(OSError):  # there are no locks here: nothing is sure
            if os.fstat(owner).st_uid == os.geteuid() and _lock(owner, path):
                if taken is None and _empty(path, kept):
                    taken = path, owner
                    continue
                shutil.rmtree(path, ignore_errors=True)
        os.close(owner)
    return taken


def _empty(folder: Path, kept: Collection[str]) -> bool:
    """Remove what is in it, except files of the names `kept` if all are worth it; whether they are."""
    found = [status for name in kept if (status := _status(folder / name)) and stat.S_ISREG(status.st_mode)]
    is_worth = len(found) == len(kept) > 0 and all(status.st_size for status in found)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path, ignore_errors=True)
        elif not (is_worth and path.name in kept):
            path.unlink()
    return is_worth


def _status(path: Path) -> os.stat_result | None:
    with suppress(OSError):
        return path.lstat()
    return None


def _is_still(owner: int, path: Path) -> bool:
    """Whether the folder that is locked is what stands at `path`."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(owner), os.stat(path, follow_symlinks=False))
    return False


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """No other program holds this folder during the block, or takes it for left behind, whatever it is called by then.

    :raises OSError: another program has held it for a minute.
    """
    for _ in range(int(HELD_FOR_S / HELD_TICK_S)):
        owner = _open_folder(folder)
        try:
            with suppress(OSError):  # there are no locks here, so nobody holds it
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
    with suppress(OSError):  # gone by now, a link, or no folder
        return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    return None
