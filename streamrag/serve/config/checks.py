"""Checks that find every problem of a configuration on this machine before anything is started."""

import importlib.util
import ipaddress
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from streamrag.backends.vllm.client.lane_engine import INSTALL
from streamrag.errors import ConfigurationError, MissingDependencyError, install_line
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
from streamrag.serve.config.settings import EngineSettings, ReplicaSettings, Settings, SourceSettings
from streamrag.serve.config.source_factory import CRAWL, make_source
from streamrag.serve.connections.gate import LOOPBACK
from streamrag.serve.server import listen
from streamrag.sources.index.index_folder import check_index
from streamrag.support.versions import installed_versions

SOURCES = ("urls", "index", "postgres", "trace")  # settings that each name a source

PACKAGES = {
    "urls": [("crawl4ai", "crawl")],
    "index": [("numpy", "embed")],
    "postgres": [("psycopg", "postgres"), ("psycopg_pool", "postgres")],
}
"""Modules that a source needs, each with the extra that installs it."""

OTEL_PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


ON_RAY = {"number", "address", "name", "sources", "max_sources", "source_num_cpus", "place_s"}
"""Settings of [replicas] that have an effect without replicas of the engine."""

NEEDS: tuple[tuple[str, Collection[str], Sequence[str]], ...] = (
    ("source", CRAWL, ["source.urls"]),
    ("source", ("embedder", "k"), ["source.index", "source.postgres"]),
    ("source", ("hybrid", "rerank", "sentences"), ["source.index"]),
    ("source", ("table",), ["source.postgres"]),
    ("model", ("api_key", "tokenizer", "timeout_s"), ["model.server"]),
    ("replicas", ReplicaSettings.model_fields.keys() - ON_RAY, ["replicas.number"]),
    ("replicas", ("max_decode",), ["replicas.decode"]),
)
"""Sections, settings in them, and those of which one must be set for these to have an effect."""


def check(loaded: Loaded) -> list[Problem]:
    """Return all problems, beginning with those found while loading. Takes seconds for a large index."""
    settings = Settings.model_construct(**loaded.sections)  # type: ignore[arg-type]
    problems = list(loaded.problems)
    for find_problems in (_without_effect, _source, _model, _engines, _texts_and_keys, _server, _observe):
        problems += find_problems(loaded, settings)
    return problems


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


def _without_effect(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield a problem for each setting given that has no effect by `NEEDS`, or as vLLM's beside a server.

    Without a model, either kind may follow.
    """
    given = [(loaded.where(*place), place) for place in loaded.places]
    for section, names, needed in NEEDS:
        if any(getattr(getattr(settings, kind), name) for kind, name in (each.split(".") for each in needed)):
            continue
        if section != "model" or settings.model.name:
            complaint = f"is for {' or '.join(needed)}, which is not set"
            yield from (
                Problem(where, complaint) for where, place in given if place[0] == section and place[1] in names
            )
    if settings.model.server is not None:
        complaint = "is for an embedded vLLM, and model.server is set"
        yield from (Problem(where, complaint) for where, place in given if place[0] == "engine")


def _source_kinds(source: SourceSettings) -> list[str]:
    return [name for name in SOURCES if getattr(source, name)]


def _source(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield the problems of the source: more than one, missing files or packages, a bad index, bad settings."""
    source = settings.source
    kinds = _source_kinds(source)
    if len(kinds) > 1:
        places = [loaded.where("source", name) for name in kinds]
        yield Problem(" and ".join(places), "only one of them can be", "Remove the others")
        return
    kind = kinds[0] if kinds else "none"
    where = loaded.where("source", kind)
    paths = [(loaded.where("source", name), getattr(source, name)) for name in ("index", "trace")]
    missing = [Problem(place, f"there is no {path}") for place, path in paths if path is not None and not path.exists()]
    missing += _packages(where, PACKAGES.get(kind, ()))
    yield from missing
    if source.index is not None and source.index.exists():
        index = source.index.absolute()
        yield from _errors(where, lambda: check_index(index))
    if not missing:
        yield from _errors(where, lambda: make_source(source))


def _model(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield the problems of model, engine and tool parser: missing files or packages, and what making them raises."""
    model, engine = settings.model, settings.engine
    where = loaded.where("model", "name")
    if model.server is None:
        if not model.name:
            yield Problem("model.name", "there is no model", "Name one, as --model ./Llama-3.1-8B-Instruct")
            return
        yield from _packages("model.name", [("vllm", "vllm")])
        folder = Path(model.name).expanduser()
        if folder.is_dir() and not (folder / "config.json").is_file():
            yield Problem(where, f"{folder} has no config.json", "Name a folder that holds a model")
    model_errors = list(_errors(where, lambda: make_backend(model, EngineSettings())))
    yield from model_errors or _errors("engine", lambda: make_backend(model, engine))
    yield from _errors(loaded.where("model", "tool_call_parser"), lambda: make_tool_parser(model))


def _engines(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield the problems of the log (unwritable), of replicas of engines or sources (no Ray), and of replicas of
    engines (a model on a server, a shared log file, a bad router, bad options)."""
    log_path, replicas = settings.engine.log_path, settings.replicas
    if log_path is not None and not os.access(log_path.parent, os.W_OK):
        yield Problem(loaded.where("engine", "log_path"), f"nothing can be written to {log_path.parent}")
    yield from _lane_problems(loaded, settings)
    for key in ("number", "sources"):
        if getattr(replicas, key):
            yield from _packages(loaded.where("replicas", key), [("ray", "ray")])
    if not replicas.number:
        return
    if settings.model.server is not None:
        yield Problem(loaded.where("replicas", "number"), "is for an embedded vLLM, and model.server is set")
    if log_path is not None:
        what = "is one file, and each replica would write to it"
        yield Problem(loaded.where("engine", "log_path"), what, "Leave it out")
    yield from _errors(loaded.where("replicas", "router"), lambda: make_router(replicas.router))
    yield from _errors("replicas", lambda: replica_options(replicas))
    yield from _errors(loaded.where("replicas", "max_decode"), lambda: check_max_decode(replicas))


def _lane_problems(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield the problems of lanes: no NIXL, engines that cannot be lanes on Ray, a shared log file, replicas."""
    where, engine, replicas = loaded.where("engine", "lanes"), settings.engine, settings.replicas
    if engine.lanes is None and not replicas.decode:
        return
    if importlib.util.find_spec("nixl") is None:
        yield Problem(where if engine.lanes else loaded.where("replicas", "decode"), "nixl is not installed", INSTALL)
    if replicas.decode:
        yield from _errors("engine", lambda: make_replica_lane(settings.model, engine, "prefill"))
    if engine.lanes and engine.log_path is not None:
        what = "is one file, and each lane would write to it"
        yield Problem(loaded.where("engine", "log_path"), what, "Leave it out")
    if engine.lanes and replicas.number:
        what = "is for engines of the service's own process, and replicas.number is set"
        yield Problem(where, what, "Set replicas.decode instead")


def _texts_and_keys(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield the problems of prompt texts and of the keys, whose file is read."""
    yield from _errors("prompt", lambda: make_template(settings.prompt))
    name = "file" if settings.keys.file is not None else "pairs"
    yield from _errors(loaded.where("keys", name), lambda: read_keys(settings.keys))


def _server(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield a problem for an address beyond loopback that has neither keys nor `no_keys`, and for one that cannot be
    listened on: the port is tried."""
    server, keys = settings.server, settings.keys
    has_keys = keys.file is not None or keys.pairs is not None
    if not (is_loopback(server.host) or has_keys or server.no_keys):
        yield Problem(
            loaded.where("server", "host"),
            f"listens on {server.host} without keys, where anybody could send requests",
            "Give it keys with --keys FILE, or --no-keys if that is intended",
        )
    if ("server", "port") not in loaded.wrong:
        yield from _errors(loaded.where("server", "port"), lambda: listen(server.host, server.port).close())


def _observe(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    """Yield the problems of the tracing endpoint, if there is one: no http or https address, missing packages."""
    endpoint = settings.observe.otel_endpoint
    if endpoint is None:
        return
    where = loaded.where("observe", "otel_endpoint")
    if not endpoint.startswith(("http://", "https://")):
        yield Problem(where, f"{endpoint!r:.80} is not an http or https address")
    installed = installed_versions(*OTEL_PACKAGES)
    for name in OTEL_PACKAGES:
        if name not in installed:
            yield Problem(where, f"{name} is not installed", install_line("otel"))


def _packages(where: str, modules: Sequence[tuple[str, str]]) -> Iterator[Problem]:
    """Yield a problem for each of these modules that is not installed; each has the extra that installs it."""
    for module, extra in modules:
        if importlib.util.find_spec(module) is None:
            name = module.replace("_", "-")
            yield Problem(where, f"{name} is not installed", install_line(extra))


def _errors(where: str, make: Callable[[], Any]) -> Iterator[Problem]:
    """Yield the configuration error or missing package that `make` raises, if any, as a problem; raise other errors."""
    try:
        make()
    except MissingDependencyError as error:
        yield Problem(where, f"{error.package} is not installed", error.install)
    except ConfigurationError as error:
        yield Problem(where, str(error))
