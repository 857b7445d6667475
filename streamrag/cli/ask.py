"""`streamrag ask`: answer a question, or hold a conversation, about the web or an index."""

import argparse
import asyncio
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from streamrag.cli.answer_display import print_sources, print_timings, watch
from streamrag.cli.conversation import ChatHistory, converse
from streamrag.cli.model_options import add_model_arguments, make_backend
from streamrag.cli.output import Output
from streamrag.cli.progress import shown_starting
from streamrag.cli.source_options import add_source_arguments, make_source
from streamrag.core import SamplingParams, Turn
from streamrag.errors import ConfigurationError
from streamrag.pipeline import Pipeline
from streamrag.query.options import QueryOptions
from streamrag.sources.index.index_folder import check_index
from streamrag.telemetry import Answer

EPILOG = """\
examples:
  streamrag ask "How do I cancel a task group?" --url https://anyio.readthedocs.io --model ./Llama-3.1-8B-Instruct
  streamrag ask "What changed in 2.0?" --index ./docs-index --model ./Llama-3.1-8B-Instruct
  streamrag ask "What changed in 2.0?" --index ./docs-index --rerank late-interaction --model ./Llama-3.1-8B-Instruct
  streamrag ask "Who wrote this?" --url http://127.0.0.1:8000 --allow-private \\
      --server http://127.0.0.1:8001/v1 --model my-model
  streamrag ask --index ./docs-index --model ./Llama-3.1-8B-Instruct
  streamrag ask --index ./docs-index --model ./Llama-3.1-8B-Instruct < questions.txt

Without a QUESTION it is a conversation: each line of the input is a question,
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.usage = "%(prog)s [QUESTION] (--url URL | --index FOLDER | --postgres DSN) --model MODEL [options]"
    parser.description = "Answers questions. Retrieved context streams into the model while retrieval is still running."
    parser.epilog = EPILOG
    about = "in quotes; without it, questions are read from the standard input"
    parser.add_argument("question", nargs="?", metavar="QUESTION", help=about)
    add_source_arguments(parser)
    add_model_arguments(parser)
    answer = parser.add_argument_group("answer")
    answer.add_argument("--system", metavar="TEXT", help="system text, instead of the default")
    about = "maximum tokens of the answer (%(default)s)"
    answer.add_argument("--max-tokens", type=int, default=256, metavar="N", help=about)
    answer.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)g)")
    about = "maximum tokens of context; chunks that do not fit are left out"
    answer.add_argument("--max-context-tokens", type=int, metavar="N", help=about)
    answer.add_argument("--deadline", type=float, metavar="S", help="time limit in seconds, from the engine's start")
    about = "prefill only after retrieval has ended"
    answer.add_argument("--no-overlap", dest="overlap", action="store_const", const=False, default="auto", help=about)
    answer.add_argument("--json", action="store_true", help="print the result as JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer the question, or each line of the input. Progress goes to stderr, answers to stdout."""
    if arguments.index is not None:  # a wrong one is found before vLLM is imported, which takes up to a minute
        check_index(Path(arguments.index).absolute())
    return asyncio.run(_ask(arguments))


async def _ask(arguments: argparse.Namespace) -> int:
    """Answer the question, whose error is raised, or each line of stdin; return 1 if lines of a file failed, else 0."""
    progress, output = Output(stderr=True), Output(quiet=arguments.json)
    options = _query_options(arguments)
    is_conversation = arguments.question is None
    if is_conversation and sys.stdin is None:  # file descriptor 0 may be another file now
        raise ConfigurationError("the standard input is closed; give a QUESTION")
    with shown_starting(progress) as show:
        backend = make_backend(arguments)
        pipeline = Pipeline(make_source(arguments), backend, overlap=arguments.overlap, on_progress=show)
        pipeline.events("?" if is_conversation else arguments.question, **options)  # check options before starting
        await pipeline.start()

    async def answer_question(question: str, history: tuple[Turn, ...] = ()) -> Answer:
        query_options: QueryOptions = {**options, "history": history}
        async with pipeline.events(question, **query_options) as events:
            answer = await watch(events, progress, answer_to=output)
        if arguments.json:
            output.print_json_text(as_json(answer))
        else:
            print_sources(answer, progress)
            print_timings(answer, progress)
        return answer

    try:
        if not is_conversation:
            await answer_question(arguments.question)
            return 0
        conversation = ChatHistory(answer_question, max_characters=backend.model.max_model_len)
        num_failed = await converse(conversation, progress, output)
        return 1 if num_failed and not os.isatty(0) else 0
    finally:
        await pipeline.aclose()


def _query_options(arguments: argparse.Namespace) -> QueryOptions:
    """Return the options of each query; those that were not given are left out, for the pipeline's defaults."""
    options = QueryOptions(params=SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature))
    if arguments.system is not None:
        options["system"] = arguments.system
    if arguments.max_context_tokens is not None:
        options["max_context_tokens"] = arguments.max_context_tokens
    if arguments.deadline is not None:
        options["deadline_s"] = arguments.deadline
    return options


def as_json(answer: Answer) -> dict[str, Any]:
    """Return the answer's fields, with the source's error as text."""
    error = answer.source_error
    return {**asdict(answer), "has_context": answer.has_context, "source_error": error and str(error)}
