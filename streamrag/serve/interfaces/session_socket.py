"""`GET /v1/sessions/{id}/socket`: one WebSocket on which data and questions go in, and all that comes of them goes out.

{"type": "append", "data": [...], "id"?}    -> {"type": "appended", "version", "num_dropped", "id"?}
{"type": "ask", "id", "question", ...}      -> {"type": "tokens_generated", "id", ...}, ..., and one of
                                               {"type": "answered", "id", "answer"}, "error" with that id, "cancelled"
{"type": "cancel", "id"}                    -> that question ends

Unasked: "session" first, then "flash_ready", "flash_failed", "data_updated", "data_dropped", "log_failed" and "gap",
each with an `event_id`; a socket that is opened with `?last_event_id=` goes on behind that one.
"""

import logging
from contextlib import aclosing
from typing import Annotated, Any, Literal

import anyio
from anyio.abc import TaskGroup
from pydantic import Field, RootModel
from starlette.websockets import WebSocket

from streamrag.errors import StreamRagError
from streamrag.serve.connections.json_body import StrictModel
from streamrag.serve.connections.json_socket import MAX_ID, Frames
from streamrag.serve.failures import RequestError
from streamrag.serve.interfaces.session_requests import Data, Question, answering, appended, state_of
from streamrag.serve.interfaces.session_store import Held, SessionEvent
from streamrag.serve.open_queries import Caller
from streamrag.serve.service import Service
from streamrag.serve.wire import name_of, values_of
from streamrag.telemetry import Answered

Id = Annotated[str, Field(min_length=1, max_length=MAX_ID)]

log = logging.getLogger("streamrag.serve")


class AppendFrame(Data):
    """Data to append."""

    type: Literal["append"]
    id: Id | None = None


class AskFrame(Question):
    """A question, with an id that none has that is open on this socket."""

    type: Literal["ask"]
    id: Id
    stream: bool = True


class CancelFrame(StrictModel):
    """The answer is no longer wanted."""

    type: Literal["cancel"]
    id: Id


class Frame(RootModel[Annotated[AppendFrame | AskFrame | CancelFrame, Field(discriminator="type")]]):
    """What a client sends."""


class SessionSocket(Frames):
    """Lives as long as the socket or the session, and frees the questions that were asked on it."""

    def __init__(self, service: Service, socket: WebSocket, caller: Caller, held: Held) -> None:
        super().__init__(socket, service, "id")
        self._service = service
        self._caller = caller
        self._held = held
        self._asks: dict[str, tuple[anyio.CancelScope, anyio.Event]] = {}
        """Questions that are open: how to cancel each, and what is set when its client has been told how it ended."""
        self._untold: set[anyio.Event] = set()
        """The same of those that have ended, and whose last frame waits to be read."""

    async def run(self, last_event_id: int) -> None:
        """Until the client goes away, reads so slowly that it might as well, or the session ends."""
        async with self.open() as tasks:
            tasks.start_soon(self._tell_events, last_event_id)
            while (frame := await self.next(Frame)) is not None:
                asked = frame[0].root
                self._held.use()
                try:
                    await self._do(asked, tasks)
                except StreamRagError as error:
                    await self.tell(error, asked.id)

    async def _do(self, asked: AppendFrame | AskFrame | CancelFrame, tasks: TaskGroup) -> None:
        match asked:
            case AppendFrame():
                done: dict[str, Any] = {"type": "appended", **await appended(self._service, self._held, asked)}
                await self.send(done if asked.id is None else {**done, "id": asked.id})
            case AskFrame():
                while len(self._untold) >= self._service.limits.max_queries_per_client:
                    await next(iter(self._untold)).wait()
                self._check(asked.id)
                self._asks[asked.id] = anyio.CancelScope(), anyio.Event()
                tasks.start_soon(self._answer, asked)
            case CancelFrame():
                if asked.id not in self._asks:
                    raise RequestError("no question of this id is open", status=404, code="ask_not_found", param="id")
                self._asks[asked.id][0].cancel()

    def _check(self, id: str) -> None:
        if id in self._asks:
            raise RequestError("a question of this id is open", status=409, code="id_in_use", param="id")
        most = self._service.limits.max_queries_per_client
        if len(self._asks) >= most:
            what = f"{most:,} questions of this socket are open, which is the most"
            raise RequestError(what, status=429, code="too_many_asks")

    async def _answer(self, asked: AskFrame) -> None:
        scope, has_ended = self._asks[asked.id]
        last: dict[str, Any] = {"type": "cancelled", "id": asked.id}
        try:
            with scope:
                async with aclosing(answering(self._service, self._caller, self._held, asked)) as events:
                    async for event in events:
                        told = {"type": name_of(event), "id": asked.id, **values_of(event)}
                        if isinstance(event, Answered):
                            last = told  # sent once its place is free: the client may ask again as soon as it knows
                        elif asked.stream:
                            await self.send(told)
        except Exception as error:  # whatever it is, the client is told, and may go on
            last = self.told(error, asked.id)
            if last["status"] == 500:
                log.error("a question failed", exc_info=error)
        del self._asks[asked.id]
        self._untold.add(has_ended)
        await self.send(last)
        self._untold.remove(has_ended)
        has_ended.set()

    async def _tell_events(self, last_event_id: int) -> None:
        await self.send({"type": "session", **state_of(self._held)})
        num_before = self._held.num_events
        try:
            async with aclosing(self._held.read(last_event_id, self._caller)) as events:
                async for event in events:
                    if event.id <= num_before or not self._is_overtaken(event):
                        of = {"type": event.name, "event_id": event.id, "age_s": event.age_s}
                        await self.send({**of, **event.values})
        except RequestError as error:  # the key no longer counts
            self.end(1008, str(error))
            return
        for has_ended in [*(each for _, each in self._asks.values()), *self._untold]:  # the session has ended them
            await has_ended.wait()
        if self._service.admission.is_draining:
            self.end(1001, "the service is stopping")
        else:
            self.end(1000, "the session was closed")

    def _is_overtaken(self, event: SessionEvent) -> bool:
        """Whether there is a newer one of its kind: a slow reader gets that, and not all of them."""
        kind = (event.name, event.values.get("name"))
        return any(each.id > event.id and (each.name, each.values.get("name")) == kind for each in self._held.events)
