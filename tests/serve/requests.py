"""Good requests of each interface, and the places in them where something odd may stand, found in their models."""

import copy
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, get_args

import websockets
from pydantic import BaseModel

from streamrag.serve import Limits
from streamrag.serve.protocols import ask, ask_socket, retrieve, streams
from streamrag.serve.protocols.chat import requests as chat
from streamrag.serve.protocols.responses import requests as responses
from streamrag.serve.protocols.responses import socket as responses_socket
from streamrag.serve.protocols.sessions import requests as sessions
from streamrag.serve.protocols.sessions import socket as sessions_socket
from streamrag.trace import events
from tests.serve.serving import Serving, serving

LIMITS = Limits(
    max_requests_per_minute=10**9,
    max_prompt_tokens_per_minute=10**9,
    max_retrievals_ahead=5,
    max_tokens=5,
    deadline_s=2.0,  # for a session's question about data that never come
)

USER = {"role": "user", "content": "Where is it?"}
CALL = {"id": "1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
CHUNK = {"text": "Paris is in France.", "uri": "https://geo.example", "title": "France", "passage": 1, "score": 0.5}
HINT = {"num_chunks": 1, "end_s": 0.1}
OPEN = {"type": "open", "query": "Where is it?", "history": [USER], "finish_at_end": True}
FINISH = {"type": "finish"}
QUESTION = {"type": "commit", "id": "q", "question": "Where is it?"}
CANCEL = {"type": "cancel", "id": "q"}
OPEN_FRAME = {"type": "open", "id": "q", "history": [USER]}
RESPONSE_HAS_ENDED = ("response.completed", "response.incomplete", "response.failed")
HAS_ENDED = ("answered", "cancelled", "appended", "error", *RESPONSE_HAS_ENDED)


@dataclass(frozen=True)
class Case:
    """A good request: a body, a line of a stream, or a frame, with what is sent before and after it."""

    name: str
    model: type[BaseModel]
    body: dict[str, Any]
    path: str
    method: str = "POST"
    before: tuple[dict[str, Any], ...] = ()
    after: tuple[dict[str, Any], ...] = ()


SESSION = "/v1/sessions/{id}"
SOCKET = f"{SESSION}/socket"
CASES = (
    Case(
        "chat",
        chat.ChatRequest,
        {
            "messages": [USER],
            "stream_options": {"include_usage": True},
            "prediction": {"type": "content", "content": "Paris"},
        },
        "/v1/chat/completions",
    ),
    Case(
        "chat with tools",  # which this service refuses, once they are valid
        chat.ChatRequest,
        {"messages": [{"role": "assistant", "tool_calls": [CALL]}, USER], "tools": [TOOL]},
        "/v1/chat/completions",
    ),
    Case("response", responses.ResponseRequest, {"input": "Where?", "prompt_cache_options": {}}, "/v1/responses"),
    Case("response of items", responses.ResponseRequest, {"input": [USER], "text": {}}, "/v1/responses"),
    Case("ask", ask.AskRequest, {"question": "Where is it?", "history": [USER]}, "/v1/ask"),
    Case("retrieve", retrieve.RetrieveRequest, {"query": "Where is it?"}, "/v1/retrieve"),
    Case("open session", sessions.OpenSession, {"system": "Be brief."}, "/v1/sessions"),
    Case("system", sessions.SystemText, {"system": "Be brief."}, f"{SESSION}/system", "PUT"),
    Case("data", sessions.Data, {"data": [{"text": "Paris."}, "Rome."]}, f"{SESSION}/data"),
    Case("question", sessions.QuestionBody, {"question": "Where is it?"}, f"{SESSION}/ask"),
    Case("watch", sessions.WatchedQuestion, {"question": "Where is it?"}, f"{SESSION}/watches/a", "PUT"),
    Case("open line", streams.OpenLine, OPEN, "/v1/streams", after=(FINISH,)),
    *(
        Case(line["type"], model, line, "/v1/streams", before=(OPEN,))
        for model, line in (
            (events.AppendLine, {"type": "append", "chunk": CHUNK, "hint": HINT}),
            (events.UpdateLine, {"type": "update", "chunks": [CHUNK], "hint": HINT}),
            (events.SkippedLine, {"type": "skipped", "uri": "a", "reason": "b"}),
            (events.CutShortLine, {"type": "cut_short", "reason": "b"}),
            (streams.FinishLine, FINISH),
        )
    ),
    Case("open frame", ask_socket.OpenFrame, OPEN_FRAME, "/v1/ask/socket", "WS", after=(QUESTION,)),
    Case(
        "partial frame",
        ask_socket.PartialFrame,
        {**QUESTION, "type": "partial"},
        "/v1/ask/socket",
        "WS",
        before=(OPEN_FRAME,),
        after=(QUESTION,),
    ),
    Case("commit frame", ask_socket.CommitFrame, QUESTION, "/v1/ask/socket", "WS", before=(OPEN_FRAME,)),
    Case(
        "cancel frame",
        sessions_socket.CancelFrame,
        {"type": "cancel", "id": "q"},
        "/v1/ask/socket",
        "WS",
        before=(OPEN_FRAME,),
    ),
    Case("append frame", sessions_socket.AppendFrame, {"type": "append", "id": "q", "data": ["Paris."]}, SOCKET, "WS"),
    Case("ask frame", sessions_socket.AskFrame, {"type": "ask", "id": "q", "question": "Where is it?"}, SOCKET, "WS"),
    Case(
        "response frame",
        responses_socket.CreateEvent,
        {"type": "response.create", "input": [USER]},
        "/v1/responses",
        "WS",
    ),
)


@dataclass(frozen=True)
class Place:
    """A field of a request's body, by its path, which the body need not have."""

    path: tuple[str | int, ...]
    is_required: bool

    def put(self, body: dict[str, Any], *values: Any) -> dict[str, Any]:
        """Return the body with a value in this place, or without the field."""
        body = copy.deepcopy(body)
        inner: Any = body
        for part in self.path[:-1]:
            inner = inner[part]
        inner.pop(self.path[-1], None)
        inner.update(dict.fromkeys(self.path[-1:], *values) if values else {})
        return body


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for each in get_args(annotation):
        yield from models_in(each)


def places(model: type[BaseModel], body: dict[str, Any], seen: set[type[BaseModel]]) -> Iterator[Place]:
    """Yield all fields of a model, and of the models that the body has in them."""
    seen.add(model)
    for name, field in model.model_fields.items():
        yield Place((name,), field.is_required())
        value = body.get(name)
        is_list = isinstance(value, list)
        inner = value[0] if is_list and value else value
        for nested in models_in(field.annotation) if isinstance(inner, dict) else ():
            for place in places(nested, inner, seen):
                yield Place((name, *((0,) if is_list else ()), *place.path), place.is_required)


@dataclass(frozen=True)
class Outcome:
    """What a request came to; without an error, the status alone."""

    status: int
    code: str | None = None
    param: str | None = None
    message: str = ""

    @property
    def kind(self) -> tuple[object, ...]:
        return self.status, self.code, self.param


class Sender:
    """A client of a service, with a session of its own."""

    def __init__(self, served: Serving, session: str) -> None:
        self.served = served
        self._session = session

    async def send(self, case: Case, body: Any) -> Outcome:
        """Send a case's request with this body, which may be bytes."""
        path = case.path.replace("{id}", self._session)
        data = [json.dumps(each) if not isinstance(each, bytes) else each for each in (*case.before, body, *case.after)]
        if case.method == "WS":
            return await self._talk(path, data)
        lines = b"\n".join(each if isinstance(each, bytes) else each.encode() for each in data)
        answer = await self.served.http.request(case.method, path, content=lines)
        if answer.status_code >= 400:
            return failed(answer.status_code, answer.json()["error"])
        found = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith('data: {"error"')]
        return failed(400, json.loads(found[0])["error"]) if found else Outcome(answer.status_code)

    async def _talk(self, path: str, frames: list[Any]) -> Outcome:
        address = self.served.url.replace("http", "ws") + path
        async with websockets.connect(address, close_timeout=1) as connection:
            for frame in frames:
                await connection.send(frame)
            while (told := json.loads(await connection.recv()))["type"] not in HAS_ENDED:
                pass
            if told["type"] == "response.failed":  # which says in words only that the deadline passed
                message = told["response"]["error"]["message"]
                return Outcome(504, "deadline_exceeded" if "deadline" in message else None, message=message)
            return failed(told["status"], told["error"]) if told["type"] == "error" else Outcome(200)


def failed(status: int, error: dict[str, Any]) -> Outcome:
    return Outcome(status, error["code"], error["param"], error["message"])


@asynccontextmanager
async def sender() -> AsyncIterator[Sender]:
    """A client of a service that lets it ask as much as it likes."""
    async with serving(limits=LIMITS) as served:
        opened = await served.http.post("/v1/sessions", json={})
        await served.http.post(f"/v1/sessions/{opened.json()['id']}/data", json={"data": ["Paris."]})
        yield Sender(served, opened.json()["id"])
