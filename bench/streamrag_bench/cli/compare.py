"""`streamrag compare`: measure what streaming gains with one's own questions, source and model."""

import argparse
import asyncio
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path

from rich.progress import BarColumn, TextColumn, TimeElapsedColumn

from streamrag import Pipeline, ReplaySource, SamplingParams
from streamrag.cli.model_options import add_model_arguments, make_backend
from streamrag.cli.option_types import positive
from streamrag.cli.output import Output
from streamrag.cli.progress import StepLines, bar, shown_starting
from streamrag.cli.record import questions_in
from streamrag.cli.source_options import add_source_arguments, make_source
from streamrag.core import Source
from streamrag.display_text import one_line
from streamrag.errors import ConfigurationError
from streamrag.query.options import QueryOptions
from streamrag.sources.index.index_folder import PASSAGES, check_index, read_passages
from streamrag.support.files import write_atomic
from streamrag.trace.read import read_trace
from streamrag.trace.values import Trace, TracedQuery
from streamrag_bench.compare.others_load import OthersLoad
from streamrag_bench.compare.pairs import MEASURES, ComparedGroup, ask_at_once, ask_rounds
from streamrag_bench.compare.report import as_json, make_page, make_table, sentences_of
from streamrag_bench.compare.words import why_unclear

DESCRIPTION = """\
Asks each question twice, with streaming and without, one right after the other,
and says how much sooner the first and the last token come: counted from the
question, which a user feels, and from the end of retrieval. Says also what was
retrieved when, whether the answers are equal, and what limits the gain.

Each prompt is new to the prefix cache. Nothing else should use the model or the
source meanwhile. It stops when the intervals are narrow or the time is over;
Ctrl-C stops it too, and what is known by then is printed.
"""
EPILOG = """\
examples:
  streamrag compare questions.txt --index ./handbook-index --model ./Llama-3.1-8B-Instruct
  streamrag compare --index ./handbook-index --model ./Llama-3.1-8B-Instruct          questions from its titles
  streamrag compare questions.txt --url https://anyio.readthedocs.io --model ./Llama-3.1-8B-Instruct --html page.html
  streamrag compare questions.txt --postgres env:DOCS --server http://127.0.0.1:8000 --model my-model
  streamrag compare --trace search.jsonl.gz --model ./Llama-3.1-8B-Instruct --concurrency 4

reading the result:
  first token, from the question    1.24 times as soon (1.17 to 1.31): with 95 % confidence between the two
  first token, after retrieval      the same without the time of retrieval, which no streaming shortens
  unclear                           the interval contains 1: measure longer, or on a quieter machine
"""
NUM_MADE = 10  # questions that are made from the titles of an index
MAX_PASSAGES = 100_000  # passages of an index that are read for their titles: a second
MAX_TITLE_CHARS = 200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.usage = (
        "%(prog)s [QUESTIONS] (--url URL | --index FOLDER | --postgres DSN | --trace FILE) --model MODEL [options]"
    )
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    about = f"file with a question per line, or - for stdin (a trace's own; {NUM_MADE} from an index's titles)"
    parser.add_argument("questions", nargs="?", metavar="QUESTIONS", help=about)
    add_source_arguments(parser, takes_trace=True)
    add_model_arguments(parser)
    add = parser.add_argument_group("measuring").add_argument
    about = "time limit, after which no pair begins (%(default)g)"
    add("--minutes", type=_minutes, default=10.0, metavar="M", help=about)
    about = "then ask N questions at once, too; each load gets half of the time"
    add("--concurrency", type=positive, default=1, metavar="N", help=about)
    add("--max-tokens", type=positive, default=64, metavar="N", help="maximum tokens of an answer (%(default)s)")
    about = "maximum tokens of context; chunks that do not fit are left out"
    add("--max-context-tokens", type=positive, metavar="N", help=about)
    add("--json", action="store_true", help="print JSON, with the times of each pair")
    add("--html", type=Path, metavar="FILE", help="write a page with a picture, too")
    parser.set_defaults(run=run)


def _minutes(text: str) -> float:
    """Parse a number of minutes above 0, at most a day. Raises ArgumentTypeError for another."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1440:
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of minutes above 0, at most 1440")
    return value


def run(arguments: argparse.Namespace) -> int:
    """Compare with a progress bar on stderr, and print what is known at the end, after Ctrl-C or after an error."""
    if arguments.html is not None and not arguments.html.absolute().parent.is_dir():
        raise ConfigurationError(f"--html {arguments.html}: there is no such folder; make it, or name another one")
    questions = find_questions(arguments)
    loads = [1] if arguments.concurrency == 1 else [1, arguments.concurrency]
    groups = [ComparedGroup("one at a time" if num == 1 else f"{num} at once") for num in loads]
    others = OthersLoad()
    try:
        asyncio.run(_measure(arguments, questions, dict(zip(loads, groups, strict=True))))
    finally:
        if measured := [group for group in groups if group.rounds]:
            has_server = arguments.server is not None or arguments.postgres is not None  # perhaps one of the others
            _print(arguments, measured, None if has_server else others.share())
    return 0


def find_questions(arguments: argparse.Namespace) -> list[str]:
    """Return the questions of the file, else those of the trace, else some about the titles of the index.

    :raises ConfigurationError: there are none, or fewer than are to be asked at once.
    """
    if arguments.index is not None:
        check_index(Path(arguments.index).absolute())  # before vLLM is imported, which takes up to a minute
    if arguments.questions is not None:
        questions = list(dict.fromkeys(questions_in(arguments.questions)))
    elif arguments.trace is not None:
        questions = [query.text for query in replayed_trace(arguments.trace).queries]
    elif arguments.index is not None:
        questions = questions_about(Path(arguments.index).absolute())
    else:
        raise ConfigurationError("there are no questions: name a file with one per line; only an index has titles")
    if len(questions) < arguments.concurrency:
        raise ConfigurationError(
            f"there are only {len(questions)} different questions, fewer than --concurrency {arguments.concurrency}: "
            "give more"
        )
    return questions


def replayed_trace(path: str) -> Trace:
    """Return the first complete recording of each question, so that both ways have the same retrieval.

    :raises ConfigurationError: no retrieval is complete.
    """
    trace, first = read_trace(path), dict[str, TracedQuery]()
    for query in trace.queries:
        if query.outcome == "complete":
            first.setdefault(query.text, query)
    if not first:
        raise ConfigurationError(f"{path} has no complete retrieval: record one with `streamrag record`")
    return replace(trace, queries=tuple(first.values()))


def _source(arguments: argparse.Namespace) -> Source:
    """Return the source that the options name, not started."""
    return make_source(arguments) if arguments.trace is None else ReplaySource(replayed_trace(arguments.trace))


def questions_about(index: Path) -> list[str]:
    """Return questions about titles of an index's documents, evenly chosen."""
    passages = islice(read_passages(index, PASSAGES), MAX_PASSAGES)
    titles = list(dict.fromkeys(one_line(each["title"] or each["uri"])[:MAX_TITLE_CHARS] for each in passages))
    num = min(NUM_MADE, len(titles))
    return [f"What is important about {titles[i * len(titles) // num]}?" for i in range(num)]


async def _measure(arguments: argparse.Namespace, questions: Sequence[str], groups: dict[int, ComparedGroup]) -> None:
    """Start source and model, ask one question that does not count, and measure each group, by questions at once."""
    progress = Output(stderr=True)
    options: QueryOptions = {"params": SamplingParams(max_tokens=arguments.max_tokens)}
    if arguments.max_context_tokens is not None:
        options["max_context_tokens"] = arguments.max_context_tokens
    with shown_starting(progress) as show:
        at_once = max(groups)
        pipeline = Pipeline(
            _source(arguments), make_backend(arguments), on_progress=show, max_concurrent_queries=at_once
        )
        await pipeline.start()
        try:
            show("asking one question that does not count")
            await ask_at_once(pipeline, questions[:1], options)
        except BaseException:
            await pipeline.aclose()
            raise
    most_s = 60 * arguments.minutes / len(groups)
    lines = StepLines(progress)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    try:
        with bar(progress, *columns, transient=True) as bars:
            for num_at_once, group in groups.items():
                task = bars.add_task(group.name, total=most_s)
                rounds = ask_rounds(pipeline, questions, options, group, num_at_once=num_at_once, most_s=most_s)
                async for _ in rounds:
                    count = f"round {len(group.rounds)}"
                    bars.update(task, description=f"{group.name}, {count}", completed=bars.tasks[task].elapsed or 0)
                    lines.show(group.name, count)
    finally:
        await pipeline.aclose()


def _print(arguments: argparse.Namespace, groups: Sequence[ComparedGroup], others_share: float | None) -> None:
    """Print a table and the verdict, or JSON, and write the page."""
    sentences = sentences_of(groups)
    remedy = f"measure longer with --minutes {2 * arguments.minutes:g}"
    if unclear := why_unclear(groups, others_share, tuple(MEASURES), remedy):
        sentences.append(unclear)
    output = Output()
    if arguments.json:
        output.print_json_text(as_json(groups, others_share, sentences))
    else:
        output.print_line("median seconds of pairs, and how many times as fast streaming is:")
        output.print_table(make_table(groups))
        for sentence in sentences:
            output.print(sentence)
    if arguments.html is not None:
        write_atomic(arguments.html, make_page(groups, sentences))
        Output(stderr=True).print_line(f"page: {arguments.html}")
