"""Sessions: context that streams in for hours, and questions about it.

    append ─▶ Buffer ─▶ Window ─▶ IdleStream        data.py, window.py, ingestion.py: a partial prompt in the engine
    ask ─▶ cache ─▶ engine                          questions.py, answer.py: a request that shares the stream's KV
    blocks watch ─▶ the same, after each new version  watched_questions.py, concurrency.py log
    log/: the text on disk, in SQLite

After arXiv 2605.13784: the system text is frozen, the data slide, question and answer are ephemeral.
"""

from streamrag.sessions.data import SessionState as SessionState
from streamrag.sessions.drops import DataDropped as DataDropped
from streamrag.sessions.limits import SessionLimits as SessionLimits
from streamrag.sessions.log import LogState as LogState
from streamrag.sessions.questions import AskOptions as AskOptions
from streamrag.sessions.session import Session as Session
from streamrag.sessions.session import SessionOptions as SessionOptions
from streamrag.sessions.watched_questions import Watch as Watch
from streamrag.sessions.watched_questions import WatchedAnswer as WatchedAnswer

__all__ = [
    "AskOptions",
    "DataDropped",
    "LogState",
    "Session",
    "SessionLimits",
    "SessionOptions",
    "SessionState",
    "Watch",
    "WatchedAnswer",
]
