"""The folder in which a service keeps the logs of its sessions, each under the session's id."""

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
    """A folder of session logs, made if it is missing, for its owner only.

    :raises ConfigurationError: it cannot be made.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigurationError(f"session_log_dir={path} cannot be made: {error.strerror or error}") from error
        if not os.access(path, os.R_OK | os.W_OK | os.X_OK):
            raise ConfigurationError(f"session_log_dir={path} cannot be written: let this user, or choose another")

    def path_of(self, id: str) -> Path:
        """Return the path of this session's log."""
        return self._path / f"{id}.sqlite"

    def sessions(self) -> Iterator[tuple[str, Header, float]]:
        """Yield each session's id, the header of its log, and the seconds since it was last used.

        A log that cannot be read is left as it is, and the error is logged.
        """
        for path in sorted(self._path.iterdir()):
            named = _NAME.fullmatch(path.name)
            if named is None:
                continue
            try:
                status = path.lstat()
                if not stat.S_ISREG(status.st_mode):
                    raise SessionLogError(f"{path} is no regular file")
                if not status.st_size:  # its service was killed before it had written anything
                    with suppress(SessionLogInUseError):
                        LogFile(path).remove()
                    continue
                yield named[1], read_header(path), max(time.time() - status.st_mtime, 0.0)
            except (OSError, SessionLogError) as error:
                log.error("a session is not resumed: %s", error)
