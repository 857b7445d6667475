"""Makes a service and its parts from settings. Raises ConfigurationError for invalid ones."""

import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from streamrag.backends.ray.options import ReplicaOptions
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.backends.tools.parser import ToolCallParser
from streamrag.backends.vllm import SchedulerOptions
from streamrag.core import Backend, SamplingParams, Source
from streamrag.errors import ConfigurationError, require_modules
from streamrag.modes import PromptTemplate
from streamrag.routing import make_router
from streamrag.serve.config.settings import (
    EngineSettings,
    ModelSettings,
    PromptSettings,
    ReplicaSettings,
    Settings,
    SourceSettings,
)
from streamrag.serve.config.source_factory import make_source
from streamrag.serve.engine_watch import RestartBudget
from streamrag.serve.observe.live import Live
from streamrag.serve.observe.logs import QueryLog, log_to
from streamrag.serve.observe.metrics import Metrics
from streamrag.serve.observe.observer import Observer
from streamrag.serve.service import Service
from streamrag.serve.session_store.store import SessionFolder

if TYPE_CHECKING:
    from streamrag.backends.ray.backend import ReplicaCluster
    from streamrag.backends.ray.cluster import Cluster

MAX_COUNTED_CLIENTS = 100
"""Maximum keys whose clients metrics distinguish. With 10,000, each scrape took two seconds of a core and 4 MiB."""


def make_backend(model: ModelSettings, engine: EngineSettings) -> Backend:
    """Return the backend, not started, that `BACKENDS` makes: of a server if the model has one."""
    kind = "server" if model.server is not None else "engine" if engine.lanes is None else "lanes"
    return BACKENDS[kind](model, engine)


def _make_client(model: ModelSettings, engine: EngineSettings) -> Backend:
    from streamrag.backends.openai import OpenAIBackend

    assert model.server is not None
    return OpenAIBackend(
        model.server,
        model.name or None,
        api_key=None if model.api_key is None else model.api_key.get_secret_value(),
        **model.model_dump(include={"tokenizer", "max_model_len", "timeout_s"}),
    )


def _make_engine(model: ModelSettings, engine: EngineSettings) -> Backend:
    from streamrag.backends.vllm import VllmBackend

    return VllmBackend(model.name, collect_stats=True, **_engine_options(model, engine))


def _make_disaggregated(model: ModelSettings, engine: EngineSettings) -> Backend:
    from streamrag.backends.lanes import DisaggregatedBackend

    assert engine.lanes is not None
    num_prefill, num_decode = map(int, engine.lanes.split("+"))
    return DisaggregatedBackend.of(model.name, prefill=num_prefill, decode=num_decode, **_engine_options(model, engine))


BACKENDS = {"server": _make_client, "engine": _make_engine, "lanes": _make_disaggregated}
"""Makers of backends: a server's client, an embedded vLLM, embedded vLLMs for prefill and for decode."""


def make_replica_lane(model: ModelSettings, engine: EngineSettings, lane: Any) -> Backend:
    """Return the engine of a lane in a replica, not started. Raises ConfigurationError if it cannot be a lane."""
    from streamrag.backends.lanes.backend import engine_options
    from streamrag.backends.lanes.replica_engines import DecodeEngine, PrefillEngine

    kind = PrefillEngine if lane == "prefill" else DecodeEngine
    return kind(model.name, lane=lane, **engine_options(_engine_options(model, engine), lane, 0, 1))


def _engine_options(model: ModelSettings, engine: EngineSettings) -> dict[str, Any]:
    """Return the options of a `VllmBackend`."""
    scheduler = SchedulerOptions(**engine.model_dump(include={"policy", "eviction", "profile"}))
    named = engine.model_dump(include={"strategy", "answer_ahead", "kv_cache_bytes", "host_kv_bytes", "engine_args"})
    return {"scheduler": scheduler, "max_model_len": model.max_model_len, **named}


def make_replicated(
    model: ModelSettings,
    engine: EngineSettings,
    replicas: ReplicaSettings,
    *,
    cluster: "ReplicaCluster | None" = None,
    name: str = "streamrag",
) -> Backend:
    """Return a backend of replicas, not started: those of `cluster`, or else new ones that are named after `name`."""
    cluster = cluster or _make_cluster(partial(make_engines, model, engine, replicas), replicas, f"{name}-engines")
    tokenizer = partial(HuggingFaceTokenizer.of_engine, model.name, engine.engine_args)
    if replicas.decode:
        from streamrag.backends.lanes.ray_backend import RayDisaggregatedBackend

        max_open = replicas.max_open
        return RayDisaggregatedBackend(cluster, make_tokenizer=tokenizer, router=replicas.router, max_open=max_open)
    from streamrag.backends.ray import RayBackend

    return RayBackend(cluster, make_tokenizer=tokenizer, router=make_router(replicas.router))


def make_engines(model: ModelSettings, engine: EngineSettings, replicas: ReplicaSettings) -> Any:
    """Return the engines as a Ray Serve application: of one kind, or prefill and decode lanes."""
    from streamrag.backends.ray.deployment import engines, lane_engines

    if not replicas.decode:
        return engines(partial(make_backend, model, engine), replica_options(replicas))
    make = partial(make_replica_lane, model, engine)
    return lane_engines(
        partial(make, "prefill"), partial(make, "decode"), replica_options(replicas), decode_options(replicas)
    )


def replica_options(replicas: ReplicaSettings) -> ReplicaOptions:
    """Return the options of engine replicas, which with decode lanes are prefill lanes."""
    return ReplicaOptions(**replicas.model_dump(include={field.name for field in fields(ReplicaOptions)}))


def decode_options(replicas: ReplicaSettings) -> ReplicaOptions:
    """Return the options of decode lanes: those of the others, but for their number and by which load it changes."""
    check_max_decode(replicas)
    options, number = replica_options(replicas), replicas.decode
    return replace(options, number=number, max_number=replicas.max_decode, queued_tokens=None)


def check_max_decode(replicas: ReplicaSettings) -> None:
    """Raise ConfigurationError if the most decode lanes are fewer than those at the start."""
    if replicas.max_decode is not None and replicas.max_decode < replicas.decode:
        raise ConfigurationError(f"max_decode={replicas.max_decode} must be at least decode={replicas.decode}")


def make_pooled(source: SourceSettings, replicas: ReplicaSettings, *, name: str = "streamrag") -> Source:
    """Return a source of replicas, not started, that are named after `name`."""
    cluster = _make_cluster(partial(make_sources, source, replicas), replicas, f"{name}-sources")
    from streamrag.backends.ray.source import RaySource

    return RaySource(cluster)


def make_sources(source: SourceSettings, replicas: ReplicaSettings) -> Any:
    """Return the source's replicas as a Ray Serve application."""
    from streamrag.backends.ray.deployment import sources

    return sources(partial(make_source, source), replicas.sources)


def _make_cluster(make_application: Callable[[], Any], replicas: ReplicaSettings, app_name: str) -> "Cluster":
    """Return the connection to replicas on Ray, not started; raise MissingDependencyError without Ray."""
    require_modules("ray", "ray")
    from streamrag.backends.ray.cluster import Cluster

    return Cluster(make_application, address=replicas.address, app_name=app_name)


def name_on_ray(settings: Settings) -> str:
    """Return the prefix of the names of the service's engines and sources on Ray.

    This is `replicas.name`; by default "streamrag", on a cluster with an address followed by host name and port. The
    prefix must be unique on a cluster, because a service takes over the replicas of its name and ends them with itself.
    The prefix must be the same after a restart, so that the service takes over the replicas that it has left behind;
    port 0 prevents that, because a new random token then replaces the port.
    """
    replicas, port = settings.replicas, settings.server.port
    if replicas.name is not None or replicas.address is None:
        return replicas.name or "streamrag"
    return f"streamrag-{socket.gethostname()}-{port or secrets.token_hex(4)}"


def make_template(prompt: PromptSettings) -> PromptTemplate:
    """Return the prompt template. Raises ConfigurationError if a text has an unknown placeholder."""
    return PromptTemplate(**prompt.model_dump(exclude={"max_context_tokens"}))


def make_service(settings: Settings, *, observers: Sequence[Observer] = ()) -> Service:
    """Return the service, not started. Engine and source are replicas where the settings have a number of them."""
    replicas, name = settings.replicas, name_on_ray(settings)
    engine = settings.model, settings.engine
    backend = make_replicated(*engine, replicas, name=name) if replicas.number else make_backend(*engine)
    source = settings.source
    retriever = make_pooled(source, replicas, name=name) if replicas.sources else make_source(source)
    return service_of(settings, backend, retriever, observers)


def service_of(
    settings: Settings, backend: Backend, source: Source | None, observers: Sequence[Observer] = ()
) -> Service:
    """Return the service of these parts, not started, without routes. Its folder for sessions, if set, is created
    first: an unusable one raises ConfigurationError before an engine starts."""
    answers, server = settings.answers, settings.server
    if server.session_log_dir is not None:
        SessionFolder(server.session_log_dir)  # fails early, before an engine is started
    return Service(
        backend,
        source,
        template=make_template(settings.prompt),
        max_context_tokens=settings.prompt.max_context_tokens,
        overlap=answers.overlap,
        answer_ahead=settings.engine.answer_ahead,
        on_source_error=answers.on_source_error,
        limits=settings.limits,
        params=SamplingParams(**answers.model_dump(exclude={"overlap", "on_source_error"})),
        observers=observers,
        model_name=settings.model.served_name,
        session_log_dir=server.session_log_dir,
        restarts=RestartBudget() if server.on_engine_death == "restart" else None,
        tool_parser=make_tool_parser(settings.model),
        ignores_tools=settings.model.ignore_tools,
        base_url=settings.source.base_url,
    )


def make_tool_parser(model: ModelSettings) -> ToolCallParser | None:
    """Return the tool parser, not loaded. Raises ConfigurationError if vLLM has none of that name."""
    return None if model.tool_call_parser is None else ToolCallParser(model.tool_call_parser)


def make_observers(settings: Settings, keys: Mapping[str, str]) -> tuple[list[Observer], Callable[[], Awaitable[None]]]:
    """Set up the process's log on stderr. Return the service's observers and a callback that closes them.

    `Tracing` is among them if there is an endpoint. `Metrics` distinguishes clients if there are few keys.
    """
    observe = settings.observe
    log_to(sys.stderr, form=observe.logs, with_text=observe.content)
    observers: list[Observer] = [
        Metrics(clients=set(keys.values()) if 0 < len(keys) <= MAX_COUNTED_CLIENTS else None),
        Live(with_text=observe.content),
        QueryLog(with_text=observe.content),
    ]
    if observe.otel_endpoint is None:
        return observers, AsyncExitStack().aclose
    from streamrag.serve.observe.tracing import Tracing, to_otlp

    model = settings.model.served_name or settings.model.name
    tracing = Tracing(to_otlp(observe.otel_endpoint), model=model or None, with_text=observe.content)
    return [*observers, tracing], tracing.aclose
