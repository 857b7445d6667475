"""`streamrag doctor`: whether this machine can serve, or whether a server that is there gains from prefilling early."""

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
Says what this machine has for `streamrag serve`, what keeps it from that, and
what to do about it: packages, engine, device, memory for a model, a free port.

With --server: asks a server the same kind of question twice: once with a context that it has
never seen, and once with one that it was sent before, as streamrag does while
retrieval still runs. Says whether the first token comes sooner, and by how much.
"""
EPILOG = """\
examples:
  streamrag doctor
  streamrag doctor --model ./Llama-3.1-8B-Instruct --port 8080
  streamrag doctor --server http://127.0.0.1:8000
  streamrag doctor --server http://127.0.0.1:8080 --max-model-len 8192        what does not say how long prompts may be
  streamrag doctor --server https://api.example.com/v1 --model large --api-key KEY --prompt-tokens 4000

The exit status is 1 if this machine cannot serve. With --server, contexts are random words, new ones each time, so
that nothing is known of a cold one. The request that warms has the whole context, but not the
question behind it. Nothing else should use the server meanwhile.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments, and set what runs it."""
    parser.usage = "%(prog)s [--server URL] [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("--server", metavar="URL", help="an OpenAI-compatible server")
    parser.add_argument(
        "--model", metavar="NAME", help="the model's name there (the only one, if there is one), or its folder here"
    )
    parser.add_argument(
        "--port", type=positive, default=8080, metavar="N", help="to listen on, without --server (%(default)s)"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="the model's tokenizer (the server's own, if it has one)")
    parser.add_argument("--api-key", metavar="KEY", help="OPENAI_API_KEY in the environment unless given")
    parser.add_argument("--max-model-len", type=positive, metavar="N", help="longest prompt (the server is asked)")
    parser.add_argument(
        "--prompt-tokens", type=_context_length, default=2000, metavar="N", help="length of each context (%(default)s)"
    )
    parser.add_argument("--repetitions", type=positive, default=5, metavar="N", help="pairs to ask (%(default)s)")
    parser.add_argument(
        "--timeout", type=seconds, default=300.0, metavar="S", help="give up after so many seconds (%(default)g)"
    )
    parser.add_argument("--json", action="store_true", help="print what was measured as JSON instead")
    parser.set_defaults(run=_run)


def _context_length(text: str) -> int:
    if (value := positive(text)) < ROOM:
        raise argparse.ArgumentTypeError(f"{text} tokens are too few to see a difference: at least {ROOM}")
    return value


def _run(arguments: argparse.Namespace) -> int:
    if arguments.server is None:
        return _look_at_machine(arguments)
    finding = asyncio.run(_examine(arguments))
    output = Output()
    if arguments.json:
        output.print_json_text(as_json(finding))
    else:
        _print(finding, output)
    return 0


def _look_at_machine(arguments: argparse.Namespace) -> int:
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
        output.print_line(markup("[yellow]if you want[/] {}", line))
    output.print_line("this machine cannot serve as it is" if found.problems else "this machine can serve")
    return 1 if found.problems else 0


async def _examine(arguments: argparse.Namespace) -> Finding:
    progress = Output(stderr=True)
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
            raise DeadlineExceededError(
                f"{arguments.server} was not done in {arguments.timeout:g} s. Give it more time with --timeout, or "
                "ask less with --repetitions or --prompt-tokens"
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
    sent = "token ids, exact" if finding.takes_token_ids else "text, which the server tokenises in its own way"
    for name, value in {
        "server": finding.server,
        "model": f"{finding.model}, prompts of at most {finding.max_model_len:,}",
        "tokenizer": finding.tokenizer,
        "prompts are sent as": sent,
    }.items():
        output.print_line(f"{name}: {value}")
    table = Table("time to the first token, ms", "median", "least", "most", box=None, pad_edge=False)
    columns = {
        "a context it has not seen": [pair.cold_ttft_s for pair in finding.pairs],
        "one it was sent before": [pair.warm_ttft_s for pair in finding.pairs],
        "(sending it before)": [pair.warming_s for pair in finding.pairs],
    }
    for name, times in columns.items():
        table.add_row(name, *(f"{1e3 * value:.1f}" for value in (median(times), min(times), max(times))))
    output.print_table(table)
    output.print(finding.verdict)
