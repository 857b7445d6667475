"""A picture of what happened in queries: when they retrieved, prefilled and answered."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streamrag.telemetry import (
    Answered,
    ChunkArrived,
    ContextChanged,
    DraftChanged,
    PrefillProgressed,
    QueryEvent,
    TokensGenerated,
)

RETRIEVAL, PREFILL, DECODE, DRAFT = "#8fb8de", "#f4a259", "#5b8e7d", "#d3d3d3"


@dataclass(frozen=True, slots=True)
class QueryRow:
    """A row of a timeline: a label, and the events of a query that ran to its end."""

    label: str
    events: Sequence[QueryEvent]


def prefill_spans(events: Sequence[QueryEvent]) -> list[tuple[float, float]]:
    """Return when the backend had prompt tokens to prefill, as (start, end) in seconds from the query.

    A span begins with a prompt that went to the backend, and ends when the backend reports progress on it, or with the
    first token of the answer.
    """
    spans: list[tuple[float, float]] = []
    start_s: float | None = None
    for event in events:
        if isinstance(event, ContextChanged):
            start_s = event.at_s if start_s is None else start_s
        elif start_s is not None and isinstance(event, PrefillProgressed | TokensGenerated):
            spans.append((start_s, event.at_s))
            start_s = None
    return spans


def draw_queries(groups: Sequence[tuple[str, Sequence[QueryRow]]], *, title: str) -> Any:
    """Return a matplotlib figure with one row a query: retrieval with its chunks, prefill, decode, drafts; one panel a
    group."""
    from matplotlib.figure import Figure as Canvas
    from matplotlib.patches import Patch

    heights = [len(rows) for _, rows in groups]
    figure = Canvas(figsize=(11, 1.6 + 0.34 * sum(heights) + 0.75 * len(groups)), layout="constrained", dpi=120)
    figure.suptitle(title, x=0.01, ha="left", fontsize=13, fontweight="bold")
    panels = figure.subplots(len(groups), 1, sharex=True, squeeze=False, gridspec_kw={"height_ratios": heights})
    for panel, (name, rows) in zip(panels[:, 0], groups, strict=True):
        panel.set_title(name, loc="left", fontsize=10)
        for y, row in enumerate(rows):
            _draw_row(panel, y, row)
        panel.set_yticks(range(len(rows)), [row.label for row in rows], fontsize=8)
        panel.set_ylim(len(rows) - 0.4, -0.6)
        panel.spines[["top", "right", "left"]].set_visible(False)
        panel.tick_params(axis="y", length=0)
        panel.grid(axis="x", color="#dddddd", linewidth=0.6)
        panel.set_axisbelow(True)
    panels[-1, 0].set_xlabel("seconds from the query")
    panels[-1, 0].set_xlim(left=0)
    has_drafts = any(isinstance(event, DraftChanged) for _, rows in groups for row in rows for event in row.events)
    legend: list[Any] = [
        Patch(color=RETRIEVAL, label="retrieval (a tick for each chunk)"),
        Patch(color=PREFILL, label="prefill"),
        Patch(color=DECODE, label="decode"),
        *([Patch(color=DRAFT, label="provisional answer (a tick for each change)")] if has_drafts else []),
    ]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False, fontsize=9)
    return figure


def _draw_row(panel: Any, y: int, row: QueryRow) -> None:
    answered = row.events[-1]
    assert isinstance(answered, Answered)
    timings = answered.answer.timings
    panel.barh(y - 0.2, timings.retrieval_s, height=0.34, color=RETRIEVAL)
    ticks = sorted({event.at_s for event in row.events if isinstance(event, ChunkArrived)})
    panel.vlines(ticks, y - 0.37, y - 0.03, color="#35618e", linewidth=0.9)
    for start_s, end_s in prefill_spans(row.events):
        panel.barh(y + 0.17, end_s - start_s, left=start_s, height=0.34, color=PREFILL)
    panel.barh(y + 0.17, timings.total_s - timings.ttft_s, left=timings.ttft_s, height=0.34, color=DECODE)
    changes = [event.at_s for event in row.events if isinstance(event, DraftChanged)]
    if changes:
        panel.barh(y + 0.4, timings.retrieval_s - changes[0], left=changes[0], height=0.12, color=DRAFT)
        panel.vlines(changes, y + 0.34, y + 0.46, color="#808080", linewidth=0.6)
    last_s = timings.total_s - timings.retrieval_s
    panel.annotate(
        f" first token {timings.ttft_after_retrieval_s:.2f} s after retrieval, last {last_s:.2f} s",
        (timings.total_s, y),
        va="center",
        fontsize=7,
        color="#444444",
    )
