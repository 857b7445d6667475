"""Records of finished requests."""

import logging
import os
from collections import deque
from pathlib import Path
from typing import Any, BinaryIO, cast

import msgspec

from streamrag.backends.vllm.scheduler.request import StreamRequest
from streamrag.backends.vllm.scheduler.request_log import HostClock
from streamrag.errors import ConfigurationError
from streamrag.records import RequestRecord

logger = logging.getLogger(__name__)

NUM_GONE = 1_000
"""Number of failed or aborted request ids that are remembered, because chunks for them may still arrive."""


class Records:
    """Creates the record of each request that ends, and remembers the ids of those that failed or were aborted."""

    def __init__(self, path: str | None, *, clock: HostClock) -> None:
        self.file = RecordFile(Path(path)) if path else None
        self.gone_ids: deque[str] = deque(maxlen=NUM_GONE)
        """Ids of the requests that failed or were aborted most recently. Clients may reuse these ids."""
        self._clock = clock

    def end(self, request: StreamRequest) -> dict[str, Any]:
        """Return the record of a request with a final status, and append the record to the file."""
        record = request.end(self._clock.monotonic())
        if record.outcome != "finished":
            self.gone_ids.append(request.request_id)
        if self.file is not None:
            self.file.write(record)
        return cast(dict[str, Any], msgspec.to_builtins(record))

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class RecordFile:
    """A file of records, one JSON line each, to which several engines may append.

    The file is opened at the first record. `write` returns after the line is in the file. If writing fails, that is
    logged, and no more records are written; the engine is not affected.

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
        """Append the record as one JSON line. After an error, which is logged, do nothing any more."""
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
            logger.error("request records are no longer written to %s: %s", self.path, error)

    def close(self) -> None:
        """Close the file, if it is open; a later `write` opens it again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO:
        """Truncate an incomplete last line, and open the file unbuffered, so that each line is one write."""
        if self.path.exists() and self.path.stat().st_size:
            with self.path.open("rb+") as file:
                file.seek(-1, os.SEEK_END)
                if file.read() != b"\n":
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
        return self.path.open("ab", buffering=0)
