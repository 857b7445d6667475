"""The options of `streamrag bench`, and the grid of cells that they define."""

import argparse
import json
import re
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

from streamrag.backends.vllm.client.arguments import default_eviction
from streamrag.engine.costs.profile_files import load_profile
from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.engine.recompute_or_swap import EVICTIONS, EvictionMode
from streamrag_bench.cell import ARMS
from streamrag_bench.grid import PLAIN, Grid
from streamrag_bench.summary import LIMITS

T = TypeVar("T")

DEFAULT_PROFILE = "h200-llama8b-tp2"
TIMELINE_QUERIES = 50

DESCRIPTION = """\
Replays a load on a simulated or a real engine with several client strategies
(arms), compares them in a table and an HTML report, and says in words whether
streaming helps, at which percentiles, and what it costs.
"""
EPILOG = """\
examples:
  streamrag bench simulate --workload crawler --qps 1,2,4
  streamrag bench run --workload crawl.jsonl.gz --model ./Llama-3.1-8B-Instruct

`streamrag bench VERB --help` has more.
"""
CELLS = """
Every combination of the lists is a cell. Results are kept: the same command runs only cells without a result.
"""
SIMULATE = """\
examples:
  streamrag bench simulate --workload crawler --qps 1,2,4 --policy arrival,fcfs,lcas,mcps --seeds 1,2,3
  streamrag bench simulate --workload anns --qps 2 --delay 1,30 --kv-tokens 200000,1680000 --queries 200
  streamrag bench simulate --workload crawler --qps 4 --delay 14 --kv-tokens 840000 --eviction recompute,swap,cost
  streamrag bench simulate --workload my-crawl.jsonl.gz --arms no-streaming,warming,streaming
  streamrag bench simulate --workload crawler --qps 4 --slo ttft_after_retrieval_s=0.5 --json cells.json
"""
RUN = """\
examples:
  streamrag bench run --workload traces/crawl-python-docs.jsonl.gz --model ./Llama-3.1-8B-Instruct
  streamrag bench run --workload crawler --qps 0.5 --queries 20 --model ./Llama-3.1-8B-Instruct --seeds 1,2,3
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

Open the file at https://ui.perfetto.dev (it is not uploaded), or in Chrome at chrome://tracing.
"""


def _add_simulate(parser: argparse.ArgumentParser) -> None:
    """Add the help and the options of `simulate`: profile, load, comparison, output."""
    parser.description = (
        "Replays a load on vLLM's own scheduler, in virtual time. No model runs: figures are simulated."
    )
    parser.usage, parser.epilog = "%(prog)s --workload LOAD [options]", SIMULATE + CELLS
    _add_profile(parser)
    _add_load(parser)
    _add_what(parser, arms=("no-streaming", "streaming"), seeds=None)
    _add_running(parser)
    parser.set_defaults(model=None)


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Add the help and the options of `run`: model, load, comparison, output; there is no profile."""
    parser.description = "Replays a load on a real engine, in wall time."
    parser.usage, parser.epilog = "%(prog)s --workload LOAD --model MODEL [options]", RUN + CELLS
    parser.add_argument("--model", required=True, metavar="MODEL", help="folder or name of a model for vLLM")
    _add_load(parser)
    _add_what(parser, arms=("no-streaming", "streaming"), seeds=(1,))
    _add_running(parser)
    parser.set_defaults(profile=None)


def _add_report(parser: argparse.ArgumentParser) -> None:
    """Add the help and the options of `report`: a folder of results, and what figures to write."""
    parser.description = "Rebuilds the report of the results in a folder."
    parser.epilog = REPORT
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="the folder of --output")
    _add_figures(parser)


def _add_timeline(parser: argparse.ArgumentParser) -> None:
    """Add the help and the options of `timeline`: a stored cell, or profile or model, load and settings of one."""
    parser.description = "Writes the timeline of a cell: a track for each request, and one for the engine's steps."
    parser.usage, parser.epilog = "%(prog)s [CELL] [options]", TIMELINE
    add = parser.add_argument
    add("source", type=Path, nargs="?", metavar="CELL", help="a result with steps, or a folder with one")
    add("--output", type=Path, default=Path("timeline.json"), metavar="FILE", help="file to write (%(default)s)")
    _add_profile(parser)
    add("--model", metavar="MODEL", help="a real engine instead of the simulated one")
    _add_load(parser, workload="crawler")
    parser.set_defaults(num_queries=TIMELINE_QUERIES)
    _add_what(parser, arms=("streaming",), seeds=(1,))


VERBS = {
    "simulate": ("run it on vLLM's scheduler in virtual time; no model runs", _add_simulate),
    "run": ("run it on the real engine, in wall time", _add_run),
    "report": ("rebuild the report of a folder of results", _add_report),
    "timeline": ("write the timeline of a cell, for a trace viewer", _add_timeline),
}
"""The help of each verb, and the function that adds its options."""


def grid_of(arguments: argparse.Namespace) -> Grid:
    """Return the grid that the options define, with a model in wall time. Raises ConfigurationError as `Grid`.

    The default seeds are 1, 2, 3 with --qps, else 1; the default eviction is one that the profile has costs for.
    """
    is_wall = arguments.model is not None
    seeds = arguments.seeds or ((1, 2, 3) if arguments.qps else (1,))
    profile = arguments.profile if is_wall else arguments.profile or DEFAULT_PROFILE
    names = {field.name for field in fields(Grid)} & vars(arguments).keys()
    values: dict[str, Any] = {name: getattr(arguments, name) for name in names}
    values |= {
        "clock": "wall" if is_wall else "virtual",
        "profile": profile,
        "seeds": seeds,
        "evictions": arguments.evictions or (_default_eviction(None if is_wall else profile),),
        "scheduler_options": dict(arguments.scheduler_options),
    }
    return Grid(**values)


def _default_eviction(profile: str | None) -> EvictionMode:
    """Return the library's default, or "recompute" for a profile without copy times; a real engine measures them."""
    if profile is not None and load_profile(profile).copies is None:
        return "recompute"
    return default_eviction()


def _list_of(convert: Callable[[str], T]) -> Callable[[str], tuple[T, ...]]:
    """Return a parser of comma-separated values such as `fcfs, srpf(0.5, 20000)`, of which blank ones are left out.

    The parser raises ArgumentTypeError if `convert` raises ValueError.
    """

    def parse(text: str) -> tuple[T, ...]:
        try:
            return tuple(convert(part.strip()) for part in re.split(r",(?![^(]*\))", text) if part.strip())
        except ValueError as error:
            raise argparse.ArgumentTypeError(f"{error} in the list {text!r}") from None

    return parse


texts, floats, wholes = _list_of(str), _list_of(float), _list_of(int)


def _bytes(text: str) -> int:
    return int(float(text))  # accepts 64e9


def _option(text: str) -> tuple[str, Any]:
    """Parse NAME=VALUE to a pair; a value that is not JSON is a text. Raises ArgumentTypeError without name or "="."""
    name, equals, value = text.partition("=")
    if not (name and equals):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE, e.g. can_partial_evict=true")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _add_load(parser: argparse.ArgumentParser, *, workload: str | None = None) -> None:
    """Add the options of a load and the engine's limits; --workload is required if `workload` is None."""
    add = parser.add_argument_group("load (lists have commas between their values)").add_argument
    about = f"{', '.join(PLAIN)} (generated; with suffix -hints: with hints), or a trace file"
    add("--workload", required=workload is None, default=workload, metavar="LOAD", help=about)
    add("--qps", type=floats, default=(), metavar="LIST", help="queries per second, Poisson (the trace's arrivals)")
    about = "factors of the gaps between chunks (1)"
    add("--delay", dest="delays", type=floats, default=(1.0,), metavar="LIST", help=about)
    add("--queries", dest="num_queries", type=int, metavar="N", help="maximum number of queries per cell")
    about = "tokens per answer (%(default)s)"
    add("--output-tokens", dest="num_output_tokens", type=int, default=1, metavar="N", help=about)
    about = "maximum tokens of a context; chunks that do not fit are left out (the model's limit)"
    add("--max-context-tokens", type=int, metavar="N", help=about)
    add("--kv-tokens", type=wholes, default=(), metavar="LIST", help="capacities of the KV cache, in tokens")
    about = "token budget of a step (as published for the workload)"
    add("--budget", dest="max_num_batched_tokens", type=int, metavar="N", help=about)
    add("--max-num-seqs", type=int, default=256, metavar="N", help="maximum number of running requests (%(default)s)")


def _add_what(parser: argparse.ArgumentParser, *, arms: tuple[str, ...], seeds: tuple[int, ...] | None) -> None:
    """Add the options of the cells to compare, with these defaults: arms, policies, evictions, scheduler, seeds."""
    add = parser.add_argument_group("what is compared").add_argument
    add("--arms", type=texts, default=arms, metavar="LIST", help=f"of {', '.join(ARMS)} ({', '.join(arms)})")
    about = "the streaming arm's policies (srpf)"
    add("--policy", dest="policies", type=texts, default=(DEFAULT_POLICY,), metavar="LIST", help=about)
    about = f"its evictions, of {', '.join(EVICTIONS)} (cost; recompute for a profile without copy times)"
    add("--eviction", dest="evictions", type=texts, metavar="LIST", help=about)
    about = "host memory for KV, e.g. 64e9 (the scheduler's default)"
    add("--host-kv-bytes", type=_bytes, metavar="N", help=about)
    about = "option of the streaming arm's scheduler, e.g. can_partial_evict=true; may be given repeatedly"
    option: dict[str, Any] = {"dest": "scheduler_options", "type": _option, "action": "append", "default": []}
    add("--scheduler-option", metavar="NAME=VALUE", help=about, **option)
    about = f"random seeds ({', '.join(map(str, seeds or (1, 2, 3)))}{'' if seeds else '; 1 without --qps'})"
    add("--seeds", type=wholes, default=seeds, metavar="LIST", help=about)


def _add_running(parser: argparse.ArgumentParser) -> None:
    """Add the options on running cells and keeping their results, and those of the figures."""
    add = parser.add_argument_group("running").add_argument
    add("--output", type=Path, metavar="FOLDER", help="results and report (bench-results/...)")
    add("--processes", type=int, metavar="N", help="concurrent cells (all cores; on a real engine 1)")
    add("--keep-steps", action="store_true", help="keep every step, for `bench timeline` (large)")
    add("--force", action="store_true", help="run finished cells again")
    _add_figures(parser)


def _add_figures(parser: argparse.ArgumentParser) -> None:
    """Add --json, a file for the figures, and --slo, the objectives for the goodput."""
    add = parser.add_argument_group("figures").add_argument
    add("--json", type=Path, metavar="FILE", help="write the verdicts and the figures of each cell here")
    about = f"NAME=SECONDS, objectives for the goodput; names are {', '.join(LIMITS)}"
    add("--slo", default="", metavar="LIST", help=about)


def _add_profile(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--profile", metavar="PROFILE", help=f"hardware: a name or a file ({DEFAULT_PROFILE})")
