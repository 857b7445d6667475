"""Command-line options that name a model, shared by the commands that ask one."""

import argparse
import os
from typing import get_args

from streamrag.backends.openai import OpenAIBackend
from streamrag.backends.vllm import SchedulerOptions, VllmBackend
from streamrag.backends.vllm.client.arguments import Strategy
from streamrag.core import Backend
from streamrag.engine.policies import DEFAULT_POLICY
from streamrag.errors import ConfigurationError


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of an embedded vLLM and of a server."""
    add = parser.add_argument_group("model").add_argument
    add("--model", required=True, help="path or name of a model for vLLM, or its name at --server")
    add("--server", metavar="URL", help="use an OpenAI-compatible server instead of an embedded vLLM")
    add("--tokenizer", metavar="PATH", help="the model's tokenizer, for exact prompts with --server")
    add("--api-key", metavar="KEY", help="for --server (OPENAI_API_KEY in the environment)")
    add("--max-model-len", type=int, metavar="N", help="maximum tokens of prompt and answer together")
    about = "how an embedded vLLM prefills partial prompts (streaming)"
    add("--strategy", choices=get_args(Strategy), help=about)
    add("--policy", metavar="NAME", help="scheduling policy of an embedded vLLM with streaming (srpf)")


def make_backend(arguments: argparse.Namespace) -> Backend:
    """Return the backend, not started; raise ConfigurationError for an option of the other kind."""
    if arguments.server is not None:
        for option in ("strategy", "policy"):
            if getattr(arguments, option) is not None:
                raise ConfigurationError(f"--{option} is for an embedded vLLM, but --server was given")
        return OpenAIBackend(
            arguments.server,
            arguments.model,
            tokenizer=arguments.tokenizer,
            api_key=arguments.api_key or os.environ.get("OPENAI_API_KEY"),
            max_model_len=arguments.max_model_len,
        )
    for option in ("tokenizer", "api_key"):
        if getattr(arguments, option) is not None:
            raise ConfigurationError(f"--{option.replace('_', '-')} needs --server, which was not given")
    return VllmBackend(
        arguments.model,
        scheduler=SchedulerOptions(policy=arguments.policy or DEFAULT_POLICY),
        strategy=arguments.strategy or "streaming",
        max_model_len=arguments.max_model_len,
    )
