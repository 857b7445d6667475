"""`GET /v1/sessions/{id}/socket`: one WebSocket of a session: data and questions in, answers and events out.

{"type": "append", "data": [...], "id"?}    -> {"type": "appended", "version", "num_dropped", "id"?}
{"type": "ask", "id", "question", ...}      -> {"type": "tokens_generated", "id", ...}, ..., and one of
                                               {"type": "answered", "id", "answer"}, "error" with that id, "cancelled"
{"type": "cancel", "id"}                    -> "cancelled"

The service also sends "session" first, then "flash_ready", "flash_failed", "data_updated", "data_dropped", "log_failed"
and "gap", each with an `event_id`. A socket that is opened with `?last_event_id=` resumes after that event.
"""

from contextlib import aclosing
from functools import partial
from typing import Annotated, Any, Literal

import anyio
from anyio.abc import TaskGroup
from pydantic import Field, RootModel
from starlette.websockets import WebSocket

from streamrag.serve.connections.json_body import StrictModel
from streamrag.serve.connections.json_socket import MAX_ID, Frames
from streamrag.serve.failures import RequestError
from streamrag.serve.open_queries import Caller
from streamrag.serve.protocols.event_encoder import event_name, event_values
from streamrag.serve.protocols.sessions.requests import Data, QuestionBody, answer_events, append_data, encode_state
from streamrag.serve.service import Service
from streamrag.serve.session_store.served_session import ServedSession, SessionEvent
from streamrag.telemetry import Answered

Id = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class AppendFrame(Data):
    """Data to append to the session."""

    type: Literal["append"]
    id: Id | None = None


class AskFrame(QuestionBody):
    """A question, with an id that is unique among the socket's open questions."""

    type: Literal["ask"]
    id: Id
    stream: bool = True


class CancelFrame(StrictModel):
    """The id of a question to cancel."""

    type: Literal["cancel"]
    id: Id


class Frame(RootModel[Annotated[AppendFrame | AskFrame | CancelFrame, Field(discriminator="type")]]):
    """A frame of a client, told by its `type`: append, ask or cancel."""


class SessionSocket(Frames):
    """A WebSocket of a session. Its questions end with it."""

    def __init__(self, service: Service, socket: WebSocket, caller: Caller, served: ServedSession) -> None:
        super().__init__(socket, service, "id")
        self._caller = caller
        self._served = served
        self._questions: dict[str, tuple[anyio.CancelScope, anyio.Event]] = {}
        """Open questions by id: the scope of each, and an event that is set when its last frame was sent."""
        self._unsent: set[anyio.Event] = set()
        """The events of questions that have ended, but whose last frame was not sent yet."""

    async def run(self, last_event_id: int) -> None:
        """Send events and serve the client's frames until it leaves or reads too slowly, or the session ends."""
        async with self.open() as tasks:
            tasks.start_soon(self._send_events, last_event_id)
            await self.serve(Frame, partial(self._serve_frame, tasks))

    async def _serve_frame(self, tasks: TaskGroup, request: AppendFrame | AskFrame | CancelFrame, _: int) -> None:
        """Append data and confirm them, begin to answer, or cancel; raise StreamRagError for an invalid frame. A
        question waits while the last frames of too many others are unsent."""
        self._served.use()
        match request:
            case AppendFrame():
                done: dict[str, Any] = {"type": "appended", **await append_data(self._service, self._served, request)}
                await self.send(done if request.id is None else {**done, "id": request.id})
            case AskFrame():
                while len(self._unsent) >= self._service.limits.max_queries_per_client:
                    await next(iter(self._unsent)).wait()
                self._check(request.id)
                self._questions[request.id] = anyio.CancelScope(), anyio.Event()
                tasks.start_soon(self._answer, request)
            case CancelFrame():
                if request.id not in self._questions:
                    raise RequestError("no question of this id is open", status=404, code="ask_not_found", param="id")
                self._questions[request.id][0].cancel()

    def _check(self, id: str) -> None:
        """Raise RequestError if a question with this id is open, or too many questions are."""
        if id in self._questions:
            raise RequestError("a question of this id is open", status=409, code="id_in_use", param="id")
        most = self._service.limits.max_queries_per_client
        if len(self._questions) >= most:
            what = f"{most:,} questions of this socket are open, which is the most"
            raise RequestError(what, status=429, code="too_many_asks")

    async def _answer(self, question: AskFrame) -> None:
        """Answer a question and send its events, if it streams; the last is the answer, an error or "cancelled"."""
        scope, has_ended = self._questions[question.id]
        last: dict[str, Any] = {"type": "cancelled", "id": question.id}
        try:
            with scope:
                async with aclosing(answer_events(self._service, self._caller, self._served, question)) as events:
                    async for event in events:
                        frame = {"type": event_name(event), "id": question.id, **event_values(event)}
                        if isinstance(event, Answered):
                            last = frame  # sent after its place is released, as the client may then send another
                        elif question.stream:
                            await self.send(frame)
        except Exception as error:  # sent to the client, which may continue
            last = self.error_frame(error, question.id)
        del self._questions[question.id]
        self._unsent.add(has_ended)
        await self.send(last)
        self._unsent.remove(has_ended)
        has_ended.set()

    async def _send_events(self, last_event_id: int) -> None:
        """Send the session's state and its events after `last_event_id`; skip new ones that a newer one of the kind
        follows.

        Closes the socket if the key is revoked, and when the session ends, after the last frames of its questions.
        """
        await self.send({"type": "session", **encode_state(self._served)})
        num_before = self._served.num_events
        try:
            async with aclosing(self._served.read(last_event_id, self._caller)) as events:
                async for event in events:
                    if event.id <= num_before or not self._is_overtaken(event):
                        header = {"type": event.name, "event_id": event.id, "age_s": event.age_s}
                        await self.send({**header, **event.values})
        except RequestError as error:  # the key is no longer valid
            self.end(1008, str(error))
            return
        for has_ended in [
            *(each for _, each in self._questions.values()),
            *self._unsent,
        ]:  # the session has ended these questions
            await has_ended.wait()
        if self._service.admission.is_draining:
            self.end(1001, "the service is stopping")
        else:
            self.end(1000, "the session was closed")

    def _is_overtaken(self, event: SessionEvent) -> bool:
        """Whether there is a newer event of the same kind: a slow reader gets only the newest."""
        kind = (event.name, event.values.get("name"))
        return any(each.id > event.id and (each.name, each.values.get("name")) == kind for each in self._served.events)
