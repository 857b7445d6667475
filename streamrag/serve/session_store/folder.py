"""The folder with the logs of a service's sessions, each named by its session's id."""

import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from streamrag.errors import ConfigurationError, SessionLogError, SessionLogInUseError
from streamrag.sessions.log.contents import Header
from streamrag.sessions.log.file import LogFile, read_header

_NAME = re.compile(r"(sess_[0-9a-f]{32})\.sqlite")

log = logging.getLogger("streamrag.serve")


class SessionFolder:
    """A folder of session logs, created for its owner only. Raises ConfigurationError if it is unusable."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"session_log_dir={path} cannot be created: {error.strerror or error}") from error
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigurationError(f"session_log_dir={path} cannot be written: make it writable, or choose another")

    def path_of(self, id: str) -> Path:
        """Return the path of this session's log."""
        return self._path / f"{id}.sqlite"

    def sessions(self) -> Iterator[tuple[str, Header, float]]:
        """Yield each session's id, the header of its log, and the seconds since its last use. Skip unreadable logs."""
        for path in sorted(self._path.iterdir()):
            match = _NAME.fullmatch(path.name)
            if match is None:
                continue
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    raise SessionLogError(f"{path} is not a regular file")
                if not status.st_size:  # the service was killed before its first write
                    with suppress(SessionLogInUseError):
                        LogFile(path).remove()
                    continue
                yield match[1], read_header(path), max(time.time() - status.st_mtime, 0.0)
            except (OSError, SessionLogError) as error:
                log.error("a session is not resumed: %s", error)
