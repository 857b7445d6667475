"""`streamrag serve`: serve a pipeline over HTTP, for OpenAI clients and for programs with their own retrieval."""

import argparse
import asyncio
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from streamrag.cli.output import Output, markup
from streamrag.cli.progress import StepLines, shown_starting
from streamrag.errors import ConfigurationError, require_modules
from streamrag.support.files import cache_folder

if TYPE_CHECKING:
    from streamrag.serve.config.settings import Settings
    from streamrag.serve.connections.gate import Gate

DESCRIPTION = """\
Serves a model and a source over HTTP to any OpenAI client. Programs with their
own retrieval can stream their context in. Listens on loopback by default.
"""
EPILOG = """\
examples:
  streamrag serve --demo
  streamrag serve --index ./handbook-index --model ./Llama-3.1-8B-Instruct
  streamrag serve --config service.toml --check
  streamrag serve --config service.toml --host 0.0.0.0 --keys keys.toml --limits.max_queries 128
  streamrag serve --config service.toml --replicas 2
  streamrag serve --print-config > service.toml

Each setting in the output of `--print-config` is also an option, such as --limits.max_queries, and an environment
variable, such as STREAMRAG__LIMITS__MAX_QUERIES. Options override the environment, the file and the defaults.

exit status: 0, all queries ended; 1, it could not start; 3, queries were aborted; 4, the engine died.
"""

SHORT = {
    "model.name": "--model",
    "model.server": "--server",
    "model.max_model_len": "--max-model-len",
    "model.tool_call_parser": "--tool-call-parser",
    "model.ignore_tools": "--ignore-tools",
    "source.urls": "--url",
    "source.index": "--index",
    "source.postgres": "--postgres",
    "source.trace": "--trace",
    "source.base_url": "--base-url",
    "source.embedder": "--embedder",
    "source.rerank": "--rerank",
    "source.sentences": "--sentences",
    "source.k": "-k",
    "engine.policy": "--policy",
    "replicas.number": "--replicas",
    "prompt.system": "--system",
    "server.host": "--host",
    "server.port": "--port",
    "server.no_keys": "--no-keys",
    "keys.file": "--keys",
}
"""Short option names of some settings."""
SECRETS = frozenset({"model.api_key", "keys.pairs"})
"""Settings without an option: command lines are visible to all users of a machine."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the command's arguments, and its `run`."""
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    parser.usage = "%(prog)s (--demo | --model MODEL [--index FOLDER | --url URL | ...] | --config FILE) [options]"
    add = parser.add_argument
    add("--config", type=Path, metavar="FILE", help="a TOML file, as --print-config prints it")
    add("--demo", action="store_true", help="make and serve a small model and an index of streamrag's documentation")
    about = "folder for the demo's files (~/.cache/streamrag/demo)"
    add("--demo-folder", type=Path, metavar="FOLDER", help=about)
    add("--check", action="store_true", help="print all problems of the settings, or the settings, and exit")
    add("--print-config", action="store_true", help="print a configuration file with all defaults, and exit")
    parser.set_defaults(run=run)
    _add_settings(parser)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option `--SECTION.KEY` for each setting that is no secret, and its short name, which alone is in help."""
    from streamrag.serve.config.layers import SECTIONS

    for section, model in SECTIONS.items():
        group = parser.add_argument_group(section)
        for key, field in model.model_fields.items():
            name = f"{section}.{key}"
            if name in SECRETS:
                continue
            options: dict[str, Any] = {"dest": name}
            if field.annotation is bool:
                options |= {"nargs": "?", "const": "true"}
            if name == "source.urls":
                options["action"] = "append"
            if name in SHORT:
                metavar = None if field.annotation is bool else SHORT[name].strip("-").upper()
                text = (field.description or "").replace("%", "%%")
                group.add_argument(SHORT[name], metavar=metavar, help=text, **options)
            parser.add_argument(f"--{name}", help=argparse.SUPPRESS, **options)


def run(arguments: argparse.Namespace) -> int:
    """Print the defaults; or print problems and return 1; or print the settings for --check; or serve until a signal.

    --demo makes its files before the settings are checked.
    """
    require_modules("serve", "starlette", "uvicorn")
    from streamrag.serve.config.checks import check, check_model
    from streamrag.serve.config.layers import SECTIONS, load
    from streamrag.serve.config.settings import commented_defaults, effective

    if arguments.print_config:
        Output().print_plain(commented_defaults())
        return 0
    options = {
        name: value
        for name, value in vars(arguments).items()
        if name.partition(".")[0] in SECTIONS and "." in name and value is not None
    }
    defaults = _make_demo(arguments, options) if arguments.demo else {}
    loaded = load(arguments.config, os.environ, options, defaults=defaults)
    problems = check(loaded)
    errors = Output(stderr=True)
    if arguments.check and not problems:
        problems = asyncio.run(check_model(loaded, errors.print_line))
    if problems:
        for problem in problems:
            errors.print_line(markup("[red]{}:[/] {}", problem.where, problem.what))
            if problem.remedy:
                errors.print_line(f"  {problem.remedy}")
        return 1
    settings = loaded.settings
    if arguments.check:
        Output().print_plain(effective(settings))
        return 0
    return asyncio.run(_serve(settings))


def _make_demo(arguments: argparse.Namespace, options: Mapping[str, Any]) -> dict[str, Any]:
    """Make the demo's index, and a model unless one is named, if not up to date, and return `demo_settings`.

    :raises ConfigurationError: packages are missing.
    """
    from streamrag.demo.demo_folder import demo_settings, missing_for_demo, prepare_demo

    with_model = "model.name" not in options
    if missing := missing_for_demo(with_model=with_model):
        installs = "".join(f"\n  {how}" for how in dict.fromkeys(how for _, how in missing))
        raise ConfigurationError(
            f"the demo needs {', '.join(name for name, _ in missing)}. Install them with:{installs}"
        )
    folder = (arguments.demo_folder or cache_folder() / "demo").expanduser().absolute()
    errors = Output(stderr=True)
    lines = StepLines(errors)
    with errors.status("looking for the demo's files") as status:

        def show(step: str, num_done: int, num_total: int) -> None:
            status.update(Text(f"{step}, {num_done:,} of {num_total:,}"))
            lines.show(step, f"{num_done / max(num_total, 1):.0%}")

        is_new = prepare_demo(folder, model="smollm2" if with_model else None, on_step=show)
    errors.print_line(f"{'made' if is_new else 'using'} the demo's files in {folder}")
    return demo_settings(folder, with_model=with_model)


async def _serve(settings: "Settings") -> int:
    """Bind the port, start the service, serve it until a signal or the engine's death, and return the exit status."""
    from streamrag.serve import create_app
    from streamrag.serve.config.checks import permitted_hosts
    from streamrag.serve.config.factories import make_observers, make_service
    from streamrag.serve.config.keys import read_keys
    from streamrag.serve.huge_pages import collapse_memory
    from streamrag.serve.server import listen, serve

    errors = Output(stderr=True)
    keys = read_keys(settings.keys)
    observers, close_observers = make_observers(settings, keys)
    service = make_service(settings, observers=observers)
    sock = listen(settings.server.host, settings.server.port)
    with sock:
        with shown_starting(errors) as show:
            await service.start(show)
            await asyncio.to_thread(collapse_memory)
        app = create_app(
            service,
            keys=keys,
            hosts=permitted_hosts(settings, has_keys=bool(keys)),
            origins=frozenset(settings.server.origins),
        )
        host, port = sock.getsockname()[:2]
        try:
            return await serve(app, service, sock, on_ready=lambda: _on_ready(errors, settings, app, host, port))
        finally:
            await close_observers()


def _on_ready(errors: Output, settings: "Settings", app: "Gate", host: str, port: int) -> None:
    """Print addresses and an example; reload a file's keys on each SIGHUP, except on a terminal, where SIGHUP stops."""
    named = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    url = f"http://[{named}]:{port}" if ":" in named else f"http://{named}:{port}"
    has_keys = app.has_keys
    key = ' -H "Authorization: Bearer $KEY"' if has_keys else ""
    body = '{"stream": true, "messages": [{"role": "user", "content": "..."}]}'
    errors.print_line(f"ready: {url}/")
    errors.print_line(f"  OpenAI clients: base_url={url}/v1" + ("" if has_keys else ", any api_key"))
    errors.print_line(f"  curl -N {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'")
    if settings.source == type(settings.source)():
        errors.print_line("  no source is set: clients stream their own context")
    if settings.keys.file is not None and not sys.stderr.isatty():  # on a terminal, SIGHUP stops it
        asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, _reload_keys, settings, app, errors)


def _reload_keys(settings: "Settings", app: "Gate", errors: Output) -> None:
    """Read the keys again; if they are invalid, print why and keep the old ones."""
    from streamrag.serve.config.keys import read_keys

    try:
        keys = read_keys(settings.keys)
    except ConfigurationError as error:
        errors.print_line(markup("[red]the keys are unchanged:[/] {}", error))
        return
    app.set_keys(keys)
    errors.print_line(f"loaded {len(keys)} keys")
