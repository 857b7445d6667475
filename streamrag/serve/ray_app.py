"""The service as a Ray Serve application, for `serve run` and `serve deploy`.

    serve run streamrag.serve:ray_application config=service.toml
    serve deploy FILE, such as the one in deploy/ray

    proxy ──▶ Front: gate, protocols, sessions, pipeline ──▶ engines      each a deployment that scales on its own
                                                         └─▶ sources

There is a single front, because sessions, limits and the router's state live in its memory.
"""

import logging
import os
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from streamrag.backends.ray.backend import ExistingReplicas
from streamrag.backends.ray.deployment import bind_to_node_address, engines
from streamrag.backends.ray.source import RaySource
from streamrag.backends.replicas.replica import MakeBackend
from streamrag.errors import ConfigurationError
from streamrag.serve.app import create_app
from streamrag.serve.config import factories
from streamrag.serve.config.checks import permitted_hosts
from streamrag.serve.config.keys import read_keys
from streamrag.serve.config.layers import load
from streamrag.serve.config.settings import Settings
from streamrag.serve.config.source_factory import make_source
from streamrag.serve.connections.gate import Gate

log = logging.getLogger("streamrag.serve")


class Front:
    """The service in a replica: everything except engines and pooled sources."""

    async def __init__(  # type: ignore[misc]
        self, settings: Settings, engines: DeploymentHandle, sources: DeploymentHandle | None = None
    ) -> None:
        """Make the service from its settings, and wait until it has started. Ray Serve awaits this."""
        bind_to_node_address()
        keys = read_keys(settings.keys)
        observers, self._close_observers = factories.make_observers(settings, keys)
        backend = factories.make_replicated(
            settings.model, settings.engine, settings.replicas, cluster=ExistingReplicas(engines)
        )
        source = make_source(settings.source) if sources is None else RaySource(ExistingReplicas(sources))
        self._service = factories.service_of(settings, backend, source, observers)
        await self._service.start(log.info)
        hosts = permitted_hosts(settings, has_keys=bool(keys))
        self._app = create_app(self._service, keys=keys, hosts=hosts, origins=frozenset(settings.server.origins))

    def __serve_build_asgi_app__(self) -> Gate:
        return self._app

    async def __del__(self) -> None:
        """Drain and close the service. Ray Serve calls it once the replica has no requests left."""
        await self._service.aclose(drain_s=self._service.limits.drain_s)
        await self._close_observers()


def ray_application(options: dict[str, str]) -> Any:
    """Return the service as a Ray Serve application, for `serve run` and `serve deploy`.

    options: `config`, the path of a TOML file, and any setting by name, such as "replicas.number".

    :raises ConfigurationError: the options or settings are invalid; lists every problem.
    """
    options = dict(options)
    config = options.pop("config", None)
    return application(load(None if config is None else Path(config), os.environ, options).settings)


def application(settings: Settings, *, make_engine: MakeBackend | None = None) -> Any:
    """Return the bound Ray Serve application of these settings: the front, engines and, if they say so, sources.

    `make_engine` replaces the settings' engine.

    :raises ConfigurationError: there is no engine replica, or `make_engine` and decode lanes.
    """
    replicas, limits = settings.replicas, settings.limits
    if not replicas.number:
        raise ConfigurationError("replicas.number=0: a Ray Serve application needs at least one engine")
    if make_engine is not None and replicas.decode:
        raise ConfigurationError(f"replicas.decode={replicas.decode} and make_engine exclude each other")
    if make_engine is None:
        parts = [factories.make_engines(settings.model, settings.engine, replicas)]
    else:
        parts = [engines(make_engine, factories.replica_options(replicas))]
    if replicas.sources:
        parts.append(factories.make_sources(settings.source, replicas))
    front = serve.deployment(
        name="front",
        ray_actor_options={"num_cpus": replicas.front_num_cpus},
        max_ongoing_requests=limits.max_connections,
        graceful_shutdown_timeout_s=limits.drain_s,
    )(serve.ingress()(Front))
    return front.bind(settings, *parts)
