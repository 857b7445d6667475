"""The ASGI application: the gate, and the routes of all protocols."""

import time
from collections.abc import Mapping
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, Route

from streamrag.errors import StreamRagError
from streamrag.serve.connections.gate import ERROR, LOOPBACK, Gate
from streamrag.serve.failures import RequestError, failure_of
from streamrag.serve.observe import live, metrics
from streamrag.serve.page import routes as page
from streamrag.serve.protocols import ask, ask_socket, mcp, retrieve, streams
from streamrag.serve.protocols.chat import routes as chat
from streamrag.serve.protocols.chat.query import model_retrieves
from streamrag.serve.protocols.responses import routes as responses
from streamrag.serve.protocols.sessions import routes as sessions
from streamrag.serve.service import Service

PROTOCOLS = (chat, metrics, live, mcp, sessions, ask, ask_socket, retrieve, streams, page, responses)
"""Modules whose `routes(service)` returns the routes of one protocol."""


def create_app(
    service: Service,
    *,
    keys: Mapping[str, str] | None = None,
    hosts: frozenset[str] | None = LOOPBACK,
    origins: frozenset[str] = frozenset(),
) -> Gate:
    """Return the ASGI application for `service`: the gate, all routes, and errors in OpenAI's form.

    The caller starts and closes the service.

    keys: client names by API key; without keys, anybody may send requests.
    hosts: permitted names in the Host header; None permits any.
    origins: origins whose pages may send requests, besides the service's own.
    """
    app = Starlette(
        routes=[*_status_routes(service), *(route for protocol in PROTOCOLS for route in protocol.routes(service))],
        exception_handlers={
            StreamRagError: _respond_to_error,
            HTTPException: _respond_to_http_error,
            ClientDisconnect: _end_silently,
            Exception: _respond_to_error,
        },
    )
    note = service.failed_requests.note_status
    return Gate(
        app, limits=service.limits, keys=keys, hosts=hosts, origins=origins, share=service.share, on_failure=note
    )


def _status_routes(service: Service) -> list[BaseRoute]:
    """Return routes of the models, liveness (503 if the engine is given up) and readiness (503 with the reason)."""

    def encode_model(name: str) -> dict[str, Any]:
        created = int(time.time() - (time.monotonic() - service.started_s))
        max_model_len = service.model.max_model_len
        return {
            "id": name, "object": "model", "created": created, "owned_by": "streamrag", "max_model_len": max_model_len
        }  # fmt: skip

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": list(map(encode_model, service.model_names))})

    async def model(request: Request) -> Response:
        model_retrieves(service, request.path_params["id"])
        return JSONResponse(encode_model(request.path_params["id"]))

    async def healthz(request: Request) -> Response:
        return PlainTextResponse("dead\n", 503) if service.dead.is_set() else PlainTextResponse("ok\n")

    async def readyz(request: Request) -> Response:
        answers = not service.is_ready or await service.server_check.answers()
        if service.is_ready and answers:
            return PlainTextResponse("ready\n")
        why = service.not_ready or "the model's server does not answer"
        return PlainTextResponse(f"not ready: {why}\n", 503, {"retry-after": "5"})

    health = Route("/health", healthz)  # vLLM's name, which GuideLLM and others ask for
    of_models = [*(Route(path, models) for path in ("/v1/models", "/v1/models/")), Route("/v1/models/{id:path}", model)]
    return [Route("/healthz", healthz), health, Route("/readyz", readyz), *of_models]


async def _respond_to_error(request: Request, error: Exception) -> Response:
    """Return the error in OpenAI's form, and leave it in the request's scope, where it is reported from."""
    failure = failure_of(error)
    request.scope[ERROR] = error
    return JSONResponse(failure.body(), failure.status, failure.headers())


async def _respond_to_http_error(request: Request, error: Exception) -> Response:
    """Return an error of Starlette, such as an unknown path, in OpenAI's form with its own status and headers."""
    assert isinstance(error, HTTPException)
    path, method = f"{request.url.path:.80}", request.method
    message = {404: f"there is no {path} here", 405: f"{method} is not allowed for this path"}.get(error.status_code)
    request.scope[ERROR] = RequestError(message or error.detail, status=error.status_code, code="http")
    return JSONResponse(failure_of(request.scope[ERROR]).body(), error.status_code, error.headers)


async def _end_silently(request: Request, error: Exception) -> Response:
    """Return a response that nobody gets: the client has disconnected."""
    return Response(status_code=499)  # the client has disconnected
