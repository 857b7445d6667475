"""An HTTP service around a pipeline, for OpenAI clients and for programs that bring their own retrieval.

`streamrag serve` runs it; `create_app` returns the same ASGI application for a server of your own.

    client ──▶ gate ──▶ protocol ──▶ service ──▶ pipeline       observers see each query
               key,     parses,      admits
               origin,  encodes
               size
"""

from typing import TYPE_CHECKING

from streamrag.support.lazy_imports import attributes

if TYPE_CHECKING:
    from streamrag.serve.app import create_app as create_app
    from streamrag.serve.engine_watch import RestartBudget as RestartBudget
    from streamrag.serve.limits import Limits as Limits
    from streamrag.serve.observe.live import Live as Live
    from streamrag.serve.observe.logs import QueryLog as QueryLog
    from streamrag.serve.observe.logs import log_to as log_to
    from streamrag.serve.observe.metrics import Metrics as Metrics
    from streamrag.serve.observe.tracing import Tracing as Tracing
    from streamrag.serve.observe.tracing import to_otlp as to_otlp
    from streamrag.serve.ray_app import ray_application as ray_application
    from streamrag.serve.service import PipelineOptions as PipelineOptions
    from streamrag.serve.service import Service as Service

_HOMES = {
    "Limits": "streamrag.serve.limits",
    "Live": "streamrag.serve.observe.live",
    "Metrics": "streamrag.serve.observe.metrics",
    "PipelineOptions": "streamrag.serve.service",
    "QueryLog": "streamrag.serve.observe.logs",
    "RestartBudget": "streamrag.serve.engine_watch",
    "Service": "streamrag.serve.service",
    "Tracing": "streamrag.serve.observe.tracing",
    "create_app": "streamrag.serve.app",
    "log_to": "streamrag.serve.observe.logs",
    "ray_application": "streamrag.serve.ray_app",
    "to_otlp": "streamrag.serve.observe.tracing",
}

__all__ = [*sorted(_HOMES)]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, _HOMES)
