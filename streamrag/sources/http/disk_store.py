"""A key-value store of small files in a size-bounded folder, which several processes may share.

Each entry is a file that is written atomically and has a checksum. A damaged or unreadable entry counts as missing, and
a failed write is ignored. Calls block: make them in a thread.
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
from streamrag.support.files import atomic_replace

MAGIC = b"streamrag cache 1\n"
MAX_BYTES = 256 << 20  # of a store
HEAD_BYTES = len(MAGIC) + 32
SWEEP_SHARE = 1 / 16  # share of the maximum size that is written between two sweeps
SWEPT_SHARE = 0.9  # share of the maximum size that a sweep leaves
UNFINISHED_S = 60.0  # seconds after which an unfinished file counts as abandoned by a killed program
ENTRY = re.compile(r"[0-9a-f]{64}")
UNFINISHED = re.compile(r"\.writing-[0-9a-f]{8}-[0-9a-f]{64}")


class DiskStore:
    """An LRU store in `folder`. It exceeds `max_bytes` by at most what is written between two sweeps."""

    def __init__(self, folder: str | Path, max_bytes: int = MAX_BYTES) -> None:
        self._folder = Path(folder)
        self._max_bytes = max_bytes
        self._num_new_bytes = max_bytes  # so that the first entry sweeps what earlier programs left

    def open(self) -> None:
        """Create the folder, private to this user, if it is missing; raise ConfigurationError if it is not writable."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            with atomic_replace(self._path(""), is_private=True):
                pass
            self.remove("")
        except OSError as error:
            raise ConfigurationError(
                f"cache_folder={str(self._folder)!r} cannot be used: {error.strerror}; name one that can be written to"
            ) from error

    def get(self, key: str) -> bytes | None:
        """Return the content under `key`, marking it as used; None if it is missing or unreadable.

        A damaged entry is removed, and counts as missing.
        """
        path = self._path(key)
        try:
            with open_regular(path, follow_links=False) as file:
                if os.fstat(file.fileno()).st_size > self._max_bytes:
                    return None
                entry = file.read(self._max_bytes + 1)
                with suppress(OSError):  # the file may belong to another user
                    os.utime(file.fileno())  # marks it as recently used
        except OSError:
            return None
        content = entry[HEAD_BYTES:]
        if entry[:HEAD_BYTES] == _head(key, content):
            return content
        self.remove(key)
        return None

    def put(self, key: str, content: bytes) -> None:
        """Store `content`, unless it exceeds a sixteenth of the store or cannot be written; may evict old ones."""
        num_bytes = HEAD_BYTES + len(content)
        if num_bytes > self._max_bytes * SWEEP_SHARE:
            return
        with suppress(OSError):  # such as a full disk
            with atomic_replace(self._path(key), is_private=True) as unfinished:
                unfinished.write_bytes(_head(key, content) + content)
            self._num_new_bytes += num_bytes
        if self._num_new_bytes > self._max_bytes * SWEEP_SHARE:
            self._num_new_bytes = 0
            self._sweep()

    def remove(self, key: str) -> None:
        """Remove the entry under `key`; errors, and a missing entry, are ignored."""
        with suppress(OSError):
            self._path(key).unlink()

    def _path(self, key: str) -> Path:
        return self._folder / hashlib.sha256(key.encode(errors="replace")).hexdigest()

    def _sweep(self) -> None:
        """Evict the least recently used entries down to `SWEPT_SHARE` if the store is too large; keep other files."""
        entries = sorted(self._entries())
        num_bytes = sum(size for _, size, _ in entries)
        target_bytes = self._max_bytes * (SWEPT_SHARE if num_bytes > self._max_bytes else 1)
        for _, size, path in entries:
            if num_bytes <= target_bytes:
                return
            with suppress(OSError):  # another process has removed it
                os.unlink(path)
            num_bytes -= size

    def _entries(self) -> Iterator[tuple[float, int, str]]:
        """Yield the time of last use, the size on disk and the path of each entry; remove abandoned files."""
        with suppress(OSError), os.scandir(self._folder) as files:
            for file in files:
                with suppress(OSError):
                    status = file.stat(follow_symlinks=False)
                    if UNFINISHED.fullmatch(file.name) and status.st_mtime < time.time() - UNFINISHED_S:
                        os.unlink(file.path)
                    elif ENTRY.fullmatch(file.name) and stat.S_ISREG(status.st_mode):
                        yield status.st_mtime, max(status.st_size, status.st_blocks * 512), file.path


def _head(key: str, content: bytes) -> bytes:
    """Return the header of an entry. Its checksum includes the key, so that an entry cannot be moved to another key."""
    return MAGIC + hashlib.sha256(key.encode(errors="replace") + b"\0" + content).digest()
