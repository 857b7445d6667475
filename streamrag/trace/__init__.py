"""Traces of retrieval: read and write them.

`streamrag.TraceRecorder` records one, and `streamrag.ReplaySource` replays it.
"""

from typing import TYPE_CHECKING

from streamrag.support.lazy_imports import attributes

if TYPE_CHECKING:
    from streamrag.trace.read import read_trace as read_trace
    from streamrag.trace.values import Trace as Trace
    from streamrag.trace.values import TracedAppend as TracedAppend
    from streamrag.trace.values import TracedChunk as TracedChunk
    from streamrag.trace.values import TracedQuery as TracedQuery
    from streamrag.trace.values import TracedSkip as TracedSkip
    from streamrag.trace.values import TracedUpdate as TracedUpdate
    from streamrag.trace.values import stretched as stretched
    from streamrag.trace.write import write_trace as write_trace

_HOMES = {
    "Trace": "streamrag.trace.values",
    "TracedAppend": "streamrag.trace.values",
    "TracedChunk": "streamrag.trace.values",
    "TracedQuery": "streamrag.trace.values",
    "TracedSkip": "streamrag.trace.values",
    "TracedUpdate": "streamrag.trace.values",
    "read_trace": "streamrag.trace.read",
    "stretched": "streamrag.trace.values",
    "write_trace": "streamrag.trace.write",
}

__all__ = [*sorted(_HOMES)]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, _HOMES)
