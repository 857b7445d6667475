"""Traces of any shape, for hypothesis."""

from hypothesis import strategies as st

from streamrag.core import Hint
from streamrag.trace.values import (
    Trace,
    TracedAppend,
    TracedChunk,
    TracedEvent,
    TracedQuery,
    TracedSkip,
    TracedUpdate,
)

texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
times = st.integers(0, 10_000_000).map(lambda microseconds: microseconds / 1e6)
scores = st.none() | st.floats(-1, 1)
hints = st.none() | st.builds(Hint, st.none() | st.integers(0, 9), st.none() | times)


@st.composite
def chunks(draw: st.DrawFn) -> TracedChunk:
    """What a key stands for depends on the key alone; the score is each event's own."""
    number = draw(st.integers(0, 9))
    text = None if number % 2 else f"text\n{number} \u2028"
    return TracedChunk(
        f"key-{number}",
        number * 7,
        text,
        f"https://x/{number}",
        f"Title {number}",
        number,
        draw(scores),
        num_chars=None if text else number,
    )


@st.composite
def queries(draw: st.DrawFn, query_id: str) -> TracedQuery:
    moments = sorted(draw(st.lists(times, max_size=6)))
    events: list[TracedEvent] = []
    skipped = []
    for at_s in moments[:-1]:
        match draw(st.integers(0, 2)):
            case 0:
                events.append(TracedAppend(at_s, draw(chunks()), draw(hints)))
            case 1:
                events.append(TracedUpdate(at_s, tuple(draw(st.lists(chunks(), max_size=4))), draw(hints)))
            case _:
                skipped.append(TracedSkip(at_s, draw(texts), draw(texts)))
    return TracedQuery(
        query_id,
        draw(times),
        draw(texts),
        tuple(events),
        moments[-1] if moments else 0.0,
        draw(st.none() | st.integers(0, 99)),
        tuple(skipped),
        draw(st.sampled_from(["complete", "failed", "cancelled"])),
        draw(texts),
        draw(st.none() | texts),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    made = [draw(queries(f"q{number}")) for number in range(draw(st.integers(1, 4)))]
    return Trace(tuple(sorted(made, key=lambda query: query.arrival_s)), {"made by": "hypothesis"})
