"""`streamrag ask`: one question, from the web or from an index, answered in the terminal."""

import argparse
import asyncio
import os
from dataclasses import asdict
from typing import Any, get_args

from rich.text import Text

from streamrag.asked import QueryOptions
from streamrag.backends.vllm.client.arguments import Strategy
from streamrag.cli.output import Output
from streamrag.cli.source import add_source_arguments, make_source
from streamrag.cli.steps import StepLines
from streamrag.cli.view import print_sources, print_timings, watch
from streamrag.core import Backend, SamplingParams
from streamrag.errors import ConfigurationError
from streamrag.pipeline import Pipeline
from streamrag.showing import one_line
from streamrag.telemetry import Answer

EPILOG = """\
examples:
  streamrag ask "How do I cancel a task group?" --url https://anyio.readthedocs.io --model ./Llama-3.1-8B-Instruct
  streamrag ask "What changed in 2.0?" --index ./docs-index --model ./Llama-3.1-8B-Instruct
  streamrag ask "What changed in 2.0?" --index ./docs-index --rerank late-interaction --model ./Llama-3.1-8B-Instruct
  streamrag ask "Who wrote this?" --url http://127.0.0.1:8000 --allow-private \\
      --server http://127.0.0.1:8001/v1 --model my-model
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command is told, and what runs it."""
    parser.usage = "%(prog)s QUESTION (--url URL | --index FOLDER) --model MODEL [options]"
    parser.description = "Answers a question. What is retrieved streams into the model while retrieval still runs."
    parser.epilog = EPILOG
    parser.add_argument("question", metavar="QUESTION", help="in quotes")
    add_source_arguments(parser)
    model = parser.add_argument_group("model")
    model.add_argument("--model", required=True, help="path or name of a model for vLLM, or its name at --server")
    model.add_argument("--server", metavar="URL", help="use an OpenAI-compatible server instead of an embedded vLLM")
    model.add_argument("--tokenizer", metavar="PATH", help="the model's tokenizer, for exact prompts with --server")
    model.add_argument("--api-key", metavar="KEY", help="for --server; OPENAI_API_KEY in the environment unless given")
    model.add_argument("--max-model-len", type=int, metavar="N", help="most tokens of prompt and answer together")
    model.add_argument("--strategy", choices=get_args(Strategy), help="how an embedded vLLM prefills early (streaming)")
    model.add_argument("--policy", metavar="NAME", help="whom an embedded vLLM serves first with streaming (srpf)")
    answer = parser.add_argument_group("answer")
    answer.add_argument("--system", metavar="TEXT", help="replaces the system text")
    answer.add_argument(
        "--max-tokens", type=int, default=256, metavar="N", help="most tokens of the answer (%(default)s)"
    )
    answer.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy (%(default)g)")
    answer.add_argument(
        "--max-context-tokens", type=int, metavar="N", help="most tokens of context; the rest is left out"
    )
    answer.add_argument("--deadline", type=float, metavar="S", help="give up S seconds after the engine has started")
    answer.add_argument("--no-overlap", action="store_true", help="retrieve everything first, then ask")
    answer.add_argument("--json", action="store_true", help="print the result as JSON instead")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Answer the question; progress goes to stderr, the answer alone to stdout."""
    asyncio.run(_ask(arguments))
    return 0


async def _ask(arguments: argparse.Namespace) -> None:
    progress, output = Output(stderr=True), Output(quiet=arguments.json)
    options = QueryOptions(
        params=SamplingParams(max_tokens=arguments.max_tokens, temperature=arguments.temperature),
    )
    if arguments.system is not None:
        options["system"] = arguments.system
    if arguments.max_context_tokens is not None:
        options["max_context_tokens"] = arguments.max_context_tokens
    if arguments.deadline is not None:
        options["deadline_s"] = arguments.deadline
    lines = StepLines(progress)
    with progress.status("starting") as status:

        def show(line: str) -> None:
            status.update(Text(one_line(line)))
            lines.show(line)

        pipeline = Pipeline(
            make_source(arguments),
            _make_backend(arguments),
            overlap=not arguments.no_overlap,
            on_progress=show,
        )
        question = pipeline.events(arguments.question, **options)  # checked before anything starts, asked behind it
        await pipeline.start()
    try:
        async with question as events:
            answer = await watch(events, progress, answer_to=output)
    finally:
        await pipeline.aclose()
    if arguments.json:
        output.print_json_text(as_json(answer))
    else:
        print_sources(answer, progress)
        print_timings(answer, progress)


def _make_backend(arguments: argparse.Namespace) -> Backend:
    if arguments.server is not None:
        for option in ("strategy", "policy"):
            if getattr(arguments, option) is not None:
                raise ConfigurationError(f"--{option} is for an embedded vLLM, and --server was given")
        from streamrag.backends.openai import OpenAIBackend

        return OpenAIBackend(
            arguments.server,
            arguments.model,
            tokenizer=arguments.tokenizer,
            api_key=arguments.api_key or os.environ.get("OPENAI_API_KEY"),
            max_model_len=arguments.max_model_len,
        )
    for option in ("tokenizer", "api_key"):
        if getattr(arguments, option) is not None:
            raise ConfigurationError(f"--{option.replace('_', '-')} is for --server, which was not given")
    from streamrag.backends.vllm import VllmBackend
    from streamrag.engine.policies import DEFAULT_POLICY

    return VllmBackend(
        arguments.model,
        strategy=arguments.strategy or "streaming",
        policy=arguments.policy or DEFAULT_POLICY,
        max_model_len=arguments.max_model_len,
    )


def as_json(answer: Answer) -> dict[str, Any]:
    """The answer as `--json` prints it."""
    error = answer.source_error
    return {
        **asdict(answer),
        "has_context": answer.has_context,
        "source_error": None if error is None else str(error),
    }
