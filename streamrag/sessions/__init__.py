"""Context that streams in for hours, and questions about it: a prompt that is kept computed while it grows.

Data go from a buffer into a window, and from there into an idle stream of the engine, which computes them as they
arrive. Each question is a request of its own, which shares that stream's KV blocks. Regions after arXiv 2605.13784: the
system text is frozen, the data slide, question and answer are ephemeral.
"""

# session.py: the public class. data.py: buffer, window and ingestion. questions.py: ask, cache, in flight.
# watches.py: questions that are kept answered. answer.py: one answer. log/: the text on disk, in SQLite.

from streamrag.sessions.data import SessionState as SessionState
from streamrag.sessions.drops import DataDropped as DataDropped
from streamrag.sessions.limits import SessionLimits as SessionLimits
from streamrag.sessions.log import LogState as LogState
from streamrag.sessions.questions import AskOptions as AskOptions
from streamrag.sessions.session import Session as Session
from streamrag.sessions.watches import Watch as Watch
from streamrag.sessions.watches import WatchedAnswer as WatchedAnswer

__all__ = [
    "AskOptions",
    "DataDropped",
    "LogState",
    "Session",
    "SessionLimits",
    "SessionState",
    "Watch",
    "WatchedAnswer",
]
