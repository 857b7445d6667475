"""Context that streams in for hours, and questions about it: a prompt that is kept computed while it grows.

    append ─▶ Buffer ─▶ Window ─▶ Lane: one idle stream in the engine, prefilled as data arrives
                                    │ its blocks
    ask, watch ─────────────────────┴▶ requests of their own: data so far + question

Regions, after arXiv 2605.13784: the system text is frozen, the data slides, question and answer are ephemeral.
"""

from streamrag.sessions.session import Session as Session
from streamrag.sessions.watching import Watch as Watch
from streamrag.sessions.watching import WatchedAnswer as WatchedAnswer

__all__ = ["Session", "Watch", "WatchedAnswer"]
