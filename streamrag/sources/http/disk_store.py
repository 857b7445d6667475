"""A store of small files by key, in a folder bounded in size that several processes may share.

Each entry is a file of its own, which is written whole or not at all and carries a checksum. What is damaged, or cannot
be read or written for whatever reason, is as if it were not there. Calls block: make them in a thread.
"""

import hashlib
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from streamrag.errors import ConfigurationError
from streamrag.support.bounded_reading import open_regular
from streamrag.support.files import replacing

MAGIC = b"streamrag cache 1\n"
HEAD_BYTES = len(MAGIC) + 32
SWEEP_SHARE = 1 / 16  # of the store's size: when so much was written, old entries are removed if it has grown too large
SWEPT_SHARE = 0.9  # of the store's size, after that
UNFINISHED_S = 60.0  # after which a file that is still being written is taken for one of a program that was killed
ENTRY = re.compile(r"[0-9a-f]{64}")
UNFINISHED = re.compile(r"\.writing-[0-9a-f]{8}-[0-9a-f]{64}")


class DiskStore:
    """The entries in `folder`, at most `max_bytes` of them together, but for what is written while it is swept."""

    def __init__(self, folder: str | Path, max_bytes: int) -> None:
        self._folder = Path(folder)
        self._max_bytes = max_bytes
        self._num_new_bytes = max_bytes  # what others have left is looked at with the first entry

    def open(self) -> None:
        """Make the folder if there is none. Other users cannot look into one that is made here.

        :raises ConfigurationError: it cannot be made, or not be written to.
        """
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with replacing(self._path(""), is_private=True):
                pass
            self.remove("")
        except OSError as error:
            raise ConfigurationError(
                f"cache_folder={str(self._folder)!r} cannot be used: {error.strerror}; name one that can be written to"
            ) from error

    def get(self, key: str) -> bytes | None:
        """Return what was last put under `key`, if it is still there and whole."""
        path = self._path(key)
        try:
            with open_regular(path, follow_links=False) as file:
                if os.fstat(file.fileno()).st_size > self._max_bytes:
                    return None
                entry = file.read(self._max_bytes + 1)
                with suppress(OSError):  # of another user's file
                    os.utime(file.fileno())  # used now
        except OSError:
            return None
        content = entry[HEAD_BYTES:]
        if entry[:HEAD_BYTES] == _head(key, content):
            return content
        self.remove(key)
        return None

    def put(self, key: str, content: bytes) -> None:
        """Store `content`, in place of what was there, unless it is large or cannot be written."""
        num_bytes = HEAD_BYTES + len(content)
        if num_bytes > self._max_bytes * SWEEP_SHARE:
            return
        with suppress(OSError):  # the disk is full, say
            with replacing(self._path(key), is_private=True) as unfinished:
                unfinished.write_bytes(_head(key, content) + content)
            self._num_new_bytes += num_bytes
        if self._num_new_bytes > self._max_bytes * SWEEP_SHARE:
            self._num_new_bytes = 0
            self._sweep()

    def remove(self, key: str) -> None:
        """Forget what is under `key`."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode(errors="replace")).hexdigest()

    def _sweep(self) -> None:
        """Remove what was used least recently, until the rest is small enough. Other files are left alone."""
        entries = sorted(self._entries())
        num_bytes = sum(size for _, size, _ in entries)
        target_bytes = self._max_bytes * (SWEPT_SHARE if num_bytes > self._max_bytes else 1)
        for _, size, path in entries:
            if num_bytes <= target_bytes:
                return
            with suppress(OSError):  # another process was faster
                os.unlink(path)
            num_bytes -= size

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yield for each entry when it was used, its size on disk, and its path."""
        with suppress(OSError), os.scandir(self._folder) as files:
            for file in files:
                with suppress(OSError):
                    found = file.stat(follow_symlinks=False)
                    if UNFINISHED.fullmatch(file.name) and found.st_mtime < time.time() - UNFINISHED_S:
                        os.unlink(file.path)
                    elif ENTRY.fullmatch(file.name) and stat.S_ISREG(found.st_mode):
                        yield found.st_mtime, max(found.st_size, found.st_blocks * 512), file.path


def _head(key: str, content: bytes) -> bytes:
    """Return what an entry begins with. The key is in its checksum: an entry cannot stand under another one's name."""
    return MAGIC + hashlib.sha256(key.encode(errors="replace") + b"\0" + content).digest()
