"""`streamrag record`: record the retrieval for questions in a trace."""

import argparse
import asyncio
import codecs
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import anyio
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn

from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.cli.option_types import positive
from streamrag.cli.output import Output
from streamrag.cli.progress import StepLines, bar
from streamrag.cli.source_options import add_source_arguments, make_source
from streamrag.core import Chunk
from streamrag.display_text import one_line
from streamrag.errors import ConfigurationError
from streamrag.modes import PromptTemplate
from streamrag.sources.index.document_passages import count_words
from streamrag.support.bounded_reading import MAX_SMALL_FILE_BYTES, read_bytes
from streamrag.trace.recorder import CountTokens, TraceRecorder, record_queries

DESCRIPTION = """\
Retrieves for each question, and writes a trace: the chunks, their times and
their sizes. No model is needed. An existing trace is appended to.
"""
EPILOG = """\
examples:
  streamrag record "How do I cancel a task group?" --url https://anyio.readthedocs.io \\
      --tokenizer ./Llama-3.1-8B-Instruct --output crawl.jsonl.gz
  streamrag record --questions questions.txt --index ./docs-index -k 10 --output search.jsonl.gz --text hash
  streamrag trace show crawl.jsonl.gz
"""

WORDS = "words"
"""The tokenizer's name in traces whose sizes are words and punctuation marks instead of tokens."""
WORDS_NOTE = "sizes count words and punctuation, which are fewer than tokens: `record --tokenizer MODEL` counts tokens"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.usage = "%(prog)s (QUESTION ... | --questions FILE) (--url URL | --index FOLDER) --output FILE [options]"
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.add_argument("question", metavar="QUESTION", nargs="*", help="one or more, each in quotes")
    parser.add_argument("--questions", metavar="FILE", help="file with one question per line, or - for stdin")
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help=".jsonl, .jsonl.gz or .jsonl.zst")
    about = "record texts, or only hashes and lengths (%(default)s)"
    parser.add_argument("--text", choices=("full", "hash"), default="full", help=about)
    about = "a model's folder or name, to count tokens; without it, words and punctuation are counted"
    parser.add_argument("--tokenizer", metavar="PATH", help=about)
    parser.add_argument("--at-once", type=positive, default=1, metavar="N", help="concurrent queries (%(default)s)")
    parser.add_argument("--note", metavar="TEXT", help="note for the trace's header")
    add_source_arguments(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Record with a progress bar on stderr; return 1 if a retrieval failed. ConfigurationError without questions."""
    questions = [*arguments.question, *questions_in(arguments.questions)]
    if not questions:
        raise ConfigurationError("there is no question; give one or more, or a file with --questions")
    return asyncio.run(_record(arguments, questions))


def make_counter(tokenizer: str | None) -> tuple[str, Callable[[str], int]]:
    """Return a name and a function that counts a text's tokens, or without a tokenizer its words and punctuation.

    :raises ModelError: there is no such tokenizer.
    :raises MissingDependencyError: transformers is not installed.
    """
    if tokenizer is None:
        return WORDS, count_words
    encode = HuggingFaceTokenizer(tokenizer).encode
    name = Path(tokenizer).resolve().name if Path(tokenizer).exists() else tokenizer
    return name, lambda text: len(encode(text))


def questions_in(file: str | None) -> list[str]:
    """Return the stripped lines that are not blank of a UTF-8 file, or of stdin for "-"; [] for None.

    :raises ConfigurationError: the file is unreadable, not in UTF-8, or too large.
    """
    if file is None:
        return []
    try:
        if file == "-" and sys.stdin is None:
            raise ValueError("the standard input is closed")
        content = sys.stdin.buffer.read(MAX_SMALL_FILE_BYTES + 1) if file == "-" else read_bytes(file)
        if len(content) > MAX_SMALL_FILE_BYTES:
            raise ValueError(f"it has more than {MAX_SMALL_FILE_BYTES >> 20} MiB")
        if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            raise ValueError("it is in UTF-16; save it in UTF-8")
        lines = content.decode("utf-8-sig").split("\n")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise ConfigurationError(f"--questions {file}, line {line} is not in UTF-8; save it in UTF-8") from error
    except (OSError, ValueError) as error:
        raise ConfigurationError(f"--questions {file} cannot be read: {error}") from error
    return [line.strip() for line in lines if line.strip()]


def passage_counter(count: Callable[[str], int]) -> CountTokens:
    """Return a coroutine function that counts each chunk's tokens, formatted as in the default prompt, in a thread."""
    passages, tokenizing = PromptTemplate().passage_format(), anyio.CapacityLimiter(1)

    async def count_tokens(chunks: Sequence[tuple[int, Chunk]]) -> list[int]:
        texts = [passages.format(number, chunk) for number, chunk in chunks]
        return await anyio.to_thread.run_sync(lambda: [count(text) for text in texts], limiter=tokenizing)

    return count_tokens


async def _record(arguments: argparse.Namespace, questions: Sequence[str]) -> int:
    """Record, remove a new trace if all retrievals failed, print a summary on stderr; return 1 if any failed or 0."""
    console = Output(stderr=True)
    source = make_source(arguments)
    tokenizer, count = make_counter(arguments.tokenizer)
    is_new = not arguments.output.exists()
    provenance = {"note": arguments.note} if arguments.note else {}
    recorder = TraceRecorder(arguments.output, text=arguments.text, provenance=provenance)
    began_s = time.monotonic()
    lines = StepLines(console)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with bar(console, *columns) as progress:
        task = progress.add_task("starting", total=len(questions))

        def show_step(line: str) -> None:
            progress.update(task, description=escape(one_line(line)))
            lines.show(line)

        def show_recorded(num_queries: int, num_events: int) -> None:
            progress.update(task, completed=num_queries, description=f"retrieving, {num_events} chunk events")
            lines.show("retrieving", f"{num_queries} of {len(questions)} questions, {num_events} chunk events")

        failed = await record_queries(
            questions,
            source,
            recorder,
            passage_counter(count),
            tokenizer=tokenizer,
            num_at_once=arguments.at_once,
            progress=show_step,
            on_recorded=show_recorded,
        )
    if is_new and len(failed) == len(questions):
        arguments.output.unlink(missing_ok=True)  # otherwise the next attempt would be appended to it
    for line in _summary(arguments.output, questions, failed, time.monotonic() - began_s, is_new=is_new):
        console.print_line(line)
    if tokenizer == WORDS and len(failed) < len(questions):
        console.print_line(f"note: {WORDS_NOTE}", style="yellow")
    return 1 if failed else 0


def _summary(
    output: Path, questions: Sequence[str], failed: Mapping[str, Exception], elapsed_s: float, *, is_new: bool
) -> Iterator[str]:
    """Yield a line for each reason of failures, with its first question and the number of others, and then a total."""
    questions_of: dict[str, list[str]] = {}
    for question, error in failed.items():
        questions_of.setdefault(one_line(str(error)), []).append(one_line(question))
    for reason, (first, *more) in questions_of.items():
        yield f"failed: {first}{f' (and {len(more)} more)' if more else ''}: {reason}"
    num_recorded = len(questions) - len(failed)
    if is_new and not num_recorded:
        yield f"{output}: not written, no retrieval succeeded"
    else:
        where = "" if is_new else ", appended to the existing trace"
        yield f"{output}: {num_recorded} of {len(questions)} retrievals recorded in {elapsed_s:.1f} s{where}"
