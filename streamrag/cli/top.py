"""`streamrag top`: a live view of a running service."""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import httpx
from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streamrag.cli.option_types import seconds
from streamrag.cli.output import Output, markup
from streamrag.display_text import one_line
from streamrag.errors import ConfigurationError, StreamRagError
from streamrag.support.messages import message_of

DESCRIPTION = """\
Shows a running service's open queries with their phases, its memory, its rates
and its times to the first token. Ctrl-C ends it.
"""
EPILOG = """\
examples:
  streamrag top
  streamrag top --url http://10.0.0.5:8080 --key KEY
  streamrag top --once --json                                               one snapshot, for programs

`streamrag serve` has this view, with questions if its settings allow them. Your own server needs the observer
`streamrag.serve.Live`.
"""

KEY = "STREAMRAG_API_KEY"
"""Environment variable with the API key."""
TIMEOUT_S = 5.0
NARROW = 100  # width in columns below which less of each query is shown

UNKNOWN = "?"
"""Stands for a number of tokens that the model's server does not report."""

STYLES = {"queued": "yellow", "retrieving": "cyan", "prefilling": "magenta", "answering": "green", "answered": "green"}


class NoAnswerError(StreamRagError):
    """The service did not return a snapshot."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.usage = "%(prog)s [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="address of the service (%(default)s)")
    parser.add_argument("--key", help=f"API key of the service ({KEY} in the environment)")
    parser.add_argument("--interval", type=seconds, default=1.0, metavar="S", help="refresh interval (%(default)s)")
    parser.add_argument("--once", action="store_true", help="print one snapshot, and exit")
    parser.add_argument("--json", action="store_true", help="with --once: print the service's JSON")
    parser.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    """Return 0 after one snapshot, as JSON if asked, or after Ctrl-C in the view.

    :raises ConfigurationError: the URL is invalid, or --json lacks --once.
    :raises NoAnswerError: with --once, there is no snapshot.
    """
    if arguments.json and not arguments.once:
        raise ConfigurationError("--json needs --once: only a snapshot can be printed as JSON")
    key = arguments.key or os.environ.get(KEY)
    headers = {"authorization": f"Bearer {key}"} if key else {}
    output = Output()
    try:
        client = httpx.Client(base_url=arguments.url, headers=headers, timeout=TIMEOUT_S)
    except (httpx.InvalidURL, ValueError) as error:
        raise ConfigurationError(f"--url {arguments.url}: {error}") from error
    with client:
        if arguments.once:
            snapshot = look(client)
            if arguments.json:
                output.print_json_text(snapshot)
            else:
                output.print(render(snapshot, width=output.width))
            return 0
        with suppress(KeyboardInterrupt):
            watch(client, output, arguments.interval)
    return 0


def watch(
    client: httpx.Client, output: Output, interval_s: float, *, sleep: Callable[[float], None] = time.sleep
) -> None:
    """Refresh the view until KeyboardInterrupt, which is raised. Show a NoAnswerError above the old view, and retry."""
    snapshot: Mapping[str, Any] | None = None
    with Live(console=output, screen=output.is_terminal, auto_refresh=False) as live:
        while True:
            try:
                snapshot, problem = look(client), None
            except NoAnswerError as error:
                problem = str(error)
            parts = [] if snapshot is None else [render(snapshot, width=output.width, height=output.height - 2)]
            if problem:
                stale = "  the figures below are old" if snapshot else ""
                parts.insert(0, markup("[red]{}[/]  trying again" + stale, problem))
            live.update(Group(*parts), refresh=True)
            sleep(interval_s)


def look(client: httpx.Client) -> Mapping[str, Any]:
    """Return a snapshot from the service; raise NoAnswerError, with the reason, for any other answer or none."""
    try:
        answer = client.get("/v1/live")
        if answer.status_code == 404:
            raise NoAnswerError(
                f"{client.base_url} has no live view: `streamrag serve` has one, other servers need its observer Live"
            )
        if answer.status_code == 401:
            raise NoAnswerError(f"{client.base_url} requires an API key: --key KEY, or {KEY} in the environment")
        if answer.status_code == 403:
            raise NoAnswerError(f"{client.base_url} has a live view for operators only; this key is not an operator's")
        answer.raise_for_status()
        values = answer.json()
        if not isinstance(values, dict) or "open" not in values:
            raise NoAnswerError(f"{client.base_url} is not a streamrag service")
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise NoAnswerError(f"{client.base_url} does not answer: {message_of(error)}") from error
    return values


def render(values: Mapping[str, Any], *, width: int, height: int = 10_000) -> RenderableType:
    """Return a snapshot in `width` columns and about `height` lines, the rest cut: head, open queries, ended queries.

    Ended queries have priority for a third of the lines. One line counts all open queries that are not shown.
    """
    head = _head(values)
    room = max(height - len(head) - 4, 3)
    opened, ended = values["open"], values["ended"]
    num_ended = min(len(ended), max(room // 3, room - len(opened), 1))
    num_open = max(room - num_ended, 1)
    parts: list[RenderableType] = [*head, _queries(opened[:num_open], width=width)]
    if (num_more := values["num_open"] - min(len(opened), num_open)) > 0:
        parts.append(markup("[dim]and {} more", num_more))
    if ended:
        parts += [Text(), Text("ended, the last first", style="dim"), _queries(ended[:num_ended], width=width)]
    return Group(*parts)


def _head(values: Mapping[str, Any]) -> list[Text]:
    """Return the lines above the queries: state, limits, rates, `_times_and_overlap`, `_memory`, and a blank."""
    state = "[green]ready[/]" if values["is_ready"] else "[red]not ready[/]"
    state = "[yellow]stopping[/]" if values["is_draining"] else state
    minute, total = values["minute"], values["total"]
    by_reason = ", ".join(f"{num} {why}" for why, num in values["refused"].items())
    restarts = f", [red]{values['num_restarts']} restarts of the engine[/]" if values["num_restarts"] else ""
    lines = [
        markup(f"[bold]{{}}[/]  {state}, up {{}}{restarts}", values["model"], _span(values["uptime_s"])),
        markup(
            "{} of {} queries open, {} of {} tokens queued",
            values["num_open"],
            values["max_queries"],
            f"{values['num_queued_tokens']:,}",
            f"{values['max_queued_tokens']:,}",
        ),
        markup(
            "last minute: {} started, {} ended, {} answered, {} refused, {} tokens/s{}",
            minute["started"],
            minute["ended"],
            minute["answered"],
            minute["refused"],
            f"{minute['output_tokens'] / 60:.1f}",
            f" without {num} answers of unknown length" if (num := minute.get("uncounted")) else "",
        ),
        markup(
            "in all: {} ended, {} answered, {} refused{}",
            total["ended"],
            total["answered"],
            total["refused"],
            f" ({by_reason})" if by_reason else "",
        ),
    ]
    return [*lines, *_times_and_overlap(values), *_memory(values["kv"]), Text()]


def _times_and_overlap(values: Mapping[str, Any]) -> Iterator[Text]:
    """Yield a line for each of the two times to the first token, and one on the newest overlap, as far as known."""
    for name, label in (("ttft_s", "ttft"), ("ttft_after_retrieval_s", "after retrieval")):
        if values[name]:
            shares = ", ".join(f"{share} {_short(at_s)}" for share, at_s in values[name].items())
            yield markup("{}: {}", label, shares)
    newest = next((query for query in (*values["open"][::-1], *values["ended"]) if query.get("overlap")), None)
    if newest is not None:
        yield markup("overlap: {}, {}", newest["overlap"], newest["overlap_reason"])


def _memory(kv: Mapping[str, Any] | None) -> list[Text]:
    """Return a line on the tokens of running, waiting and idle requests, and one on host memory if any; [] for None."""
    if kv is None:
        return []
    states = ", ".join(f"{name} {kv[name]['num_tokens']:,}" for name in ("running", "waiting", "idle"))
    lines = [Text(f"KV: {states} of {kv['num_capacity']:,} tokens")]
    if kv["num_host_capacity"]:
        lines.append(Text(f"host memory: {kv['num_host']:,} of {kv['num_host_capacity']:,} tokens"))
    return lines


COLUMNS = {
    "id": 12,
    "by": 9,
    "client": 12,
    "doing": 13,
    "age": 7,
    "ttft": 7,
    "overlap": 9,
    "chunks": 6,
    "prompt": 7,
    "prefilled": 9,
}
COLUMNS |= {"answer": 6, "question": 0}
"""Columns with their widths; the question has the remaining width."""
WIDE_ONLY = ("by", "client", "ttft", "overlap", "chunks", "question")
FIGURES = ("age", "ttft", "chunks", "prompt", "prefilled", "answer")


def _queries(queries: Sequence[Mapping[str, Any]], *, width: int) -> Table:
    """Return a table of queries, with fewer columns if `width` is below NARROW.

    The column of questions is left out as well if no query has its text, or if less than 8 characters are left for it.
    """
    names = [name for name in COLUMNS if width >= NARROW or name not in WIDE_ONLY]
    left = width - sum(COLUMNS[name] + 1 for name in names)
    if left < 8 or not any("text" in query for query in queries):
        names = [name for name in names if name != "question"]
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False, header_style="dim")
    for name in names:
        justify: Literal["left", "right"] = "right" if name in FIGURES else "left"
        table.add_column(name, width=COLUMNS[name] or left, justify=justify, no_wrap=True)
    for query in queries:
        cells = _cells(query)
        table.add_row(*(cells[name] for name in names))
    return table


def _cells(query: Mapping[str, Any]) -> dict[str, Text]:
    """Return every column's text for one query by the column's name; "?" for unknown tokens, "-" for unknown times."""
    doing = query.get("outcome", query["phase"])
    num_prompt, num_prefilled = query["num_prompt_tokens"], query["num_prefilled"]
    texts = {
        "id": query["id"],
        "by": query["interface"],
        "client": query["client"],
        "age": _short(query["age_s"]),
        "ttft": _short(query["ttft_s"]),
        "overlap": query.get("overlap") or "",
        "chunks": str(query["num_chunks"]),
        "prompt": _count(num_prompt),
        "prefilled": UNKNOWN if num_prefilled is None else f"{num_prefilled / (num_prompt or 1):.0%}",
        "answer": _count(query["num_output_tokens"]),
        "question": query.get("text", ""),
    }
    style = STYLES.get(doing, "red" if doing.endswith("error") else "dim")
    return {"doing": Text(one_line(doing), style=style), **{name: Text(one_line(text)) for name, text in texts.items()}}


def _count(num: int | None) -> str:
    return UNKNOWN if num is None else f"{num:,}"


def _short(at_s: float | None) -> str:
    if at_s is None:
        return "-"
    return f"{at_s * 1e3:.0f} ms" if at_s < 1 else f"{at_s:.1f} s"


def _span(seconds: float) -> str:
    """Format a duration in its two largest units of days, hours and minutes; less than a minute in seconds."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, _ = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h" if days else f"{hours} h {minutes} min" if hours else f"{minutes} min"
