"""Makes a service and its parts from settings."""

import importlib.util
import secrets
import socket
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

from streamrag.backends.ray.options import ReplicaOptions
from streamrag.backends.tokenizer import HuggingFaceTokenizer
from streamrag.core import Backend, SamplingParams, Source
from streamrag.errors import MissingDependencyError
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
from streamrag.serve.observe.live import Live
from streamrag.serve.observe.logs import QueryLog, log_to
from streamrag.serve.observe.metrics import Metrics
from streamrag.serve.observe.observer import Observer
from streamrag.serve.service import Service
from streamrag.serve.session_store.folder import SessionFolder

if TYPE_CHECKING:
    from streamrag.backends.ray.backend import Connects


def make_backend(model: ModelSettings, engine: EngineSettings) -> Backend:
    """Return the backend, not started.

    :raises ConfigurationError: values that cannot work.
    """
    if model.server is not None:
        from streamrag.backends.openai import OpenAIBackend

        return OpenAIBackend(
            model.server,
            model.name or None,
            tokenizer=model.tokenizer,
            api_key=None if model.api_key is None else model.api_key.get_secret_value(),
            max_model_len=model.max_model_len,
            timeout_s=model.timeout_s,
        )
    from streamrag.backends.vllm import VllmBackend

    return VllmBackend(model.name, max_model_len=model.max_model_len, collect_stats=True, **dict(engine))


def make_replicated(
    model: ModelSettings,
    engine: EngineSettings,
    replicas: ReplicaSettings,
    *,
    cluster: "Connects | None" = None,
    name: str = "streamrag",
) -> Backend:
    """Return engines in replicas, not started: those of `cluster`, or else new ones with this name on Ray.

    :raises ConfigurationError: values that cannot work.
    """
    _require_ray()
    from streamrag.backends.ray import RayBackend
    from streamrag.backends.ray.cluster import Cluster

    return RayBackend(
        cluster
        or Cluster(
            partial(make_engines, model, engine, replicas),
            address=replicas.address,
            app_name=f"{name}-engines",
            place_s=replicas.place_s,
        ),
        make_tokenizer=partial(HuggingFaceTokenizer.of_engine, model.name, engine.engine_args),
        router=make_router(replicas.router),
        max_replays=replicas.max_replays,
    )


def make_engines(model: ModelSettings, engine: EngineSettings, replicas: ReplicaSettings) -> Any:
    """Return the engines as an application of Ray Serve's.

    :raises ConfigurationError: values that cannot work.
    """
    from streamrag.backends.ray.deployment import engines

    return engines(partial(make_backend, model, engine), replica_options(replicas))


def replica_options(replicas: ReplicaSettings) -> ReplicaOptions:
    """Return the options of replicas.

    :raises ConfigurationError: values that cannot work.
    """
    return ReplicaOptions(**replicas.model_dump(include={field.name for field in fields(ReplicaOptions)}))


def make_pooled(source: SourceSettings, replicas: ReplicaSettings, *, name: str = "streamrag") -> Source:
    """Return the source in replicas of its own, not started, with this name on Ray.

    :raises MissingDependencyError: Ray is not installed.
    """
    _require_ray()
    from streamrag.backends.ray.cluster import Cluster
    from streamrag.backends.ray.source import RaySource

    return RaySource(
        Cluster(
            partial(make_sources, source, replicas),
            address=replicas.address,
            app_name=f"{name}-sources",
            place_s=replicas.place_s,
        )
    )


def make_sources(source: SourceSettings, replicas: ReplicaSettings) -> Any:
    """Return the sources as an application of Ray Serve's."""
    from streamrag.backends.ray.deployment import sources

    return sources(
        partial(make_source, source), replicas.sources, replicas.max_sources, num_cpus=replicas.source_num_cpus
    )


def name_on_ray(settings: Settings) -> str:
    """Return the prefix of the names of its engines and sources on Ray.

    Of two services with one name on a cluster, the second would take over those of the first, and end them when it
    ends. The same service, started again, is to take over what it has left behind.
    """
    replicas, port = settings.replicas, settings.server.port
    if replicas.name is not None or replicas.address is None:
        return replicas.name or "streamrag"
    return f"streamrag-{socket.gethostname()}-{port or secrets.token_hex(4)}"


def _require_ray() -> None:
    if importlib.util.find_spec("ray") is None:
        raise MissingDependencyError("ray", "pip install 'streamrag[ray]'")


def make_template(prompt: PromptSettings) -> PromptTemplate:
    """Return the words around the context.

    :raises ConfigurationError: a part names a placeholder that it does not have.
    """
    return PromptTemplate(**prompt.model_dump(exclude={"max_context_tokens"}))


def make_service(settings: Settings, *, observers: Sequence[Observer] = ()) -> Service:
    """Return the service, not started.

    :raises ConfigurationError: values that cannot work.
    """
    replicas, name = settings.replicas, name_on_ray(settings)
    return service_of(
        settings,
        make_replicated(settings.model, settings.engine, replicas, name=name)
        if replicas.number
        else make_backend(settings.model, settings.engine),
        make_pooled(settings.source, replicas, name=name) if replicas.sources else make_source(settings.source),
        observers,
    )


def service_of(
    settings: Settings, backend: Backend, source: Source | None, observers: Sequence[Observer] = ()
) -> Service:
    """Return the service with this backend and source, not started.

    :raises ConfigurationError: values that cannot work.
    """
    answers, session_log_dir = settings.answers, settings.server.session_log_dir
    if session_log_dir is not None:
        SessionFolder(session_log_dir)  # whether it can be had, before an engine is started
    return Service(
        backend,
        source,
        template=make_template(settings.prompt),
        max_context_tokens=settings.prompt.max_context_tokens,
        overlap=answers.overlap,
        on_source_error=answers.on_source_error,
        limits=settings.limits,
        params=SamplingParams(
            max_tokens=answers.max_tokens, temperature=answers.temperature, top_p=answers.top_p, top_k=answers.top_k
        ),
        observers=observers,
        model_name=settings.model.served_name,
        session_log_dir=session_log_dir,
        on_engine_death=settings.server.on_engine_death,
        max_restarts=settings.server.max_restarts,
        restart_window_s=settings.server.restart_window_s,
    )


MAX_COUNTED_CLIENTS = 100
"""Most keys whose clients metrics tell apart. With 10,000, each scrape took two seconds of a core and 4 MiB."""


def make_observers(settings: Settings, keys: Mapping[str, str]) -> tuple[list[Observer], Callable[[], Awaitable[None]]]:
    """Return the observers of the service and what closes them, and set up the program's log.

    :raises MissingDependencyError: traces are to be sent, and what sends them is not installed.
    """
    observe = settings.observe
    log_to(sys.stderr, form=observe.logs, with_text=observe.content)
    observers: list[Observer] = [
        Metrics(clients=set(keys.values()) if 0 < len(keys) <= MAX_COUNTED_CLIENTS else None),
        Live(with_text=observe.content),
        QueryLog(with_text=observe.content),
    ]
    if observe.otel_endpoint is None:
        return observers, _nothing
    from streamrag.serve.observe.tracing import Tracing, to_otlp

    model = settings.model.served_name or settings.model.name
    tracing = Tracing(to_otlp(observe.otel_endpoint), model=model or None, with_text=observe.content)
    return [*observers, tracing], tracing.aclose


async def _nothing() -> None:
    pass
