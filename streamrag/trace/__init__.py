"""Traces of retrieval, recorded or generated: read, write and describe them.

`streamrag.TraceRecorder` records one, and `streamrag.ReplaySource` replays it.
"""

from typing import TYPE_CHECKING

from streamrag.support.lazy_imports import public_names

if TYPE_CHECKING:
    from streamrag.trace.generate import anns as anns
    from streamrag.trace.generate import crawler as crawler
    from streamrag.trace.read import read_trace as read_trace
    from streamrag.trace.statistics import Distribution as Distribution
    from streamrag.trace.statistics import TraceStatistics as TraceStatistics
    from streamrag.trace.statistics import describe as describe
    from streamrag.trace.values import Trace as Trace
    from streamrag.trace.values import TracedAppend as TracedAppend
    from streamrag.trace.values import TracedChunk as TracedChunk
    from streamrag.trace.values import TracedQuery as TracedQuery
    from streamrag.trace.values import TracedSkip as TracedSkip
    from streamrag.trace.values import TracedUpdate as TracedUpdate
    from streamrag.trace.values import stretched as stretched
    from streamrag.trace.write import write_trace as write_trace

if not TYPE_CHECKING:
    __all__, __getattr__ = public_names(__name__)
