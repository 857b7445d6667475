"""`/v1/sessions`: context that streams in for hours, over HTTP. See `streamrag.sessions`.

POST   /v1/sessions                        {"system"?, "window_tokens"?, "slide_share"?} -> {"id", ...}
GET    /v1/sessions/{id}                   the session's state
POST   /v1/sessions/{id}/data              {"data": [text or {"text", "uri"?}, ...], "flush"?} -> {"version", ...}
PUT    /v1/sessions/{id}/system            {"system"} -> {"version"}, the first with this text
GET    /v1/sessions/{id}/data?behind=      {"data": [{"version", "text"}, ...]}, the newest in the window
POST   /v1/sessions/{id}/ask               {"question", "answers"?, "with_margin"?, "decisive_margin"?, "at_least"?,
                                           "stream"?, ...} -> an answer, or SSE
PUT    /v1/sessions/{id}/watches/{name}    {"question", "answers"?, "min_interval_s"?, "priority"?, "with_margin"?,
                                           "decisive_margin"?, "max_tokens"?} -> {"name"}
DELETE /v1/sessions/{id}/watches/{name}
GET    /v1/sessions/{id}/events            SSE: session, then flash_ready, flash_failed, data_updated, data_dropped,
                                           log_failed, gap; resumes after Last-Event-ID
GET    /v1/sessions/{id}/socket            WebSocket: data and questions in, answers and events out
DELETE /v1/sessions/{id}
"""

from contextlib import ExitStack, aclosing

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route, WebSocketRoute
from starlette.websockets import WebSocket

from streamrag.errors import PipelineClosedError, StreamRagError
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import encode_json, read_body
from streamrag.serve.connections.json_socket import Frames
from streamrag.serve.connections.sse import Write, format_event, unless_disconnected
from streamrag.serve.protocols.event_encoder import encode_sse, event_values, respond_with_events, wait_for_answer
from streamrag.serve.protocols.sessions.requests import (
    Data,
    OpenSession,
    QuestionBody,
    SystemText,
    WatchedQuestion,
    answer_events,
    append_data,
    closed_error,
    encode_state,
    parse_id,
)
from streamrag.serve.protocols.sessions.socket import SessionSocket
from streamrag.serve.request_fields import sampling
from streamrag.serve.service import Service
from streamrag.serve.session_store.served_session import ServedSession
from streamrag.serve.session_store.store import SessionStore
from streamrag.telemetry import Answered

WATCH_TOKENS = 64  # default maximum tokens of a watched answer
MAX_DATA = 500  # maximum chunks that one request reads


def routes(service: Service) -> list[BaseRoute]:
    """Return the routes below `/v1/sessions`, which share one store of sessions."""
    handlers = _Handlers(service)
    one = "/v1/sessions/{id}"
    return [
        Route("/v1/sessions", handlers.open, methods=["POST"]),
        Route(one, handlers.state, methods=["GET"]),
        Route(one, handlers.close, methods=["DELETE"]),
        Route(f"{one}/system", handlers.replace_system, methods=["PUT"]),
        Route(f"{one}/data", handlers.append, methods=["POST"]),
        Route(f"{one}/data", handlers.data, methods=["GET"]),
        Route(f"{one}/ask", handlers.ask, methods=["POST"]),
        Route(f"{one}/watches/{{name}}", handlers.watch, methods=["PUT"]),
        Route(f"{one}/watches/{{name}}", handlers.unwatch, methods=["DELETE"]),
        Route(f"{one}/events", handlers.events, methods=["GET"]),
        WebSocketRoute(f"{one}/socket", handlers.connect),
    ]


class _Handlers:
    """The handlers of the routes, which share a store of sessions."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._store = SessionStore(service)

    async def _find(self, request: Request, *, starts: bool = True) -> ServedSession:
        """Return the client's session, used now, and resumed if `starts`. Raises RequestError without one."""
        return await self._store.find(request.path_params["id"], request.scope[CALLER].client, starts=starts)

    async def open(self, request: Request) -> Response:
        options = await read_body(request, OpenSession)
        opened = self._store.open(request.scope[CALLER].client, **options.model_dump())
        return JSONResponse(encode_state(await unless_disconnected(opened, request.receive)), 201)

    async def state(self, request: Request) -> Response:
        return JSONResponse(encode_state(await self._find(request)))

    async def close(self, request: Request) -> Response:
        await self._store.close(await self._find(request, starts=False))
        return Response(status_code=204)

    async def replace_system(self, request: Request) -> Response:
        """Set the session's system text, and respond with 202 and the first version that has it."""
        body = await read_body(request, SystemText)
        served = await self._find(request)
        try:
            version = await served.session.freeze(body.system)
        except PipelineClosedError as error:
            raise closed_error(self._service, error) from None
        return JSONResponse({"version": version}, 202)

    async def append(self, request: Request) -> Response:
        body = await read_body(request, Data)
        return JSONResponse(await append_data(self._service, await self._find(request), body), 202)

    async def data(self, request: Request) -> Response:
        """Respond with the newest data of the window, at most `MAX_DATA`, that are newer than version `behind`."""
        served = await self._find(request)
        behind = parse_id(request.query_params.get("behind", "0"), "behind")
        data = await served.session.newest(behind=behind, at_most=MAX_DATA)
        return JSONResponse({"data": [{"version": version, "text": text} for version, text in data]})

    async def ask(self, request: Request) -> Response:
        """Answer a question with the values of the answer, or with SSE of all events if `stream` is set."""
        body = await read_body(request, QuestionBody)
        answer = aclosing(answer_events(self._service, request.scope[CALLER], await self._find(request), body))

        async def produce(write: Write) -> None:
            async with answer as events:
                async for event in events:
                    await write(encode_sse(event))

        if body.stream:
            return await respond_with_events(request, self._service, produce)
        whole = await unless_disconnected(wait_for_answer(answer), request.receive)
        return JSONResponse(event_values(Answered(0.0, whole))["answer"])

    async def watch(self, request: Request) -> Response:
        """Watch a question, in place of the watch of the path's name, greedily and by default with `WATCH_TOKENS`;
        respond with 201."""
        body = await read_body(request, WatchedQuestion)
        max_tokens = WATCH_TOKENS if body.max_tokens is None else body.max_tokens
        params = self._service.cap_params(sampling(self._service.params, max_tokens=max_tokens, temperature=0.0))
        name, options = request.path_params["name"], body.model_dump(exclude={"max_tokens"})
        served = await self._find(request)
        served.watch(name, limits=self._service.limits, params=params, **options)
        return JSONResponse({"name": name}, 201)

    async def unwatch(self, request: Request) -> Response:
        (await self._find(request)).unwatch(request.path_params["name"])
        return Response(status_code=204)

    async def events(self, request: Request) -> Response:
        """Respond with the session's state and its events after Last-Event-ID, or all that are kept, as SSE, until the
        session is closed. A "gap" event stands for those that are no longer kept.

        :raises RequestError: the session has too many readers.
        """
        served = await self._find(request)
        last = parse_id(request.headers.get("last-event-id", "0"), "Last-Event-ID")

        async def produce(write: Write) -> None:
            with served.being_read(self._service.limits):
                await write(format_event(encode_json(encode_state(served)), event="session"))
                async with aclosing(served.read(last, request.scope[CALLER])) as events:
                    async for event in events:
                        await write(format_event(encode_json(event.values), event=event.name, id=event.id))

        return await respond_with_events(request, self._service, produce)

    async def connect(self, socket: WebSocket) -> None:
        """Run the session's WebSocket as one of its readers, or refuse it with an error frame."""
        caller = socket.scope[CALLER]
        with ExitStack() as stack:
            try:
                served = await self._store.find(socket.path_params["id"], caller.client)
                last = parse_id(socket.query_params.get("last_event_id", "0"), "last_event_id")
                stack.enter_context(served.being_read(self._service.limits))
            except StreamRagError as error:
                await Frames(socket, self._service, "id").refuse(error)
                return
            await SessionSocket(self._service, socket, caller, served).run(last)
