"""Checks that find every problem of a configuration on this machine before anything is started."""

import importlib.util
import ipaddress
import re
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any

import anyio.to_thread

from streamrag.backends.tokenizer import HuggingFaceTokenizer, local_model_path
from streamrag.backends.vllm.client.lane_engine import INSTALL
from streamrag.core import Progress
from streamrag.core.lifecycle import start_all
from streamrag.errors import MissingDependencyError, ServerError, StreamRagError, install_line
from streamrag.routing import make_router
from streamrag.serve.config.factories import (
    check_max_decode,
    make_backend,
    make_replica_lane,
    make_template,
    make_tool_parser,
    replica_options,
)
from streamrag.serve.config.keys import read_keys
from streamrag.serve.config.layers import Loaded, Problem
from streamrag.serve.config.settings import CRAWL, EngineSettings, ReplicaSettings, Settings
from streamrag.serve.config.source_factory import make_source
from streamrag.serve.connections.gate import LOOPBACK
from streamrag.serve.server import listen
from streamrag.sources.index.index_folder import check_index

SOURCES = ("source.urls", "source.index", "source.postgres", "source.trace")  # settings that each name a source

PACKAGES = (
    ("source.urls", "crawl4ai", install_line("crawl")),
    ("source.index", "numpy", install_line("embed")),
    ("source.postgres", "psycopg", install_line("embed")),
    ("source.postgres", "psycopg_pool", install_line("embed")),
    ("engine.lanes", "nixl", INSTALL),
    ("replicas.decode", "nixl", INSTALL),
    ("replicas.number", "ray", install_line("ray")),
    ("replicas.sources", "ray", install_line("ray")),
    ("observe.otel_endpoint", "opentelemetry.sdk", install_line("serve")),
    ("observe.otel_endpoint", "opentelemetry.exporter.otlp.proto.http", install_line("serve")),
)
"""Settings, a module that each needs, and the command that installs it."""

ON_RAY = {"number", "address", "name", "sources"}
"""Settings of [replicas] that have an effect without replicas of the engine."""

NEEDS: Sequence[tuple[str, Collection[str], Sequence[str]]] = (
    ("source", CRAWL, ["source.urls"]),
    ("source", ("embedder", "k"), ["source.index", "source.postgres"]),
    ("source", ("hybrid", "rerank", "sentences"), ["source.index"]),
    ("source", ("table",), ["source.postgres"]),
    ("model", ("api_key", "tokenizer", "timeout_s"), ["model.server"]),
    ("replicas", ReplicaSettings.model_fields.keys() - ON_RAY, ["replicas.number"]),
    ("replicas", ("max_decode",), ["replicas.decode"]),
)
"""Sections, settings in them, and those of which one must be set for these to have an effect."""

EXCLUDES = (
    ("model.ignore_tools", "model.tool_call_parser", "leaves model.tool_call_parser without use", "Remove one of them"),
    ("replicas.number", "model.server", "is for an embedded vLLM, and model.server is set", ""),
    (
        "engine.lanes",
        "replicas.number",
        "is for engines of the service's own process, and replicas.number is set",
        "Set replicas.decode instead",
    ),
)
"""Two settings that exclude each other, the complaint about the first, and its remedy."""

TRIALS: Sequence[tuple[str, str, Callable[[Settings], Any]]] = (
    ("prompt", "prompt", lambda settings: make_template(settings.prompt)),
    ("replicas.router", "replicas.number", lambda settings: make_router(settings.replicas.router)),
    ("replicas", "replicas.number", lambda settings: replica_options(settings.replicas)),
    ("replicas.max_decode", "replicas.number", lambda settings: check_max_decode(settings.replicas)),
    ("engine", "replicas.decode", lambda settings: make_replica_lane(settings.model, settings.engine, "prefill")),
)
"""Parts that are made to see whether that fails: the setting to blame, the one without which it is not tried, how."""


def check(loaded: Loaded) -> list[Problem]:
    """Return all problems, beginning with those found while loading. Takes seconds for a large index."""
    settings = Settings.model_construct(**loaded.sections)  # type: ignore[arg-type]
    problems = list(loaded.problems)
    for find_problems in (_combinations, _source, _model, _files_and_addresses):
        problems += find_problems(loaded, settings)
    return problems


async def check_model(loaded: Loaded, progress: Progress) -> list[Problem]:
    """Return what only the model's tokenizer or server shows: that there is no such model, or a wrong tool parser. A
    server that does not answer is no problem, as it may be started later, but its error goes to `progress`."""
    settings, where = loaded.settings, "model.name"
    model, parser = settings.model, make_tool_parser(settings.model)
    try:
        if model.server is not None:
            backend = make_backend(model, settings.engine)
            async with await start_all([backend], progress):
                tokenizer = backend.model.tokenizer
        elif parser is not None or local_model_path(model.name) is None:
            of_engine = partial(HuggingFaceTokenizer.of_engine, model.name, settings.engine.engine_args)
            tokenizer = await anyio.to_thread.run_sync(of_engine)
        if parser is not None:
            where = "model.tool_call_parser"
            await anyio.to_thread.run_sync(parser.load, tokenizer)
    except ServerError as error:
        progress(f"not checked: {error}")
    except StreamRagError as error:
        return [Problem(loaded.where(where), str(error))]
    return []


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address: "localhost", or a loopback IP; not for any other name."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def permitted_hosts(settings: Settings, *, has_keys: bool) -> frozenset[str] | None:
    """Return the permitted names in the Host header: loopback's, the address and `server.hosts`; None permits any.

    Prevents DNS rebinding, by which a foreign page resolves its own name to this address. Such a page has no key, so a
    service with keys permits any name by default, unless its address is loopback.
    """
    server = settings.server
    if "*" in server.hosts or (has_keys and not server.hosts and not is_loopback(server.host)):
        return None
    return LOOPBACK | {server.host, *server.hosts}


def _combinations(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield the problems that `NEEDS`, `EXCLUDES`, `PACKAGES` and `TRIALS` describe, and vLLM's settings beside a
    server. Without a model, either kind may follow."""
    given = [(place, *name.partition(".")[::2]) for name, place in loaded.places.items()]
    for section, names, needed in NEEDS:
        is_open = section == "model" and not settings.model.name
        if not is_open and not any(attrgetter(each)(settings) for each in needed):
            complaint = f"is for {' or '.join(needed)}, which is not set"
            yield from (Problem(place, complaint) for place, of, name in given if of == section and name in names)
    if settings.model.server is not None:
        complaint = "is for an embedded vLLM, and model.server is set"
        yield from (Problem(place, complaint) for place, section, _ in given if section == "engine")
    for name, other, complaint, remedy in EXCLUDES:
        if attrgetter(name)(settings) and attrgetter(other)(settings):
            yield Problem(loaded.where(name), complaint, remedy)
    for name, module, install in PACKAGES:
        if attrgetter(name)(settings):
            yield from _missing(loaded.where(name), module, install)
    for name, condition, make in TRIALS:
        if attrgetter(condition)(settings):
            yield from _errors(loaded.where(name), make, settings)


def _source(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield the problems of the source: more than one, a missing file, a bad index, bad settings."""
    source, names = settings.source, [name for name in SOURCES if attrgetter(name)(settings)]
    where, path = " and ".join(map(loaded.where, names)), source.index or source.trace
    if len(names) > 1:
        yield Problem(where, "only one of them can be", "Remove the others")
    elif path is not None and not path.exists():
        yield Problem(where, f"there is no {path}")
    elif names:
        if source.index is not None:
            yield from _errors(where, check_index, source.index.absolute())
        if all(_is_installed(module) for name, module, _ in PACKAGES if name in names):
            yield from _errors(where, make_source, source)


def _model(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield the problems of model, engine and tool parser: missing files or packages, and what making them raises."""
    model = settings.model
    where = loaded.where("model.name" if model.server is None else "model.server")
    if model.server is None:
        if not model.name:
            yield Problem("model.name", "there is no model", "Name one, as --model ./Llama-3.1-8B-Instruct")
            return
        yield from _missing(where, "vllm", install_line("vllm"))
        folder = Path(model.name).expanduser()
        if folder.is_dir() and not (folder / "config.json").is_file():
            yield Problem(where, f"{folder} has no config.json", "Name a folder that holds a model")
    model_errors = list(_errors(where, make_backend, model, EngineSettings()))
    yield from model_errors or _errors("engine", make_backend, model, settings.engine)
    yield from _errors(loaded.where("model.tool_call_parser"), make_tool_parser, model)


def _files_and_addresses(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield the problems of keys, of an address beyond loopback that has neither keys nor `no_keys`, or that
    cannot be listened on (the port is tried), and of the tracing endpoint."""
    keys, server = settings.keys, settings.server
    yield from _errors(loaded.where("keys.pairs" if keys.file is None else "keys.file"), read_keys, keys)
    if keys.file is None and keys.pairs is None and not server.no_keys and not is_loopback(server.host):
        yield Problem(
            loaded.where("server.host"),
            f"listens on {server.host} without keys, where anybody could send requests",
            "Give it keys with --keys FILE, or --no-keys if that is intended",
        )
    if "server.port" not in loaded.wrong:
        yield from _errors(loaded.where("server.port"), lambda: listen(server.host, server.port).close())
    endpoint = settings.observe.otel_endpoint
    if endpoint is not None and not endpoint.startswith(("http://", "https://")):
        where = loaded.where("observe.otel_endpoint")
        yield Problem(where, f"{endpoint!r:.80} is not an http or https address")


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # a package that the module is in
        return False


def _missing(where: str, module: str, install: str) -> Iterator[Problem]:
    """Yield a problem if this module is not installed."""
    if not _is_installed(module):
        yield Problem(where, f"{re.sub('[._]', '-', module)} is not installed", install)


def _errors(where: str, make: Callable[..., Any], *arguments: Any) -> Iterator[Problem]:
    """Yield what `make` raises as a problem: an error of ours, or a ValueError, as for a URL that cannot be parsed."""
    try:
        make(*arguments)
    except MissingDependencyError as error:
        yield Problem(where, f"{error.package} is not installed", error.install)
    except (StreamRagError, ValueError) as error:
        yield Problem(where, str(error))
