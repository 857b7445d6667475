"""A session's text on disk, from which a restarted process resumes it."""

from streamrag.sessions.log.contents import LogState as LogState
from streamrag.sessions.log.session_log import SessionLog as SessionLog
