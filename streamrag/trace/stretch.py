"""A trace with a slower or faster retrieval."""

from dataclasses import replace

from streamrag.core import Hint
from streamrag.errors import ConfigurationError
from streamrag.trace.values import Trace, TracedEvent, TracedQuery


def stretched(trace: Trace, delay: float) -> Trace:
    """The trace with all times within its queries multiplied by `delay`; arrivals stay.

    :raises ConfigurationError: a delay that is not a positive number.
    """
    if not 0 < delay < float("inf"):
        raise ConfigurationError(f"delay={delay!r} must be a positive number")
    return replace(trace, queries=tuple(_stretched(query, delay) for query in trace.queries))


def _stretched(query: TracedQuery, delay: float) -> TracedQuery:
    return replace(
        query,
        events=tuple(_event(event, delay) for event in query.events),
        skipped=tuple(replace(skip, at_s=skip.at_s * delay) for skip in query.skipped),
        end_s=query.end_s * delay,
    )


def _event(event: TracedEvent, delay: float) -> TracedEvent:
    hint = event.hint
    if hint and hint.end_s is not None:
        hint = Hint(hint.num_chunks, hint.end_s * delay)
    return replace(event, at_s=event.at_s * delay, hint=hint)
