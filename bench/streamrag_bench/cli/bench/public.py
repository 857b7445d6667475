"""`streamrag bench public` and `streamrag bench compare`: the public benchmark of streamed input."""

import argparse
import os
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args

from rich.table import Table

from streamrag.cli.output import Output
from streamrag.errors import ConfigurationError
from streamrag.support.files import write_atomic
from streamrag_bench.cli.bench.options import texts, wholes
from streamrag_bench.public.engines import EngineUnderTest, check_run, run_public
from streamrag_bench.public.page import make_page
from streamrag_bench.public.results import METRICS, EngineName, PublicResult, read_result, write_result
from streamrag_bench.public.server import ServerApi
from streamrag_bench.public.workload import Lengths, PublicLoad, Retrieval
from streamrag_bench.report.html import figure_text
from streamrag_bench.summary import PERCENTILES

PUBLIC = """\
examples:
  streamrag bench public --url http://127.0.0.1:8000 --model my-model --output results
  streamrag bench public --model ./Llama-3.1-8B-Instruct --engine vllm,vllm-sessions,streamrag --output results
  streamrag bench public --simulate h200-llama8b-tp2 --seeds 1,2,3 --output results
"""
COMPARE = "example:\n  streamrag bench compare results/vllm.json results/streamrag.json --page results/page.html"


def add_verbs(verbs: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Add the help and the options of both verbs."""
    parser = verbs.add_parser("public", help="run the public benchmark of streamed input on any engine")
    parser.description = "Runs the public benchmark of streamed input (docs/public-benchmark.md)."
    parser.usage, parser.epilog = "%(prog)s (--model MODEL [--url URL] | --simulate PROFILE) [options]", PUBLIC
    _add_engine(parser)
    _add_load(parser)
    add = parser.add_argument_group("output").add_argument
    default = Path("bench-results/public")
    add("--output", type=Path, default=default, metavar="FOLDER", help="folder for NAME.json (%(default)s)")
    add("--name", default="", metavar="TEXT", help="of one engine: name in tables and of the file (the engine's)")
    parser.set_defaults(run=_run_public)
    parser = verbs.add_parser("compare", help="compare results of the public benchmark on one page")
    parser.description, parser.epilog = "Compares results of the public benchmark with the first of them.", COMPARE
    parser.add_argument("results", type=Path, nargs="+", metavar="RESULT", help="file of `streamrag bench public`")
    parser.add_argument("--page", type=Path, required=True, metavar="HTML", help="the page to write")
    parser.set_defaults(run=_run_compare)


def _add_engine(parser: argparse.ArgumentParser) -> None:
    """Add the fields of `EngineUnderTest`."""
    add = parser.add_argument_group("engine").add_argument
    about = f"of {', '.join(get_args(EngineName))} (server with --url, else vllm,streamrag)"
    add("--engine", dest="engines", type=texts, metavar="LIST", help=about)
    add("--model", default="", metavar="MODEL", help="model for vLLM in this program, or the server's name of it")
    add("--url", default="", metavar="URL", help="an OpenAI-compatible server; its key is in $OPENAI_API_KEY")
    about = "of the server: completions takes token ids, chat takes words (%(default)s)"
    add("--api", choices=get_args(ServerApi), default="completions", help=about)
    about = "hardware: a name or a file; no model runs, figures are simulated"
    add("--simulate", dest="profile", default="", metavar="PROFILE", help=about)
    add("--hardware", default="", metavar="TEXT", help="description of the hardware, for the result")
    about = "token budget of a step of vLLM in this program, or simulated (2048)"
    add("--budget", dest="max_num_batched_tokens", type=int, metavar="N", help=about)


def _add_load(parser: argparse.ArgumentParser) -> None:
    """Add the fields of `PublicLoad`, with its defaults."""
    add = parser.add_argument_group("load (the defaults are the specification's)").add_argument
    for option, name, how, about in (
        ("--lengths", "lengths", {"choices": get_args(Lengths)}, "trace that lengths and arrivals are drawn from"),
        ("--retrieval", "retrieval", {"choices": get_args(Retrieval)}, "timing of retrieval"),
        ("--qps", "qps", {"type": float}, "queries per second"),
        ("--queries", "num_queries", {"type": int}, "queries of each seed, with those that warm up"),
        ("--warm-up", "num_warm_up", {"type": int}, "first queries of each seed, which are not counted"),
        ("--output-tokens", "num_output_tokens", {"type": int}, "tokens per answer"),
        ("--max-context-tokens", "max_context_tokens", {"type": int}, "chunks that do not fit are left out"),
    ):
        more: dict[str, Any] = {**how} if "choices" in how else {**how, "metavar": "N"}
        add(option, dest=name, default=getattr(PublicLoad(), name), help=f"{about} (%(default)s)", **more)
    add("--seeds", type=wholes, default=(1,), metavar="LIST", help="random seeds (1)")


def _run_public(arguments: argparse.Namespace) -> int:
    """Run the benchmark on each engine, write the results, print their figures. Return 1 if an engine answered none."""
    given = {"api_key": os.environ.get("OPENAI_API_KEY"), **vars(arguments)}
    load = PublicLoad(**{each.name: given[each.name] for each in fields(PublicLoad)})
    names = arguments.engines or (("server",) if arguments.url else ("vllm", "streamrag"))
    values = [{**given, "engine": name} for name in names]
    engines = [EngineUnderTest(**{each.name: one[each.name] for each in fields(EngineUnderTest)}) for one in values]
    if arguments.name and (len(names) > 1 or arguments.name != Path(arguments.name).name):
        raise ConfigurationError(f"--name {arguments.name!r} must be a file name, and is for one engine")
    seeds, results = arguments.seeds or (1,), []
    paths = [arguments.output / f"{arguments.name or engine.name}.json" for engine in engines]
    for engine, path in zip(engines, paths, strict=True):
        check_run(engine, load, seeds)
        if path.exists() or paths.count(path) > 1:
            raise ConfigurationError(f"{path} exists, or is of two engines; give another --output, --name or --engine")
    arguments.output.mkdir(parents=True, exist_ok=True)
    for engine, path in zip(engines, paths, strict=True):
        Output(stderr=True).print_line(f"{engine.engine}: {len(seeds)} x {load.num_queries} queries")
        result = run_public(engine, load, seeds, name=arguments.name)
        write_result(result, path)
        results.append(result)
    _print_results(results)
    return int(any(result.num_failed == len(result.queries) for result in results))


def _run_compare(arguments: argparse.Namespace) -> int:
    results = [read_result(path) for path in arguments.results]
    write_atomic(arguments.page, make_page(results))
    _print_results(results)
    return 0


def _print_results(results: Sequence[PublicResult]) -> None:
    """Print a row for each result: what it is, seconds from the end of retrieval to first and last token, failures."""
    titles = (f"{token}\n{name.upper()}, s" for token in ("first", "last") for name in PERCENTILES)
    table = Table("after retrieval", "", *titles, "failed", box=None, pad_edge=False)
    for result in results:
        found = [result.percentiles(metric) for metric in list(METRICS)[:2]]
        figures = [figure_text(percentiles.get(name)) for percentiles in found for name in PERCENTILES]
        table.add_row(result.name, result.kind, *figures, f"{result.num_failed} of {len(result.queries)}")
    Output().print_table(table)
