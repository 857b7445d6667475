"""Hints for generated workloads; docs/traces.md has the assumptions.

estimated   for a crawl: queued pages times the mean gap so far; for a search: the mean duration minus the elapsed time
exact       the actual end of retrieval: an oracle that shows the maximum gain
"""

from dataclasses import replace
from typing import Literal, TypeAlias

from streamrag.core import Hint
from streamrag.trace.values import Trace, TracedAppend, TracedQuery

HintKind: TypeAlias = Literal["estimated", "exact"]

USUAL_GAP_S = 1.053  # published mean gap between a crawl's pages, as a prior that counts as one gap
USUAL_DURATION_S = 4.47  # published mean duration of a search


def with_hints(trace: Trace, kind: HintKind) -> Trace:
    """Return the trace with new hints of this kind in place of its own."""
    return Trace(tuple(_hinted(query, kind) for query in trace.queries), {**trace.provenance, "hints": kind})


def _hinted(query: TracedQuery, kind: HintKind) -> TracedQuery:
    events = (replace(event, hint=_hint(query, index, kind)) for index, event in enumerate(query.events))
    return replace(query, events=tuple(events))


def _hint(query: TracedQuery, index: int, kind: HintKind) -> Hint:
    """Return the hint after a query's event: the exact number of events and seconds that are left, or an estimate.

    For an append, estimate only the seconds: the number times the mean gap so far. For an update, give no number, and
    as seconds the rest of the usual duration, at least 0.
    """
    event = query.events[index]
    num_left = len(query.events) - 1 - index
    if kind == "exact":
        return Hint(num_left, query.end_s - event.at_s)
    if not isinstance(event, TracedAppend):
        # A search knows how many probes remain, but not which of them will change its result.
        return Hint(None, max(USUAL_DURATION_S - event.at_s, 0.0))
    gap_s = (USUAL_GAP_S + event.at_s - query.events[0].at_s) / (1 + index)
    return Hint(num_left, num_left * gap_s)
