"""Records of all requests, one JSON line each, in a file that several engines may share."""

import logging
import os
from pathlib import Path
from typing import BinaryIO

import msgspec

from streamrag.errors import ConfigurationError
from streamrag.records import RequestRecord

logger = logging.getLogger(__name__)


class RecordFile:
    """Appends records. The file is opened with the first; a line is in it when `write` returns.

    An engine goes on when the file can no longer be written: that is logged, and no more records are kept.

    :raises ConfigurationError: there cannot be a file at `path`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: BinaryIO | None = None
        self._is_broken = False
        if not path.parent.is_dir():
            raise ConfigurationError(f"records={str(path)!r}: there is no folder {str(path.parent)!r}; make it first")
        if path.is_dir():
            raise ConfigurationError(f"records={str(path)!r} is a folder; name a file in it")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise ConfigurationError(f"records={str(path)!r} cannot be written; choose another place or permissions")

    def write(self, record: RequestRecord) -> None:
        if self._is_broken:
            return
        line = msgspec.json.encode(record) + b"\n"
        try:
            if self._file is None:
                self._file = self._open()
            if self._file.write(line) != len(line):
                raise OSError("only a part of a line could be written")
        except OSError as error:
            self._is_broken = True
            self.close()
            logger.error("no more records of requests are written to %s: %s", self.path, error)

    def close(self) -> None:
        """May be called again; a later record would open the file anew."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        """Without a buffer, so that each line is one write. Cuts off what a crash left of a line."""
        if self.path.exists() and self.path.stat().st_size:
            with self.path.open("rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        return self.path.open("ab", buffering=0)
