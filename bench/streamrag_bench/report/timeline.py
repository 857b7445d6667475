"""The timeline of a cell, in the Trace Event Format of ui.perfetto.dev and chrome://tracing.

    process "requests"   a track per request:  |--- retrieval ---------------|- answering -|- decode -|
                                               | waiting | prefill |         | prefill     |
                                                         ^ chunk arrived     ^
    process "engine"     track "steps":        | step    | step    | step    | step        |
                         track "copies"        copies of KV between device and host

Slices on one track must nest, so states of a request are cut at the end of retrieval. Names and arguments contain
counts and ids, but no prompt text.

Source: "Trace Event Format", https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from bisect import bisect_left, bisect_right, insort
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, TypeAlias

from streamrag.errors import ConfigurationError
from streamrag.support.versions import __version__
from streamrag_bench.cell import CellResult, RequestResult
from streamrag_bench.grid import describe_cell

ENGINE, REQUESTS = 1, 2  # process ids
STEPS, COPIES_OUT, COPIES_IN = 1, 2, 3  # thread ids of the engine
US_PER_S = 1e6

TimelineEvent: TypeAlias = dict[str, Any]
Arguments: TypeAlias = dict[str, Any]


class _Span(NamedTuple):
    name: str
    start_s: float
    end_s: float
    arguments: Arguments


def make_timeline(result: CellResult) -> dict[str, Any]:
    """Return the timeline as a JSON object, with times in microseconds on the cell's clock.

    :raises ConfigurationError: the result has no steps.
    """
    if not result.steps:
        raise ConfigurationError(
            f"the result of {describe_cell(result.settings)!r} has no steps; run the cell with --keep-steps"
        )
    return {
        "traceEvents": [*_engine_events(result), *_request_events(result)],
        "displayTimeUnit": "ms",
        "otherData": {"streamrag": __version__, "cell": describe_cell(result.settings), "clock": result.settings.clock},
    }


def _engine_events(result: CellResult) -> Iterator[TimelineEvent]:
    """Yield the engine's tracks: one with a slice for each step, and, for each direction in which something was copied,
    one with a slice for each copy."""
    simulated = " (simulated)" if result.settings.clock == "virtual" else ""
    yield _named("process", f"engine{simulated}", ENGINE)
    yield _named("thread", "steps", ENGINE, STEPS)
    for number, step in enumerate(result.steps):
        arguments: Arguments = {"step": number, "num_tokens": step.num_tokens, "num_requests": step.num_requests}
        yield from _slice(_Span("step", step.start_s, step.end_s, arguments), ENGINE, STEPS)
    for direction, thread in (("to-host", COPIES_OUT), ("to-device", COPIES_IN)):
        copies = [copy for copy in result.copies if copy.direction == direction]
        if copies:
            yield _named("thread", f"copies {direction}", ENGINE, thread)
        for copy in copies:
            arguments = {"query_id": copy.query_id, "num_tokens": copy.num_tokens}
            yield from _slice(_Span(f"copy {direction}", copy.start_s, copy.end_s, arguments), ENGINE, thread)


def _request_events(result: CellResult) -> Iterator[TimelineEvent]:
    """Yield a track for each request, with its steps and copies; if steps have no parts, with one span of prefill."""
    yield _named("process", "requests", REQUESTS)
    computed: dict[str, list[_Span]] = {}
    for number, step in enumerate(result.steps):
        for part in step.parts:
            arguments = {"step": number, "num_tokens": part.num_tokens}
            computed.setdefault(part.query_id, []).append(_Span("prefill", step.start_s, step.end_s, arguments))
    copied: dict[str, list[_Span]] = {}
    for copy in result.copies:
        span = _Span(f"copy {copy.direction}", copy.start_s, copy.end_s, {"num_tokens": copy.num_tokens})
        copied.setdefault(copy.query_id, []).append(span)
    for track, request in enumerate(result.requests, start=1):
        yield _named("thread", f"request {request.query_id}", REQUESTS, track)
        yield {"name": "thread_sort_index", "ph": "M", "pid": REQUESTS, "tid": track, "args": {"sort_index": track}}
        steps, copies = computed.get(request.query_id, []), copied.get(request.query_id, [])
        yield from _track(request, track, steps or _without_steps(request), copies)


def _track(request: RequestResult, track: int, steps: list[_Span], copies: list[_Span]) -> Iterator[TimelineEvent]:
    """Yield slices of a request's phases and of its states, cut at phases' ends; marks of chunks and preemptions."""
    phases = [
        _Span("retrieval", request.arrival_s, request.retrieval_end_s, {"num_chunks": request.num_chunks}),
        _Span("answering", request.retrieval_end_s, request.first_token_s, {"floor_s": request.floor_s}),
        _Span("decode", request.first_token_s, request.finished_s, {}),
    ]
    states = _in_order(steps, copies, _pauses(request, steps))
    for phase in phases:
        yield from _slice(phase, REQUESTS, track)
        for state in states:
            start_s, end_s = max(state.start_s, phase.start_s), min(state.end_s, phase.end_s)
            name = "decode step" if (state.name, phase.name) == ("prefill", "decode") else state.name
            yield from _slice(_Span(name, start_s, end_s, state.arguments), REQUESTS, track)
    for chunk in request.record.chunks if request.record else ():
        arguments = {"num_tokens": chunk.num_tokens, "num_invalidated": chunk.num_invalidated}
        yield _instant("chunk", chunk.arrival_s, track, arguments)
    for preemption in request.record.preemptions if request.record else ():
        lost: Arguments = {"fate": preemption.fate, "num_tokens_lost": preemption.num_tokens_lost}
        yield _instant("preemption", preemption.at_s, track, lost)


def _without_steps(request: RequestResult) -> list[_Span]:
    """Return prefill as one span, for engines that do not report the requests of a step; [] if its start is unknown."""
    record = request.record
    if record is None or record.scheduled_s is None:
        return []
    end_s = request.first_token_s if record.last_kv_s is None else record.last_kv_s
    return [_Span("prefill", record.scheduled_s, end_s, {"num_tokens": record.num_computed})]


def _pauses(request: RequestResult, steps: list[_Span]) -> list[_Span]:
    """Return the spans in which the request had work but no step, "preempted" up to its next step, else "waiting"."""
    record = request.record
    chunks = [chunk.arrival_s for chunk in record.chunks] if record else []
    preemptions = {preemption.at_s for preemption in record.preemptions} if record else set()
    # The request has work from each of these times until its last step before the next one.
    marks = sorted({*chunks, *preemptions, request.retrieval_end_s})
    pauses = []
    for mark_s, next_s in zip(marks, [*marks[1:], request.first_token_s], strict=True):
        name = "preempted" if mark_s in preemptions else "waiting"
        free_s = mark_s
        for step in (step for step in steps if step.end_s > mark_s and step.start_s < next_s):
            pauses.append(_Span(name, free_s, step.start_s, {}))
            free_s, name = step.end_s, "waiting"
        if free_s == mark_s:  # no step
            pauses.append(_Span(name, free_s, next_s, {}))
    return pauses


def _in_order(*layers: Iterable[_Span]) -> list[_Span]:
    """Return the spans of all layers in order of time, cut so that earlier layers hide later ones."""
    flat: list[_Span] = []
    for layer in layers:
        for span in layer:
            first = bisect_right(flat, span.start_s, key=lambda other: other.end_s)
            last = bisect_left(flat, span.end_s, key=lambda other: other.start_s)
            free_s, pieces = span.start_s, []
            for other in flat[first:last]:
                pieces.append(span._replace(start_s=free_s, end_s=other.start_s))
                free_s = other.end_s
            pieces.append(span._replace(start_s=free_s))
            for piece in pieces:
                if piece.end_s > piece.start_s:
                    insort(flat, piece, key=lambda other: other.start_s)
    return flat


def _named(what: str, name: str, process: int, thread: int = 0) -> TimelineEvent:
    return {"name": f"{what}_name", "ph": "M", "pid": process, "tid": thread, "args": {"name": name}}


def _slice(span: _Span, process: int, thread: int) -> Iterator[TimelineEvent]:
    """Yield a complete event, unless it is empty. Rounding both ends keeps adjacent slices from overlapping."""
    start_us, end_us = (round(s * US_PER_S, 3) for s in (span.start_s, span.end_s))
    if end_us > start_us:
        times = {"ts": start_us, "dur": round(end_us - start_us, 3)}
        yield {"name": span.name, "ph": "X", **times, "pid": process, "tid": thread, "args": span.arguments}


def _instant(name: str, at_s: float, track: int, arguments: Arguments) -> TimelineEvent:
    ts = round(at_s * US_PER_S, 3)
    return {"name": name, "ph": "i", "s": "t", "ts": ts, "pid": REQUESTS, "tid": track, "args": arguments}
