"""`GET /v1/ask/socket`: one WebSocket for questions that are still being asked, one at a time.

{"type": "open", "id", ...options}                  the options of `/v1/ask`; replaces a question without a commit
{"type": "partial", "id", "question", "is_final"?}  -> the events of `/v1/ask` of each retrieval ahead, each from
                                                       "retrieval_started" on
{"type": "commit", "id", "question"}                -> "committed", with `at_s` of the last retrieval ahead if that goes
                                                       on, else null, and the events of a new one; at last "answered",
                                                       "error" with that id, or "cancelled"
{"type": "cancel", "id"}                            -> "cancelled"

A question takes a place, as one open query, from its first partial text to the end of its answer. It gives the place
back if the text does not change for `IDLE_S`, is empty, or is not committed within `deadline_s`, and takes one again
with the next text. While it has no place, its memory counts for its client, over all of the client's sockets, and it
ends with an error without a text for `idle_s`. A partial text that is refused gets one error; texts before
`Retry-After` are then ignored.
"""

import sys
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import anyio
from anyio.abc import TaskGroup
from pydantic import Field, RootModel
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.websockets import WebSocket

from streamrag.core import Chunk
from streamrag.errors import DeadlineExceededError
from streamrag.query.answer_stream import AnswerStream
from streamrag.query.options import QueryOptions
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import StrictModel
from streamrag.serve.connections.json_socket import Frames
from streamrag.serve.failures import RequestError
from streamrag.serve.open_queries import Caller
from streamrag.serve.protocols.ask import QueryRequest
from streamrag.serve.protocols.event_encoder import event_name, event_values
from streamrag.serve.protocols.sessions.socket import CancelFrame, Id
from streamrag.serve.service import Service
from streamrag.telemetry import Answered, ContextChanged, QueryEvent, RetrievalStarted

IDLE_S = 30.0  # seconds without a change after which a question gives back its place
PACE_S = 0.05  # seconds between two partial texts that are used; of those that come meanwhile, only the newest is
RETRY_S = 5.0  # seconds after an error until the next partial text is used, unless the error says when
MAX_UNSENT = 4096  # frames that are buffered for a slow reader, before its socket is closed
MAX_PARTIAL = 10_000  # characters of a partial text, whose words are counted at each change


class OpenFrame(QueryRequest):
    type: Literal["open"]
    id: Id
    deadline_s: float | None = Field(default=None, gt=0)  # counted from the commit


class PartialFrame(StrictModel):
    type: Literal["partial"]
    id: Id
    question: str = Field(max_length=MAX_PARTIAL)
    is_final: bool = False


class CommitFrame(StrictModel):
    type: Literal["commit"]
    id: Id
    question: str


class QuestionFrame(
    RootModel[Annotated[OpenFrame | PartialFrame | CommitFrame | CancelFrame, Field(discriminator="type")]]
):
    """A frame of a client, told by its `type`."""


@dataclass(eq=False)
class SocketQuestion:
    """The question of a socket: its options, its newest text, and the scope of its task."""

    id: str
    options: QueryOptions
    num_bytes: int  # memory of the options
    text: str = ""
    is_final: bool = False
    is_committed: anyio.Event = field(default_factory=anyio.Event)
    has_ended: anyio.Event = field(default_factory=anyio.Event)
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    _has_changed: anyio.Event = field(default_factory=anyio.Event)

    def put(self, frame: PartialFrame | CommitFrame) -> None:
        """Take the newest text."""
        self.text, self.is_final = frame.question, isinstance(frame, PartialFrame) and frame.is_final
        self._has_changed.set()
        if isinstance(frame, CommitFrame):
            self.is_committed.set()

    async def changed(self, timeout_s: float) -> bool:
        """Wait for a text that was not waited for yet; return False if there is none in time."""
        with anyio.move_on_after(timeout_s):
            await self._has_changed.wait()
            self._has_changed = anyio.Event()
            return True
        return False


class AskSocket(Frames):
    """A WebSocket for questions that are still being asked. Its question ends with it."""

    is_measured = True

    def __init__(self, service: Service, socket: WebSocket, caller: Caller) -> None:
        super().__init__(socket, service, "id")
        self._caller = caller
        self._question: SocketQuestion | None = None
        self._unsent, self._frames = anyio.create_memory_object_stream[dict[str, Any]](MAX_UNSENT)

    async def run(self) -> None:
        """Serve the client's frames until it leaves or reads too slowly."""
        async with self._unsent, self._frames, self.open() as tasks:
            tasks.start_soon(self._send_frames)
            await self.serve(QuestionFrame, partial(self._serve_frame, tasks))

    async def _send_frames(self) -> None:
        """Send the frames of questions in their order, until cancelled."""
        async for frame in self._frames:
            await self.send(frame)

    def _put(self, frame: dict[str, Any]) -> None:
        """Send a frame after those before it, without waiting; close the socket if `MAX_UNSENT` are unsent."""
        try:
            self._unsent.send_nowait(frame)
        except anyio.WouldBlock:
            self.end(1013, "the client does not read what was sent")

    async def _serve_frame(
        self, tasks: TaskGroup, frame: OpenFrame | PartialFrame | CommitFrame | CancelFrame, num_bytes: int
    ) -> None:
        """Open a question, give it its newest text, or cancel it. Raises RequestError if that is not possible."""
        if self._question is not None and self._question.scope.cancel_called:
            await self._question.has_ended.wait()
        question = self._question
        if question is not None and question.is_committed.is_set() and not isinstance(frame, CancelFrame):
            raise RequestError("the last question is being answered", status=409, code="ask_committed")
        if isinstance(frame, OpenFrame):
            opened = SocketQuestion(frame.id, frame.query_options(self._service), num_bytes)
            if question is not None:
                question.scope.cancel()
                await question.has_ended.wait()
            self._question = opened
            tasks.start_soon(self._follow, opened)
        elif question is None or question.id != frame.id:
            raise RequestError("no question of this id is open", status=404, code="ask_not_found", param="id")
        elif isinstance(frame, CancelFrame):
            question.scope.cancel()
        elif isinstance(frame, PartialFrame) and not self._service.limits.max_retrievals_ahead:
            message = "limits.max_retrievals_ahead is 0 here: only commit questions"
            raise RequestError(message, status=403, code="no_retrievals_ahead")
        else:
            question.put(frame)

    async def _follow(self, question: SocketQuestion) -> None:
        """Follow a question until it is answered, its answer fails, or it is cancelled; then send its last frame."""
        last: dict[str, Any] | None = None
        pause_s = 0.0
        with question.scope:
            while last is None:
                try:
                    await self._wait(question, pause_s)
                    last = await self._listen(question)
                    pause_s = 0.0
                except Exception as error:  # sent to the client, which may continue
                    frame = self.error_frame(error, question.id)
                    if question.is_committed.is_set() or isinstance(error, RequestError):
                        last = frame
                    else:
                        self._put(frame)
                        pause_s = getattr(error, "retry_after_s", RETRY_S)
        self._question = None
        question.has_ended.set()
        self._put(last or {"type": "cancelled", "id": question.id})

    async def _wait(self, question: SocketQuestion, pause_s: float) -> None:
        """Wait for a text, after `pause_s` unless it is committed, while the memory of the question, which has no
        place, counts for its client. Raises RequestError if that is too much, or if no text comes within `idle_s`."""
        account, limits = self._caller.account, self._service.limits
        with account.holding(question.num_bytes + sys.getsizeof(question.text), limits.max_stream_bytes):
            with anyio.move_on_after(pause_s):
                await question.is_committed.wait()
            if not await question.changed(limits.idle_s):
                raise RequestError(f"no text was received for {limits.idle_s:g} s", status=408, code="idle")

    async def _listen(self, question: SocketQuestion) -> dict[str, Any] | None:
        """Hold a place from a text to the answer, and return its frame, or None if the place is given back before."""
        context: tuple[Chunk, ...] = ()
        began, began_s = "", 0.0  # the last retrieval that has begun
        last: dict[str, Any] | None = None
        until_s = anyio.current_time() + self._service.limits.deadline_s

        def on_event(event: QueryEvent) -> None:
            nonlocal context, began, began_s, last
            if isinstance(event, RetrievalStarted):
                context, began, began_s = (), event.query, time.monotonic() - event.at_s
            frame = {"type": event_name(event), "id": question.id, **event_values(event, context)}
            if isinstance(event, ContextChanged):
                context = event.chunks
            if isinstance(event, Answered):
                last = frame  # sent after its place is released, as the client may then ask again
            else:
                self._put(frame)

        if not question.text.strip() and not question.is_committed.is_set():
            return None
        async with self._service.listen(self._caller, question.text, on_event, question.options) as asked:
            while not question.is_committed.is_set():
                await asked.partial(question.text, is_final=question.is_final)
                with anyio.move_on_after(PACE_S):
                    await question.is_committed.wait()
                is_blank = not question.text.strip()
                if is_blank or not await question.changed(min(IDLE_S, until_s - anyio.current_time())):
                    return None
            at_s = time.monotonic() - began_s if asked.text_ahead == began == question.text else None
            answer = asked.commit(question.text)
            self._put({"type": "committed", "id": question.id, "at_s": at_s})
            await self._finish(answer, question)
        return last

    async def _finish(self, answer: AnswerStream, question: SocketQuestion) -> None:
        """Wait for the end of the answer; DeadlineExceededError after the client's or the service's `deadline_s`."""
        most_s = self._service.limits.deadline_s
        deadline_s = min(question.options.get("deadline_s", most_s), most_s)
        try:
            with anyio.fail_after(deadline_s):
                async for _ in answer:
                    pass
        except TimeoutError:
            raise DeadlineExceededError(f"the query's deadline of {deadline_s:g} s passed") from None


def routes(service: Service) -> list[BaseRoute]:
    """Return the WebSocket route `/v1/ask/socket`."""

    async def connect(socket: WebSocket) -> None:
        await AskSocket(service, socket, socket.scope[CALLER]).run()

    return [WebSocketRoute("/v1/ask/socket", connect)]
