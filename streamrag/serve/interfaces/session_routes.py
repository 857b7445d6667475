"""`/v1/sessions`: context that streams in for hours, over HTTP. See `streamrag.sessions`.

POST   /v1/sessions                        {"system"?, "window_tokens"?, "slide_share"?} -> {"id", ...}
GET    /v1/sessions/{id}                   its state
POST   /v1/sessions/{id}/data              {"data": [text or {"text", "uri"?}, ...]} -> {"version"}
POST   /v1/sessions/{id}/ask               {"question", "answers"?, "at_least"?, "stream"?, ...} -> an answer, or SSE
PUT    /v1/sessions/{id}/watches/{name}    {"question", "answers"?, "every_s"?, "priority"?, "with_gap"?}
DELETE /v1/sessions/{id}/watches/{name}
GET    /v1/sessions/{id}/events            SSE: flash_ready, flash_failed, data_updated; Last-Event-ID goes on
DELETE /v1/sessions/{id}
"""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import asdict
from typing import Annotated, Any, TypeAlias

from pydantic import BaseModel, Field
from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from streamrag.asked import MAX_QUERY_CHARACTERS
from streamrag.core import Chunk
from streamrag.errors import PipelineClosedError
from streamrag.serve.bodies import read_body, sampling
from streamrag.serve.failures import Failure, RequestError
from streamrag.serve.gate import CALLER
from streamrag.serve.interfaces.session_store import Held, SessionStore, gone
from streamrag.serve.service import Service
from streamrag.serve.sse import Write, respond, unless_gone
from streamrag.serve.wire import json_of, name_of, values_of
from streamrag.telemetry import Answered, Event

Answers: TypeAlias = list[Annotated[str, Field(max_length=1000)]]
"""The only answers there may be; any, if there are none."""


class OpenSession(BaseModel):
    """Options of a session."""

    system: str | None = Field(default=None, max_length=100_000)
    window_tokens: int | None = Field(default=None, ge=1)
    slide_share: float = Field(default=0.5, gt=0, lt=1)


class Datum(BaseModel):
    """A chunk of data."""

    text: str
    uri: str = ""
    title: str = ""


class Data(BaseModel):
    """Data to append, oldest first."""

    data: list[str | Datum] = Field(min_length=1, max_length=10_000)


class Question(BaseModel):
    """A question to a session."""

    question: str = Field(max_length=MAX_QUERY_CHARACTERS)
    answers: Answers = Field(default_factory=list, max_length=64)
    with_gap: bool = False
    at_least: int | None = Field(default=None, ge=0)
    max_tokens: int | None = None
    temperature: float | None = None
    seed: int | None = None
    stream: bool = False


class WatchedQuestion(BaseModel):
    """A question that is to be kept answered."""

    question: str = Field(max_length=MAX_QUERY_CHARACTERS)
    answers: Answers = Field(default_factory=list, max_length=64)
    every_s: float = Field(default=0.0, ge=0, le=86_400)
    priority: int = 0
    max_tokens: int | None = None
    with_gap: bool = False


def routes(service: Service) -> list[Route]:
    """The interface's routes."""
    store = SessionStore(service)

    def found(request: Request) -> Held:
        return store.find(request.path_params["id"], request.scope[CALLER].client)

    async def open_session(request: Request) -> Response:
        options = await read_body(request, OpenSession)
        held = await store.open(request.scope[CALLER].client, **options.model_dump())
        return JSONResponse(_state(held), 201)

    async def state(request: Request) -> Response:
        return JSONResponse(_state(found(request)))

    async def append(request: Request) -> Response:
        given = await read_body(request, Data)
        held = found(request)
        version = 0
        for each in given.data:
            version = await held.session.append(
                each if isinstance(each, str) else Chunk(each.text, each.uri, each.title)
            )
        return JSONResponse({"version": version, "num_dropped": held.session.state.num_dropped}, 202)

    async def ask(request: Request) -> Response:
        asked = await read_body(request, Question)
        held = found(request)
        if asked.stream:

            async def produce(write: Write) -> None:
                async with aclosing(_asked(service, request, held, asked)) as events:
                    async for event in events:
                        await write(ServerSentEvent(json_of(values_of(event)), event=name_of(event)))

            return await respond(request, produce, failed=_failed, send_timeout_s=service.limits.send_timeout_s)

        async def answered() -> dict[str, Any]:
            async with aclosing(_asked(service, request, held, asked)) as events:
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
            found(request),
            request.path_params["name"],
            given.question,
            answers=tuple(given.answers),
            every_s=given.every_s,
            priority=given.priority,
            params=params,
            with_gap=given.with_gap,
        )
        return JSONResponse({"name": request.path_params["name"]}, 201)

    async def unwatch(request: Request) -> Response:
        store.unwatch(found(request), request.path_params["name"])
        return Response(status_code=204)

    async def events(request: Request) -> Response:
        held = found(request)
        last = request.headers.get("last-event-id", "0")
        if not (last.isdecimal() and len(last) < 19):
            raise RequestError("Last-Event-ID must be a whole number", param="Last-Event-ID")

        async def produce(write: Write) -> None:
            with held.in_use():
                await write(ServerSentEvent(json_of(_state(held)), event="session"))
                async with aclosing(held.read(int(last))) as events:
                    async for event in events:
                        await write(ServerSentEvent(json_of(event.values), event=event.name, id=str(event.id)))

        return await respond(request, produce, failed=_failed, send_timeout_s=service.limits.send_timeout_s)

    async def close(request: Request) -> Response:
        await store.close(found(request))
        return Response(status_code=204)

    one = "/v1/sessions/{id}"
    return [
        Route("/v1/sessions", open_session, methods=["POST"]),
        Route(one, state, methods=["GET"]),
        Route(one, close, methods=["DELETE"]),
        Route(f"{one}/data", append, methods=["POST"]),
        Route(f"{one}/ask", ask, methods=["POST"]),
        Route(f"{one}/watches/{{name}}", watch, methods=["PUT"]),
        Route(f"{one}/watches/{{name}}", unwatch, methods=["DELETE"]),
        Route(f"{one}/events", events, methods=["GET"]),
    ]


async def _asked(service: Service, request: Request, held: Held, asked: Question) -> AsyncGenerator[Event, None]:
    params = service.answering(
        sampling(service.params, max_tokens=asked.max_tokens, temperature=asked.temperature, seed=asked.seed)
    )
    stream = held.session.ask_events(
        asked.question,
        answers=tuple(asked.answers),
        at_least=asked.at_least,
        params=params,
        deadline_s=service.limits.deadline_s,
        with_gap=asked.with_gap,
    )
    with held.in_use():
        async with (
            service.open(request.scope[CALLER], "sessions", asked.question, max_tokens=params.max_tokens) as opened,
            stream as seen,
        ):
            try:
                async for event in opened.noted(seen):
                    yield event
            except PipelineClosedError as error:
                raise (error if service.admission.is_draining else gone("the session was closed")) from None


def _state(held: Held) -> dict[str, Any]:
    return {"id": held.id, **asdict(held.session.state), "watches": sorted(held.watches)}


def _failed(failure: Failure) -> list[ServerSentEvent]:
    return [ServerSentEvent(failure.json(), event="error")]
