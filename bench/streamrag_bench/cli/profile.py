"""`streamrag profile`: measure the time to recompute and to copy KV on this machine, as a hardware profile."""

import argparse
import asyncio
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from streamrag.cli.option_types import positive
from streamrag.cli.output import Output
from streamrag.cli.progress import StepLines, bar
from streamrag.demo.tiny_llama import make_tiny_llama
from streamrag.engine.costs.profile_files import save_profile
from streamrag.engine.costs.step_profiles import TableProfile, recompute_s
from streamrag.errors import ConfigurationError
from streamrag.support.temp_dirs import ScratchFolder, remove_left_behind
from streamrag_bench.profile.crossing import crossing, describe_crossing, most_tokens, step_budget

DESCRIPTION = """\
Starts vLLM, measures the time to recompute tokens and to copy their KV to host
memory and back, and writes a profile: a minute or two for a small model.
Engines and simulations use the profile to choose between both.
"""
EPILOG = """\
examples:
  streamrag profile                                        try it with a tiny model
  streamrag profile --model ./Llama-3.1-8B-Instruct --output h200.json
  streamrag profile --model ./Llama-3.1-8B-Instruct --tensor-parallel-size 2 --max-num-batched-tokens 2048
  streamrag profile --model ./config-only --engine-args '{"load_format": "dummy"}'

Use the step budget of the engine that will use the profile. Nothing else should run during the measurement.
"""

SCRATCH = "profile"
NAMED = ("tensor_parallel_size", "max_num_batched_tokens", "max_model_len")
"""The engine's arguments with their own options."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.usage = "%(prog)s [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--model", metavar="MODEL", help="folder or name of a model for vLLM (a generated tiny model)")
    parser.add_argument("--output", type=Path, metavar="FILE", help="file for the profile (profile-MODEL.json)")
    parser.add_argument("--tensor-parallel-size", type=positive, default=1, metavar="N", help="devices (%(default)s)")
    parser.add_argument("--max-num-batched-tokens", type=positive, metavar="N", help="token budget of a step (vLLM's)")
    parser.add_argument("--max-model-len", type=positive, metavar="N", help="longest prompt (the model's)")
    about = """more arguments of vLLM's engine: '{"kv_cache_dtype": "fp8"}'"""
    parser.add_argument("--engine-args", type=_json_object, default={}, metavar="JSON", help=about)
    parser.set_defaults(run=_run)


def _json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object; raise ArgumentTypeError for anything else, or an argument that has an option of its own."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object such as {{}}")
    if named := sorted(value.keys() & set(NAMED)):
        raise argparse.ArgumentTypeError(f"{named[0]} has an option of its own, --{named[0].replace('_', '-')}")
    return value


def _run(arguments: argparse.Namespace) -> int:
    """Check what would fail only at the end, measure, write the profile, and print figures; return 0."""
    console = Output(stderr=True)
    output = arguments.output or Path(f"profile-{_file_name(arguments.model or 'tiny-llama')}.json")
    if not output.parent.is_dir():
        raise ConfigurationError(f"there is no folder {output.parent}; create it, or name another place with --output")
    with _model(arguments.model, console) as model:
        profile = _measure(model, arguments, console)
    save_profile(profile, output)
    _print(profile, Output())
    console.print_line(f"profile: {output}")
    return 0


def _file_name(model: str) -> str:
    return re.sub(r"[^\w.-]+", "-", Path(model).name) or "model"


@contextmanager
def _model(name: str | None, console: Output) -> Iterator[str]:
    """Yield the model's name, or the path of a tiny one in a temporary folder that is removed after the block."""
    if name is not None:
        yield name
        return
    console.print_line("no --model: measuring a tiny one with random weights; other models have other times")
    remove_left_behind(SCRATCH)
    scratch = ScratchFolder(SCRATCH)
    try:
        yield str(make_tiny_llama(scratch.path / "tiny-llama"))
    finally:
        scratch.remove()


def _measure(model: str, arguments: argparse.Namespace, console: Output) -> TableProfile:
    """Measure with a progress bar on stderr, and return the profile; options in `NAMED` go to the engine if given."""
    from streamrag_bench.profile.machine import measure_machine  # imports vLLM: seconds

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=28), MofNCompleteColumn(), TimeElapsedColumn())
    lines = StepLines(console)
    with bar(console, *columns, transient=True) as progress:
        task = progress.add_task("", total=None)

        def show(what: str, num_done: int, num_total: int | None) -> None:
            progress.update(task, description=what, completed=num_done, total=num_total)
            lines.show(what)

        given = {name: getattr(arguments, name) for name in NAMED if getattr(arguments, name) is not None}
        return asyncio.run(measure_machine(model, {**arguments.engine_args, **given}, show))


def _print(profile: TableProfile, console: Output) -> None:
    """Print a table of the measured and fitted milliseconds by size, the fit's error, and when copying is faster."""
    copies, budget = profile.copies, step_budget(profile)
    assert copies is not None
    measured = profile.provenance["recompute_s"]
    console.print_line(f"{profile.name}, steps of at most {budget:,} tokens; in milliseconds")
    beside = f"beside {measured['num_beside']} decodes"
    table = Table("tokens", "recompute", "as fitted", beside, "copy in", "copy out", box=None, pad_edge=False)
    table.columns[0].justify = "right"
    for size, alone_s in measured["alone"].items():
        num_blocks = max(int(size) // profile.block_size, 1)
        fitted_s = recompute_s(profile, 0, int(size), budget)
        row = (alone_s, fitted_s, measured["beside"][size], copies.in_s(num_blocks), copies.out_s(num_blocks))
        table.add_row(f"{int(size):,}", *(f"{1e3 * seconds:.3g}" for seconds in row))
    console.print_table(table)
    error = measured["median_error_of_the_fit"]
    if error is not None:
        console.print(f"median error of the fit: {error:.1%}")
    console.print(describe_crossing(crossing(profile, copies.in_s, most_tokens(profile)), profile.block_size))
