"""`streamrag doctor`: check whether this machine can serve, or whether a server reuses prefixes."""

import argparse
import asyncio
import os
from statistics import median

from rich.table import Table

from streamrag.backends.openai import OpenAIBackend
from streamrag.cli.doctor import machine
from streamrag.cli.doctor.server import ROOM, Finding, ServerExaminer, as_json
from streamrag.cli.option_types import positive, seconds
from streamrag.cli.output import Output, markup
from streamrag.cli.progress import shown_starting
from streamrag.errors import DeadlineExceededError
from streamrag.support.clock import monotonic

DESCRIPTION = """\
Checks this machine for `streamrag serve`, and prints problems with remedies:
packages, engine, device, memory for a model, a free port.

With --server: sends a server pairs of requests, one with a new context, and one
with a context that was sent ahead, as streamrag does during retrieval. Prints
how much earlier the first token arrives.
"""
EPILOG = """\
examples:
  streamrag doctor
  streamrag doctor --model ./Llama-3.1-8B-Instruct --port 8080
  streamrag doctor --server http://127.0.0.1:8000
  streamrag doctor --server http://127.0.0.1:8080 --max-model-len 8192        a server that does not report its limit
  streamrag doctor --server https://api.example.com/v1 --model large --api-key KEY --prompt-tokens 4000

The exit status is 1 if this machine cannot serve. With --server, each context consists of new random words, so that
nothing of it is cached. The request that is sent ahead has the context without the question. Nothing else should use
the server during the measurement.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.usage = "%(prog)s [--server URL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--server", metavar="URL", help="an OpenAI-compatible server")
    add = parser.add_argument
    add("--model", metavar="NAME", help="the model's folder here, or its name at --server (the only one there)")
    add("--port", type=positive, default=8080, metavar="N", help="port to check, without --server (%(default)s)")
    add("--tokenizer", metavar="PATH", help="the model's tokenizer (the server's, if it has one)")
    add("--api-key", metavar="KEY", help="API key of the server (OPENAI_API_KEY in the environment)")
    add("--max-model-len", type=positive, metavar="N", help="longest prompt (the server's limit)")
    about = "length of each context (%(default)s)"
    add("--prompt-tokens", type=_context_length, default=2000, metavar="N", help=about)
    add("--repetitions", type=positive, default=5, metavar="N", help="number of pairs (%(default)s)")
    add("--timeout", type=seconds, default=300.0, metavar="S", help="time limit in seconds (%(default)g)")
    add("--json", action="store_true", help="print the results as JSON")
    parser.set_defaults(run=_run)


def _context_length(text: str) -> int:
    """Parse a number of tokens, at least `ROOM`."""
    if (value := positive(text)) < ROOM:
        raise argparse.ArgumentTypeError(f"{text} tokens are too few to measure a difference; give at least {ROOM}")
    return value


def _run(arguments: argparse.Namespace) -> int:
    """Check this machine and return the status, or with --server measure the server, print the finding and return 0."""
    if arguments.server is None:
        return _check_machine(arguments)
    finding = asyncio.run(_examine(arguments))
    output = Output()
    if arguments.json:
        output.print_json_text(as_json(finding))
    else:
        _print(finding, output)
    return 0


def _check_machine(arguments: argparse.Namespace) -> int:
    """Print the results of the machine's check, as lines or JSON, and return 1 if there are problems, else 0."""
    found = machine.examine(arguments.model, port=arguments.port)
    output = Output()
    if arguments.json:
        output.print_json_text(machine.as_json(found))
        return 1 if found.problems else 0
    for name, text in machine.lines_of(found):
        output.print_line(f"{name}: {text}")
    for problem in found.problems:
        output.print_line(markup("[red]problem:[/] {}", problem))
    for line in found.advice:
        output.print_line(markup("[yellow]optional:[/] {}", line))
    output.print_line("this machine cannot serve as it is" if found.problems else "this machine can serve")
    return 1 if found.problems else 0


async def _examine(arguments: argparse.Namespace) -> Finding:
    """Measure the server, close the client, and return the finding; raise DeadlineExceededError after --timeout."""
    progress = Output(stderr=True)
    examiner: ServerExaminer | None = None
    with shown_starting(progress) as show:
        backend = OpenAIBackend(
            arguments.server,
            arguments.model,
            tokenizer=arguments.tokenizer,
            api_key=arguments.api_key or os.environ.get("OPENAI_API_KEY"),
            max_model_len=arguments.max_model_len,
            timeout_s=arguments.timeout,
        )
        try:
            async with asyncio.timeout(arguments.timeout) as limit:
                await backend.start(show)
                examiner = await ServerExaminer.of(backend, arguments.prompt_tokens, monotonic)
                pairs = await examiner.pairs(arguments.repetitions, show)
        except TimeoutError:
            if not limit.expired():
                raise
            less = examiner and examiner.smaller_options(arguments.prompt_tokens, arguments.repetitions)
            raise DeadlineExceededError(
                f"{arguments.server} was not done in {arguments.timeout:g} s. Give it more time with --timeout"
                + (f", or measure less: {less}" if less else "")
            ) from None
        finally:
            await backend.aclose()
    model, counts_tokens = backend.model, examiner.counts_tokens
    return Finding(
        server=arguments.server,
        model=model.name,
        max_model_len=model.max_model_len,
        takes_token_ids=model.is_exact,
        tokenizer=arguments.tokenizer or ("the server's" if counts_tokens else "none: characters are counted"),
        num_prompt_tokens=examiner.num_tokens,
        pairs=pairs,
    )


def _print(finding: Finding, output: Output) -> None:
    """Print the server's properties, a table of the pairs' median, least and most milliseconds, and the verdict."""
    sent = "token ids, exact" if finding.takes_token_ids else "text, which the server tokenizes itself"
    for name, value in {
        "server": finding.server,
        "model": f"{finding.model}, prompts of at most {finding.max_model_len:,}",
        "tokenizer": finding.tokenizer,
        "prompts are sent as": sent,
    }.items():
        output.print_line(f"{name}: {value}")
    table = Table("time to the first token, ms", "median", "least", "most", box=None, pad_edge=False)
    columns = {
        "a new context": [pair.cold_ttft_s for pair in finding.pairs],
        "a context sent ahead": [pair.warm_ttft_s for pair in finding.pairs],
        "(sending it ahead)": [pair.warming_s for pair in finding.pairs],
    }
    for name, times in columns.items():
        table.add_row(name, *(f"{1e3 * value:.1f}" for value in (median(times), min(times), max(times))))
    output.print_table(table)
    output.print(finding.verdict)
