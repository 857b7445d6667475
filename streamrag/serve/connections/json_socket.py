"""A WebSocket of JSON objects: bounded frames, error frames, and a timeout for slow readers."""

import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from pydantic import BaseModel, RootModel
from pydantic_core import from_json
from starlette.websockets import WebSocket, WebSocketDisconnect

from streamrag.serve.connections.fair_share import Account
from streamrag.serve.connections.gate import CALLER, SUBPROTOCOL
from streamrag.serve.connections.json_body import (
    SMALL_BYTES,
    check_num_values,
    encode_json,
    memory_of,
    parse,
    parse_frame,
)
from streamrag.serve.failures import Failure, RequestError
from streamrag.serve.open_queries import Caller
from streamrag.serve.service import Service

CLOSE_S = 1.0  # seconds for a client to read the close frame; one that has stopped reading never does
FRAME_S = 0.000_3  # CPU seconds that each frame is charged. To append a line to a session takes 0.28 ms.
MAX_ID = 128  # maximum characters of a client's request id
M = TypeVar("M", bound=BaseModel)

ServeFrame: TypeAlias = Callable[[Any, int], Awaitable[None]]


class Frames:
    """A WebSocket whose frames are JSON objects. `id_field` names the field with the id of a frame's request."""

    is_measured = False
    """Whether `serve` measures the memory of frames."""

    def __init__(self, socket: WebSocket, service: Service, id_field: str) -> None:
        self._socket = socket
        self._service = service
        self._limits = service.limits
        self._account = Account(service.share)
        self._id_field = id_field
        self._send_lock = anyio.Lock()
        self._scope = anyio.CancelScope()
        self._close: tuple[int, str] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TaskGroup]:
        """Accept the socket for the length of the block, and give a task group, which is cancelled at its end.

        A block that `send` or `end` cancels raises no error. After `end`, the socket is closed with its code and
        reason.
        """
        await self._accept()
        async with anyio.create_task_group() as tasks:
            self._scope = tasks.cancel_scope
            yield tasks
            tasks.cancel_scope.cancel()
        if self._close is not None:
            await self._send_close(*self._close)

    async def refuse(self, error: Exception) -> None:
        """Accept the socket, send an error frame, and close: browsers hide the status of a failed handshake."""
        await self._accept()
        await self.send_error(error)
        await self._send_close(1008, "refused")

    def end(self, code: int, reason: str) -> None:
        """Close the socket with this code and reason, and cancel the block of `open`."""
        self._close = self._close or (code, reason)
        self._scope.cancel()

    async def serve(self, model: type[M], serve_frame: ServeFrame) -> None:
        """Pass each valid frame, with its memory if that `is_measured`, to `serve_frame`, until a disconnect. Answer
        invalid frames, and errors of `serve_frame`, with `error` frames."""
        while await self._serve_next(model, serve_frame):
            pass  # here, between two frames, none is referenced: what an idle socket holds is bounded by others

    async def _serve_next(self, model: type[M], serve_frame: ServeFrame) -> bool:
        """Serve the next frame; return False after a disconnect."""
        message = await self._socket.receive()
        if message["type"] == "websocket.disconnect":
            return False
        caller: Caller = self._socket.scope[CALLER]
        await anyio.sleep(caller.turns.turn_s(FRAME_S))  # yields even if 0: many frames may have arrived at once
        frame = message.get("text") or message.get("bytes") or b""
        most = self._limits.max_frame_bytes

        def work(frame: str | bytes) -> tuple[Any, int]:
            parsed = parse(frame, model)
            return parsed, memory_of(parsed) if self.is_measured else 0

        try:
            if len(frame) > most:
                what = f"the frame has more than {most:,} bytes, which is the most"
                raise RequestError(what, status=413, code="frame_too_long")
            num_waiting = sys.getsizeof(frame) if len(frame) > SMALL_BYTES else 0
            with caller.account.holding(num_waiting, self._limits.max_stream_bytes):
                parsed, num_bytes = await parse_frame(frame, work, caller.account, self._account)
        except Exception as error:  # sent to the client, which may continue
            await self.send_error(error, self._id_of(frame))
            return True
        request = parsed.root if isinstance(parsed, RootModel) else parsed
        del message, frame, parsed
        try:
            await serve_frame(request, num_bytes)
        except Exception as error:  # the same
            await self.send_error(error, getattr(request, self._id_field))
        return True

    async def send_error(self, error: Exception, id: str | None = None) -> None:
        """Send an `error` frame. The socket stays open."""
        await self.send(self.error_frame(error, id))

    def error_frame(self, error: Exception, id: str | None = None) -> dict[str, Any]:
        """Report an error, and return its frame: status, body in OpenAI's form with headers, and the id if given."""
        failure = self.note(error)
        body = failure.body()["error"]
        if headers := failure.headers():
            body["headers"] = headers
        frame = {"type": "error", "status": failure.status, "error": body}
        return frame if id is None else {**frame, self._id_field: id}

    def note(self, error: BaseException) -> Failure:
        """Report an error that a frame got, and return its public part."""
        return self._service.failed_requests.note(self._socket.scope, error)

    async def send(self, values: dict[str, Any]) -> None:
        """Send `values` as one JSON frame. Cancel the block of `open` if the client has left, or with `end` (1013) if
        it reads too slowly."""
        async with self._send_lock:
            try:
                with anyio.fail_after(self._limits.send_timeout_s):
                    await self._socket.send_text(encode_json(values))
            except WebSocketDisconnect:
                self._scope.cancel()
                await anyio.lowlevel.checkpoint()
            except TimeoutError:
                self.end(1013, "the client does not read what was sent")
                await anyio.lowlevel.checkpoint()

    async def _send_close(self, code: int, reason: str) -> None:
        """Close the socket, without an error if the client has left or does not read the frame in time."""
        with anyio.move_on_after(CLOSE_S), suppress(RuntimeError, WebSocketDisconnect):  # already disconnected
            await self._socket.close(code, reason)

    async def _accept(self) -> None:
        """Accept the socket with our subprotocol if the client offers it, else with none."""
        await self._socket.accept(SUBPROTOCOL if SUBPROTOCOL in self._socket.scope["subprotocols"] else None)

    def _id_of(self, frame: str | bytes) -> str | None:
        """Return the id of an invalid frame, or None if it is too long, no JSON object, or without a valid id."""
        if len(frame) > self._limits.max_frame_bytes:
            return None
        try:
            check_num_values(frame)
            values = from_json(frame)
        except (ValueError, RequestError):
            return None
        id = values.get(self._id_field) if isinstance(values, dict) else None
        return id if isinstance(id, str) and 0 < len(id) <= MAX_ID else None
