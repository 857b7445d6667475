"""The options of `streamrag bench`, and the cells that they name."""

import argparse
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from streamrag.backends.vllm.client.arguments import EvictionMode, default_eviction
from streamrag.bench.cell import ARMS
from streamrag.bench.grid import Grid
from streamrag.bench.summary import LIMITS
from streamrag.engine.costs import load_profile

__all__ = ["add_parsers", "grid_of"]

T = TypeVar("T")

DEFAULT_PROFILE = "h200-llama8b-tp2"
TIMELINE_QUERIES = 50

SIMULATE = """\
examples:
  streamrag bench simulate --workload crawler --qps 1,2,4 --policy arrival,fcfs,lcas,mcps --seeds 1,2,3
  streamrag bench simulate --workload anns --qps 2 --delay 1,30 --kv-tokens 200000,1680000 --queries 200
  streamrag bench simulate --workload crawler --qps 4 --delay 14 --kv-tokens 840000 --eviction recompute,swap,cost
  streamrag bench simulate --workload my-crawl.jsonl.gz --arms no-streaming,warming,streaming
  streamrag bench simulate --workload crawler --qps 4 --slo ttft_after_retrieval_s=0.5 --json cells.json

Every combination of the lists is a cell. A cell that is finished stays: the same command again runs the others only.
"""
RUN = """\
examples:
  streamrag bench run --workload traces/crawl-python-docs.jsonl.gz --model ./Llama-3.1-8B-Instruct
  streamrag bench run --workload crawler --qps 0.5 --queries 20 --model ./Llama-3.1-8B-Instruct --seeds 1,2,3

Every combination of the lists is a cell. A cell that is finished stays: the same command again runs the others only.
"""
REPORT = """\
example:
  streamrag bench report bench-results/simulate-crawler --slo ttft_after_retrieval_s=0.5,total_s=30
"""
TIMELINE = """\
examples:
  streamrag bench timeline --workload crawler --qps 4 --policy fcfs --queries 50 --output fcfs.json
  streamrag bench simulate --workload crawler --qps 4 --arms streaming --seeds 1 --queries 200 --keep-steps
  streamrag bench timeline bench-results/simulate-crawler --output fcfs.json

Open the file at https://ui.perfetto.dev (it stays on your machine), or in Chrome at chrome://tracing.
"""


def add_parsers(
    commands: "argparse._SubParsersAction[argparse.ArgumentParser]",
) -> dict[str, argparse.ArgumentParser]:
    """Describe `bench` to the program's parser; returns the parser of each verb."""
    bench = commands.add_parser(
        "bench",
        help="compare ways of serving a load",
        description="Puts a load on a simulated or a real engine, and reports what came of it.",
    )
    verbs = bench.add_subparsers(metavar="VERB", required=True, dest="verb")

    def add(verb: str, help: str, description: str, epilog: str) -> argparse.ArgumentParser:
        return verbs.add_parser(
            verb,
            help=help,
            description=description,
            epilog=epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

    simulate = add("simulate", "in virtual time", "vLLM's own scheduler in virtual time; no model runs.", SIMULATE)
    run = add("run", "on the real engine", "The load on a real engine, in wall time.", RUN)
    report = add("report", "rebuild a report", "Rebuilds the report of the cells in a folder.", REPORT)
    about = "Writes one cell as a timeline: a track for each request, one for the engine's steps."
    timeline = add("timeline", "one cell, step by step", about, TIMELINE)

    for parser, seeds in ((simulate, None), (run, [1])):
        _add_load(parser, required=True)
        _add_what(parser, arms=["no-streaming", "streaming"], seeds=seeds)
        _add_output(parser)
    _add_profile(simulate)
    simulate.set_defaults(model=None)
    run.add_argument("--model", required=True, metavar="MODEL", help="folder or name of a model for vLLM")
    run.set_defaults(profile=None)

    report.add_argument("folder", type=Path, metavar="FOLDER", help="what --output named")
    _add_figures(report)

    timeline.add_argument(
        "source", type=Path, nargs="?", metavar="CELL", help="a result kept with --keep-steps, or a folder with one"
    )
    timeline.add_argument(
        "--output", type=Path, default=Path("timeline.json"), metavar="FILE", help="what to write (%(default)s)"
    )
    _add_load(timeline, required=False)
    timeline.set_defaults(queries=TIMELINE_QUERIES)
    _add_what(timeline, arms=["streaming"], seeds=[1])
    _add_profile(timeline)
    timeline.add_argument("--model", metavar="MODEL", help="a real engine instead of the simulated one")
    return {"simulate": simulate, "run": run, "report": report, "timeline": timeline}


def grid_of(arguments: argparse.Namespace) -> Grid:
    """The cells that the options name.

    :raises ConfigurationError: a value that no cell could run with.
    """
    is_wall = arguments.model is not None
    seeds = arguments.seeds or ([1, 2, 3] if arguments.qps else [1])
    profile = arguments.profile if is_wall else arguments.profile or DEFAULT_PROFILE
    return Grid(
        clock="wall" if is_wall else "virtual",
        workload=arguments.workload,
        arms=tuple(arguments.arms),
        policies=tuple(arguments.policy),
        evictions=tuple(arguments.eviction or [_default_eviction(None if is_wall else profile)]),
        host_kv_bytes=arguments.host_kv_bytes,
        scheduler_options=dict(arguments.scheduler_option),
        qps=tuple(arguments.qps),
        delays=tuple(arguments.delay),
        kv_tokens=tuple(arguments.kv_tokens),
        seeds=tuple(seeds),
        num_queries=arguments.queries,
        num_output_tokens=arguments.output_tokens,
        profile=profile,
        model=arguments.model,
        max_num_batched_tokens=arguments.budget,
        max_num_seqs=arguments.max_num_seqs,
        max_context_tokens=arguments.max_context_tokens,
    )


def _default_eviction(profile: str | None) -> EvictionMode:
    """That of the library, where it is known how long copies take; a real engine finds out."""
    if profile is not None and load_profile(profile).copies is None:
        return "recompute"
    return default_eviction()


def _list_of(convert: Callable[[str], T]) -> Callable[[str], list[T]]:
    """Values with commas between them; those within parentheses belong to the value, as in `srpf(0.5, 20000)`."""

    def parse(text: str) -> list[T]:
        try:
            return [convert(part.strip()) for part in re.split(r",(?![^(]*\))", text) if part.strip()]
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error} in the list {text!r}") from None

    return parse


def _whole(text: str) -> int:
    return int(text.replace("_", ""))


def _bytes(text: str) -> int:
    """`64e9` too: these are large numbers."""
    return int(float(text))


def _option(text: str) -> tuple[str, Any]:
    """`NAME=VALUE`, where the value is JSON, or else a text."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, e.g. can_partial_evict=true")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _add_load(parser: argparse.ArgumentParser, *, required: bool) -> None:
    load = parser.add_argument_group("load (lists have commas between their values)")
    default: dict[str, Any] = {} if required else {"default": "crawler"}
    load.add_argument(
        "--workload",
        required=required,
        metavar="LOAD",
        help="crawler, anns, anns-last (generated), or a trace file",
        **default,
    )
    load.add_argument(
        "--qps",
        type=_list_of(float),
        default=[],
        metavar="LIST",
        help="queries per second, Poisson; else the trace's own",
    )
    load.add_argument(
        "--delay", type=_list_of(float), default=[1.0], metavar="LIST", help="multiplies the gaps between chunks (1)"
    )
    load.add_argument("--queries", type=_whole, metavar="N", help="at most so many queries a cell")
    load.add_argument("--output-tokens", type=_whole, default=1, metavar="N", help="tokens of every answer (1)")
    load.add_argument(
        "--max-context-tokens",
        type=_whole,
        metavar="N",
        help="most tokens of a context; what does not fit is left out (what the model's length has room for)",
    )
    load.add_argument(
        "--kv-tokens", type=_list_of(_whole), default=[], metavar="LIST", help="capacities of the KV cache, in tokens"
    )
    load.add_argument("--budget", type=_whole, metavar="N", help="most tokens a step (the workload's published one)")
    load.add_argument(
        "--max-num-seqs", type=_whole, default=256, metavar="N", help="most requests that run at once (256)"
    )


def _add_what(parser: argparse.ArgumentParser, *, arms: list[str], seeds: list[int] | None) -> None:
    what = parser.add_argument_group("what is compared")
    what.add_argument(
        "--arms",
        type=_list_of(str),
        default=arms,
        metavar="LIST",
        help=f"of {', '.join(ARMS)} ({','.join(arms)})",
    )
    what.add_argument(
        "--policy", type=_list_of(str), default=["fcfs"], metavar="LIST", help="the streaming arm's policies (fcfs)"
    )
    what.add_argument(
        "--eviction",
        type=_list_of(str),
        metavar="LIST",
        help="what the streaming arm does with preempted KV: recompute, swap, cost (cost, if the profile has copies)",
    )
    what.add_argument(
        "--host-kv-bytes", type=_bytes, metavar="N", help="host memory for KV, e.g. 64e9 (the scheduler's own choice)"
    )
    what.add_argument(
        "--scheduler-option",
        type=_option,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="of the streaming arm's scheduler, e.g. can_partial_evict=true; may be given repeatedly",
    )
    shown = ",".join(map(str, seeds)) if seeds else "1,2,3; 1 with the trace's own arrivals"
    what.add_argument("--seeds", type=_list_of(_whole), default=seeds, metavar="LIST", help=f"({shown})")


def _add_output(parser: argparse.ArgumentParser) -> None:
    output = parser.add_argument_group("running")
    output.add_argument("--output", type=Path, metavar="FOLDER", help="results and report (bench-results/...)")
    output.add_argument("--processes", type=_whole, metavar="N", help="cells at a time (all cores; on a real engine 1)")
    output.add_argument("--keep-steps", action="store_true", help="keep every step, for `bench timeline`; large")
    output.add_argument("--force", action="store_true", help="run finished cells again")
    _add_figures(parser)


def _add_figures(parser: argparse.ArgumentParser) -> None:
    figures = parser.add_argument_group("figures")
    figures.add_argument("--json", type=Path, metavar="FILE", help="write the figures of each cell here")
    figures.add_argument(
        "--slo", default="", metavar="LIST", help=f"NAME=SECONDS for the goodput; names are {', '.join(LIMITS)}"
    )


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", metavar="PROFILE", help=f"hardware: a name or a file ({DEFAULT_PROFILE})")
