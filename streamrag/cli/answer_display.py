"""Display of a query in a terminal: arriving chunks, prefill progress, and the answer."""

from collections.abc import AsyncIterable

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.text import Text

from streamrag.cli.output import markup
from streamrag.cli.progress import bar
from streamrag.display_text import sanitize
from streamrag.telemetry import (
    Answer,
    Answered,
    ChunkArrived,
    ChunksLeftOut,
    ChunksShortened,
    ContextChanged,
    ContextComplete,
    DocumentSkipped,
    PrefillProgressed,
    QueryEvent,
    RetrievalCutShort,
    RetrievalStarted,
    SourceFailed,
    TokensGenerated,
)


async def watch(events: AsyncIterable[QueryEvent], console: Console, *, answer_to: Console | None = None) -> Answer:
    """Print a query's events as they arrive, with a bar of prefill until the first token, and return its answer.

    Progress goes to `console`. The answer's text goes to `answer_to`, by default the same, so that it can be redirected
    separately.
    """
    columns = (BarColumn(bar_width=30), MofNCompleteColumn(), TextColumn("[dim]tokens"))
    progress = bar(console, TextColumn("         [dim]prefill"), *columns, transient=True)
    answer: Answer | None = None
    output = answer_to or console
    num_chunks = 0
    with progress:
        prefill = progress.add_task("prefill", total=None)
        async for event in events:
            match event:
                case ContextChanged():
                    progress.update(prefill, total=event.num_tokens, completed=event.num_shared)
                case PrefillProgressed():
                    progress.update(prefill, completed=event.num_tokens)
                case TokensGenerated():
                    if progress.live.is_started:
                        progress.stop()
                        console.print(_line(event.at_s, "[bold]answer"))
                    output.out(sanitize(event.text), end="", highlight=False)
                case Answered():
                    answer = event.answer
                    output.print()
            line = _describe(event)
            if isinstance(event, ContextChanged):  # hide changes without a new chunk
                line = line if event.num_invalidated or event.num_chunks != num_chunks else None
                num_chunks = event.num_chunks
            if line:
                console.print(line, soft_wrap=True)
    assert answer is not None, "every event stream ends with Answered, or raises"
    return answer


def _line(at_s: float, template: str, *values: object) -> Text:
    return markup(f"[dim]{at_s:7.2f} s[/] {template}", *values)


def _describe(event: QueryEvent) -> Text | None:
    """Return the line that describes an event, with its time; None for events that need no line, such as tokens."""
    match event:
        case RetrievalStarted():
            way = f"; overlap {event.overlap.way}, {event.overlap.reason}" if event.overlap else ""
            return _line(event.at_s, "retrieving for {}[dim]{}", repr(event.query), way)
        case ChunkArrived():
            chunk = event.chunk
            title = f"{chunk.title[:60]}  " if chunk.title else ""
            return _line(event.at_s, "[cyan]+[/] {}[dim]{}#{}", title, chunk.uri, chunk.passage)
        case DocumentSkipped():
            return _line(event.at_s, "[yellow]-[/] [dim]{}: {}", event.uri, event.reason)
        case RetrievalCutShort():
            return _line(event.at_s, "[yellow]retrieval was cut short:[/] {}", event.reason)
        case SourceFailed():
            return _line(event.at_s, "[red]retrieval failed:[/] {}", event.error)
        case ContextChanged():
            changed = f", {event.num_invalidated} invalidated" if event.num_invalidated else ""
            return _line(
                event.at_s,
                f"  [dim]context of {event.num_chunks} chunks, {event.num_tokens} {event.unit}: "
                f"{event.num_shared} shared with the last{changed}",
            )
        case ChunksLeftOut() | ChunksShortened():
            what = "left out of" if isinstance(event, ChunksLeftOut) else "shortened for"
            names = ", ".join(f"{chunk.uri}#{chunk.passage}" for chunk in event.chunks)
            return _line(event.at_s, f"[yellow]{what}[/] the budget of {event.max_context_tokens} tokens: {{}}", names)
        case ContextComplete() if event.num_chunks == 0:
            return _line(event.at_s, "[yellow]retrieval complete: the answer has no context")
        case ContextComplete():
            return _line(event.at_s, f"retrieval complete: {event.num_chunks} chunks, {event.num_tokens} {event.unit}")
    return None


def print_sources(answer: Answer, console: Console) -> None:
    """Print warnings of a missing context or a retrieval cut short; then the citations with titles, URIs and scores."""
    if not answer.has_context:
        console.print(markup("[yellow]This answer had no context."))
    for reason in (answer.source_error, answer.cut_short):
        if reason is not None:
            console.print(markup("[yellow]Documents may be missing: retrieval was cut short: {}", reason))
    for citation in answer.citations:
        score = "" if citation.score is None else f"  {citation.score:.3f}"
        title = f"{citation.title}  " if citation.title else ""
        console.print(markup("{} {}[dim]{}{}", f"[{citation.number}]", title, citation.uri, score), soft_wrap=True)


def print_timings(answer: Answer, console: Console) -> None:
    """Print a line with the answer's times, and its prompt, invalidated and generated tokens, perhaps "unknown"."""
    timings = answer.timings
    console.print(
        markup(
            f"[dim]retrieval {timings.retrieval_s:.2f} s, ttft_s {timings.ttft_s:.2f}, "
            f"ttft_after_retrieval_s {timings.ttft_after_retrieval_s:.2f}, total {timings.total_s:.2f} s; "
            f"{_tokens(answer.usage.num_prompt_tokens, 'prompt tokens')}, {answer.num_invalidated} "
            f"{'' if answer.unit == 'tokens' else 'characters '}invalidated on the way, "
            f"{_tokens(answer.usage.num_output_tokens, 'generated')}"
        ),
        soft_wrap=True,
    )


def _tokens(number: int | None, what: str) -> str:
    return f"unknown {what}" if number is None else f"{number} {what}"
