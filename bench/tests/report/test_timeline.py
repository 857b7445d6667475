"""Timelines, held against the Trace Event Format."""

import json
from collections import defaultdict
from dataclasses import replace
from typing import Annotated, Any, Literal

import pytest
from made import made_result, settings
from pydantic import BaseModel, ConfigDict, Discriminator, Field, NonNegativeFloat, TypeAdapter

from streamrag.errors import ConfigurationError
from streamrag.records import ChunkRecord, PreemptionRecord, RequestRecord
from streamrag_bench.cell import CellResult, CopyResult, RequestResult, StepPart, StepResult
from streamrag_bench.report.timeline import make_timeline


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    pid: int
    tid: int
    args: dict[str, str | int | float]


class Complete(_Strict):
    ph: Literal["X"]
    name: str
    ts: NonNegativeFloat
    dur: float = Field(gt=0)


class Instant(_Strict):
    ph: Literal["i"]
    name: str
    ts: NonNegativeFloat
    s: Literal["t"]


class Metadata(_Strict):
    ph: Literal["M"]
    name: Literal["process_name", "thread_name", "thread_sort_index"]


class TraceFile(BaseModel):
    """The object form of the format, with the kinds of events that we use.

    Source: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
    """

    model_config = ConfigDict(extra="forbid")
    traceEvents: list[Annotated[Complete | Instant | Metadata, Discriminator("ph")]]
    displayTimeUnit: Literal["ms", "ns"]
    otherData: dict[str, str]


def timeline_of(result: CellResult) -> dict[str, Any]:
    """As a viewer reads it."""
    return json.loads(json.dumps(make_timeline(result), allow_nan=False))  # type: ignore[no-any-return]


def slices(timeline: dict[str, Any], track: str) -> list[tuple[str, float, float]]:
    """(name, start, end) in milliseconds of one track."""
    (at,) = [(e["pid"], e["tid"]) for e in timeline["traceEvents"] if e["ph"] == "M" and e["args"].get("name") == track]
    own = [e for e in timeline["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == at]
    return [(e["name"], round(e["ts"] / 1e3, 3), round((e["ts"] + e["dur"]) / 1e3, 3)) for e in own]


def one_request() -> CellResult:
    """Two chunks, a step for each, a preemption between, a copy back, two tokens of answer."""
    record = RequestRecord(
        request_id="a",
        outcome="finished",
        is_stream=True,
        arrival_s=1.0,
        queued_s=1.0,
        scheduled_s=1.2,
        first_kv_s=1.3,
        last_kv_s=2.6,
        finished_s=2.8,
        num_prompt_tokens=300,
        num_output_tokens=2,
        num_computed=300,
        num_recomputed=0,
        num_invalidated=0,
        num_from_cache=0,
        chunks=(ChunkRecord(1.1, 100, 0, 0), ChunkRecord(2.0, 300, 100, 100)),
        preemptions=(PreemptionRecord(1.5, "swap", 100),),
    )
    request = RequestResult("a", 1.0, 2.1, 2.6, 2.8, 2, 0.4, record)
    steps = tuple(
        StepResult(start_s, end_s, num, 1, (StepPart("a", num),))
        for start_s, end_s, num in [(1.2, 1.3, 100), (2.05, 2.3, 100), (2.4, 2.6, 100), (2.7, 2.8, 1)]
    )
    copies = (CopyResult("a", "to-host", 1.5, 1.6, 100), CopyResult("a", "to-device", 2.0, 2.02, 100))
    return CellResult(settings(), (request,), 0.65, 2.8, 0.1, steps, copies)


def test_a_request_is_told_from_its_arrival_to_its_last_token() -> None:
    shown = slices(timeline_of(one_request()), "request a")
    assert shown == [
        ("retrieval", 1000, 2100),
        ("waiting", 1100, 1200),
        ("prefill", 1200, 1300),
        ("copy to-host", 1500, 1600),
        ("preempted", 1600, 2000),
        ("copy to-device", 2000, 2020),
        ("waiting", 2020, 2050),
        ("prefill", 2050, 2100),  # cut where retrieval ends
        ("answering", 2100, 2600),
        ("prefill", 2100, 2300),
        ("waiting", 2300, 2400),
        ("prefill", 2400, 2600),
        ("decode", 2600, 2800),
        ("decode step", 2700, 2800),
    ]


def test_the_engine_has_a_track_of_steps_and_of_copies_each_way() -> None:
    timeline = timeline_of(one_request())
    assert [start for _, start, _ in slices(timeline, "steps")] == [1200, 2050, 2400, 2700]
    assert slices(timeline, "copies to-host") == [("copy to-host", 1500, 1600)]
    assert slices(timeline, "copies to-device") == [("copy to-device", 2000, 2020)]
    moments = [(e["name"], e["ts"] / 1e6) for e in timeline["traceEvents"] if e["ph"] == "i"]
    assert moments == [("chunk", 1.1), ("chunk", 2.0), ("preemption", 1.5)]


@pytest.mark.parametrize("workload", ["crawler", "anns"])
def test_every_event_has_the_form_that_viewers_read(workload: str) -> None:
    result = made_result(settings(workload=workload, eviction="cost"), with_steps=True)
    timeline = timeline_of(result)
    TypeAdapter(TraceFile).validate_python(timeline)
    assert {event["ph"] for event in timeline["traceEvents"]} >= {"X", "i", "M"}


def test_slices_of_a_track_nest() -> None:
    result = made_result(settings(workload="anns", eviction="cost", num_queries=200), with_steps=True)
    tracks = defaultdict(list)
    for event in timeline_of(result)["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == 2:
            tracks[event["tid"]].append((event["ts"], -event["dur"]))
    assert len(tracks) == 200
    for track in tracks.values():
        ends: list[float] = []
        for start, minus_duration in sorted(track):
            while ends and ends[-1] <= start + 1e-3:
                ends.pop()
            end = start - minus_duration
            assert not ends or end <= ends[-1] + 1e-3
            ends.append(end)


def test_an_engine_that_does_not_tell_who_was_in_a_step_still_has_a_timeline() -> None:
    result = one_request()
    coarse = replace(result, steps=tuple(replace(step, parts=()) for step in result.steps))
    names = {name for name, _, _ in slices(timeline_of(coarse), "request a")}
    assert {"retrieval", "waiting", "prefill", "decode"} <= names
    silent = replace(coarse, requests=(replace(coarse.requests[0], record=None),), copies=())
    assert slices(timeline_of(silent), "request a")[0] == ("retrieval", 1000, 2100)


def test_a_result_without_steps_is_refused() -> None:
    with pytest.raises(ConfigurationError, match="--keep-steps"):
        make_timeline(made_result(settings()))


def test_a_simulated_engine_is_called_so() -> None:
    for clock, name in (("virtual", "engine (simulated)"), ("wall", "engine")):
        result = replace(one_request(), settings=settings(clock=clock, profile=None))
        first, *_ = timeline_of(result)["traceEvents"]
        assert first["args"]["name"] == name
