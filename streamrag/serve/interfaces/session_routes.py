"""`/v1/sessions`: context that streams in for hours, over HTTP. See `streamrag.sessions`.

POST   /v1/sessions                        {"system"?, "window_tokens"?, "slide_share"?} -> {"id", ...}
GET    /v1/sessions/{id}                   its state
POST   /v1/sessions/{id}/data              {"data": [text or {"text", "uri"?}, ...], "flush"?} -> {"version", ...}
PUT    /v1/sessions/{id}/system            {"system"} -> {"version"} from which on it has this text
GET    /v1/sessions/{id}/data?behind=      {"data": [{"version", "text"}, ...]}, the newest that the window has
POST   /v1/sessions/{id}/ask               {"question", "answers"?, "with_gap"?, "decisive_gap"?, "at_least"?,
                                           "stream"?, ...} -> an answer, or SSE
PUT    /v1/sessions/{id}/watches/{name}    {"question", "answers"?, "every_s"?, "priority"?, "with_gap"?,
                                           "decisive_gap"?, "max_tokens"?} -> {"name"}
DELETE /v1/sessions/{id}/watches/{name}
GET    /v1/sessions/{id}/events            SSE: session, then flash_ready, flash_failed, data_updated, data_dropped,
                                           log_failed, gap; Last-Event-ID goes on
GET    /v1/sessions/{id}/socket            WebSocket: data and questions in, all of that out; see `session_socket`
DELETE /v1/sessions/{id}
"""

from contextlib import ExitStack, aclosing
from typing import Any

from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from streamrag.errors import StreamRagError
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import read_body
from streamrag.serve.connections.json_socket import Frames
from streamrag.serve.connections.sse import Write, respond, unless_gone
from streamrag.serve.interfaces.ask import told_failure
from streamrag.serve.interfaces.session_requests import (
    Data,
    Frozen,
    OpenSession,
    Question,
    WatchedQuestion,
    answering,
    appended,
    event_id,
    frozen,
    newest,
    state_of,
)
from streamrag.serve.interfaces.session_socket import SessionSocket
from streamrag.serve.interfaces.session_store import Held, SessionStore
from streamrag.serve.request_fields import sampling
from streamrag.serve.service import Service
from streamrag.serve.wire import json_of, name_of, values_of
from streamrag.telemetry import Answered


def routes(service: Service) -> list[BaseRoute]:
    """The interface's routes."""
    store = SessionStore(service)

    async def found(request: Request) -> Held:
        return await store.find(request.path_params["id"], request.scope[CALLER].client)

    async def open_session(request: Request) -> Response:
        options = await read_body(request, OpenSession)
        opens = store.open(request.scope[CALLER].client, **options.model_dump())
        held = await unless_gone(opens, request.receive)
        return JSONResponse(state_of(held), 201)

    async def state(request: Request) -> Response:
        return JSONResponse(state_of(await found(request)))

    async def append(request: Request) -> Response:
        given = await read_body(request, Data)
        return JSONResponse(await appended(service, await found(request), given), 202)

    async def freeze(request: Request) -> Response:
        given = await read_body(request, Frozen)
        return JSONResponse(await frozen(service, await found(request), given), 202)

    async def data(request: Request) -> Response:
        return JSONResponse(await newest(await found(request), request.query_params.get("behind", "0")))

    async def ask(request: Request) -> Response:
        asked = await read_body(request, Question)
        held = await found(request)
        if asked.stream:

            async def produce(write: Write) -> None:
                async with aclosing(answering(service, request.scope[CALLER], held, asked)) as events:
                    async for event in events:
                        await write(ServerSentEvent(json_of(values_of(event)), event=name_of(event)))

            return await respond(request, produce, failed=told_failure, send_timeout_s=service.limits.send_timeout_s)

        async def answered() -> dict[str, Any]:
            async with aclosing(answering(service, request.scope[CALLER], held, asked)) as events:
                async for event in events:
                    if isinstance(event, Answered):
                        answer: dict[str, Any] = values_of(event)["answer"]
                        return answer
            raise RuntimeError("a question ended without an answer and without an error")

        return JSONResponse(await unless_gone(answered(), request.receive))

    async def watch(request: Request) -> Response:
        given = await read_body(request, WatchedQuestion)
        params = service.answering(
            sampling(service.params, max_tokens=64 if given.max_tokens is None else given.max_tokens, temperature=0.0)
        )
        store.watch(
            await found(request),
            request.path_params["name"],
            params=params,
            **given.model_dump(exclude={"max_tokens"}),
        )
        return JSONResponse({"name": request.path_params["name"]}, 201)

    async def unwatch(request: Request) -> Response:
        store.unwatch(await found(request), request.path_params["name"])
        return Response(status_code=204)

    async def events(request: Request) -> Response:
        held = await found(request)
        last = event_id(request.headers.get("last-event-id", "0"), "Last-Event-ID")

        async def produce(write: Write) -> None:
            with held.being_read(service.limits):
                await write(ServerSentEvent(json_of(state_of(held)), event="session"))
                async with aclosing(held.read(last, request.scope[CALLER])) as events:
                    async for event in events:
                        await write(ServerSentEvent(json_of(event.values), event=event.name, id=str(event.id)))

        return await respond(request, produce, failed=told_failure, send_timeout_s=service.limits.send_timeout_s)

    async def connect(socket: WebSocket) -> None:
        caller = socket.scope[CALLER]
        with ExitStack() as ends:
            try:
                held = await store.find(socket.path_params["id"], caller.client)
                last = event_id(socket.query_params.get("last_event_id", "0"), "last_event_id")
                ends.enter_context(held.being_read(service.limits))
            except StreamRagError as error:
                await Frames(socket, service, "id").refuse(error)
                return
            await SessionSocket(service, socket, caller, held).run(last)

    async def close(request: Request) -> Response:
        await store.close(await store.find(request.path_params["id"], request.scope[CALLER].client, starts=False))
        return Response(status_code=204)

    one = "/v1/sessions/{id}"
    return [
        Route("/v1/sessions", open_session, methods=["POST"]),
        Route(one, state, methods=["GET"]),
        Route(one, close, methods=["DELETE"]),
        Route(f"{one}/system", freeze, methods=["PUT"]),
        Route(f"{one}/data", append, methods=["POST"]),
        Route(f"{one}/data", data, methods=["GET"]),
        Route(f"{one}/ask", ask, methods=["POST"]),
        Route(f"{one}/watches/{{name}}", watch, methods=["PUT"]),
        Route(f"{one}/watches/{{name}}", unwatch, methods=["DELETE"]),
        Route(f"{one}/events", events, methods=["GET"]),
        WebSocketRoute(f"{one}/socket", connect),
    ]
