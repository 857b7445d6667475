"""`/v1/responses`: POST one, GET or DELETE a stored one, POST to its `/cancel`, or open a WebSocket."""

from collections.abc import Sequence
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import encode_json, read_body
from streamrag.serve.connections.sse import Write, format_event, respond, unless_disconnected
from streamrag.serve.failures import Failure, RequestError
from streamrag.serve.open_queries import Caller
from streamrag.serve.protocols.responses.encoder import ServerEvent
from streamrag.serve.protocols.responses.requests import ResponseRequest, check_request
from streamrag.serve.protocols.responses.response_run import ResponseRun
from streamrag.serve.protocols.responses.socket import ResponseSocket
from streamrag.serve.protocols.responses.states import StateStore
from streamrag.serve.service import Service


def routes(service: Service) -> list[BaseRoute]:
    """Return the routes of `/v1/responses`, which share one store of responses."""
    handlers = _Handlers(service)
    return [
        Route("/v1/responses", handlers.create, methods=["POST"]),
        Route("/v1/responses/{id}", handlers.stored, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", handlers.cancel, methods=["POST"]),
        WebSocketRoute("/v1/responses", handlers.connect),
    ]


class _Handlers:
    """The handlers of the routes, which share a store of responses."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._states = StateStore(service.limits)

    async def create(self, request: Request) -> Response:
        """Answer a request, whole or as SSE. Unless `store` is false, the response is kept once it is complete."""
        caller: Caller = request.scope[CALLER]
        body = await read_body(request, ResponseRequest)
        previous = self._states.previous(body.previous_response_id, caller.client)
        checked = check_request(self._service, caller.client, body, previous, is_socket=False)
        keep = partial(self._states.add, client=caller.client) if checked.is_stored else None
        run = ResponseRun(checked, body.model or self._service.model_name, self._service.base_url, keep=keep)
        if not body.stream:
            await unless_disconnected(run.run(self._service, caller, "responses"), request.receive)
            return JSONResponse(run.encoder.response)

        async def produce(write: Write) -> None:
            async def send(event: ServerEvent) -> None:
                await write(_sse(event))

            run.send = send
            await run.run(self._service, caller, "responses")

        def fail(failure: Failure) -> Sequence[bytes]:
            return [_sse(event) for event in run.encoder.fail(failure)]

        timeout_s = self._service.limits.send_timeout_s
        return await respond(request, produce, on_failure=fail, send_timeout_s=timeout_s)

    async def stored(self, request: Request) -> Response:
        """Return a stored response as JSON, or delete it. Raises RequestError for `stream=true` or an unknown id."""
        id, client = request.path_params["id"], request.scope[CALLER].client
        if request.method == "DELETE":
            self._states.delete(id, client)
            return JSONResponse({"id": id, "object": "response", "deleted": True})
        if request.query_params.get("stream") == "true":
            raise RequestError("stream: a stored response cannot be streamed", param="stream")
        return Response(self._states.get(id, client).response, media_type="application/json")

    async def cancel(self, request: Request) -> Response:
        """Raise RequestError: a stored response is complete, so that none can be cancelled."""
        self._states.get(request.path_params["id"], request.scope[CALLER].client)
        message = "Cannot cancel a synchronous response. This service does not support background responses."
        raise RequestError(message, param="response_id")

    async def connect(self, socket: WebSocket) -> None:
        await ResponseSocket(self._service, self._states, socket, socket.scope[CALLER]).run()


def _sse(event: ServerEvent) -> bytes:
    return format_event(encode_json(event), event=event["type"])
