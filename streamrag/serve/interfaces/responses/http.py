"""`POST /v1/responses`, and what was stored of them."""

from collections.abc import Sequence

from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import read_body
from streamrag.serve.connections.sse import Write, respond, unless_gone
from streamrag.serve.failures import Failure, RequestError
from streamrag.serve.interfaces.responses.answering import Answering
from streamrag.serve.interfaces.responses.requests import ResponseRequest, understood
from streamrag.serve.interfaces.responses.sockets import Connection
from streamrag.serve.interfaces.responses.states import StateStore
from streamrag.serve.interfaces.responses.writing import ServerEvent
from streamrag.serve.open_queries import Caller
from streamrag.serve.service import Service
from streamrag.serve.wire import json_of


def routes(service: Service) -> list[BaseRoute]:
    """The interface's routes."""
    states = StateStore(service.limits)

    async def create(request: Request) -> Response:
        caller: Caller = request.scope[CALLER]
        body = await read_body(request, ResponseRequest)
        previous = states.previous(body.previous_response_id, caller.client)
        asked = understood(service, body, previous, is_socket=False)
        owner = caller.client if asked.is_stored else None
        answering = Answering(asked, service.model_name, states, owner, caller.client)
        if not body.stream:
            await unless_gone(answering.run(service, caller, "responses"), request.receive)
            return JSONResponse(answering.writer.response)

        async def produce(write: Write) -> None:
            async def send(event: ServerEvent) -> None:
                await write(_sse(event))

            answering.send = send
            await answering.run(service, caller, "responses")

        def failed(failure: Failure) -> Sequence[ServerSentEvent]:
            return [_sse(event) for event in answering.writer.failed(failure)]

        return await respond(request, produce, failed=failed, send_timeout_s=service.limits.send_timeout_s)

    async def stored(request: Request) -> Response:
        key, client = request.path_params["id"], request.scope[CALLER].client
        if request.method == "DELETE":
            states.delete(key, client)
            return JSONResponse({"id": key, "object": "response", "deleted": True})
        if request.query_params.get("stream") == "true":
            raise RequestError("stream: a stored response is given as a whole", param="stream")
        return Response(states.get(key, client).response, media_type="application/json")

    async def cancel(request: Request) -> Response:
        states.get(request.path_params["id"], request.scope[CALLER].client)
        raise RequestError(
            "Cannot cancel a synchronous response: only one in the background, which this service does not do",
            param="response_id",
        )

    async def connect(socket: WebSocket) -> None:
        await Connection(service, states, socket, socket.scope[CALLER]).run()

    return [
        Route("/v1/responses", create, methods=["POST"]),
        Route("/v1/responses/{id}", stored, methods=["GET", "DELETE"]),
        Route("/v1/responses/{id}/cancel", cancel, methods=["POST"]),
        WebSocketRoute("/v1/responses", connect),
    ]


def _sse(event: ServerEvent) -> ServerSentEvent:
    return ServerSentEvent(json_of(event), event=event["type"])
