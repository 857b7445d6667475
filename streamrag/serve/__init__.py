"""A pipeline served over HTTP: to any OpenAI client, and to programs that bring their own retrieval.

`streamrag serve` runs it; `create_app` makes the same ASGI application for a server of your own. A request passes the
gate (key, origin, size), an interface reads it and has the service answer it, and writes the events as its protocol has
them; observers are told of each query.
"""

from typing import TYPE_CHECKING

from streamrag.lazy import attributes

if TYPE_CHECKING:
    from streamrag.serve.app import create_app as create_app
    from streamrag.serve.limits import Limits as Limits
    from streamrag.serve.service import Service as Service

_HOMES = {
    "Limits": "streamrag.serve.limits",
    "Service": "streamrag.serve.service",
    "create_app": "streamrag.serve.app",
}

__all__ = ["Limits", "Service", "create_app"]

if not TYPE_CHECKING:
    __getattr__ = attributes(__name__, _HOMES)
