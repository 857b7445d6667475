"""A WebSocket of JSON objects: bounded frames, errors that are frames too, and no slow readers."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeVar

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from pydantic import BaseModel
from pydantic_core import from_json
from starlette.websockets import WebSocket, WebSocketDisconnect

from streamrag.serve.connections.fair_share import Account
from streamrag.serve.connections.gate import CALLER, SUBPROTOCOL
from streamrag.serve.connections.json_body import check_num_values, parse_frame
from streamrag.serve.failures import RequestError, failure_of
from streamrag.serve.service import Service
from streamrag.serve.wire import json_of

CLOSE_S = 1.0
"""Seconds for a client to read the frame that closes its socket; one that has stopped reading never does."""

ERROR_S = 0.000_2
"""CPU seconds for a frame that is an error, from reading it to sending what is wrong with it."""

MAX_ID = 128
"""Most characters of an id that a client gives to a request."""

M = TypeVar("M", bound=BaseModel)


class Frames:
    """A WebSocket whose frames are JSON objects.

    id_field: the field with the id of the request that a frame belongs to; errors have it too.
    """

    def __init__(self, socket: WebSocket, service: Service, id_field: str) -> None:
        self._socket = socket
        self._limits = service.limits
        self._account = Account(service.share)
        self._id_field = id_field
        self._sending = anyio.Lock()
        self._scope = anyio.CancelScope()
        self._close: tuple[int, str] | None = None

    @asynccontextmanager
    async def open(self) -> AsyncIterator[TaskGroup]:
        """Accept the socket for the length of the block; the block's end cancels its tasks."""
        await self._accept()
        async with anyio.create_task_group() as tasks:
            self._scope = tasks.cancel_scope
            yield tasks
            tasks.cancel_scope.cancel()
        if self._close is not None:
            await self._send_close(*self._close)

    async def refuse(self, error: Exception) -> None:
        """Accept the socket, send the error in one frame, and close it: a browser hides the status of a refusal."""
        await self._accept()
        await self.tell(error)
        await self._send_close(1008, "refused")

    def end(self, code: int, reason: str) -> None:
        """Close the socket with this code and reason, and cancel the block of `open`."""
        self._close = self._close or (code, reason)
        self._scope.cancel()

    async def next(self, model: type[M]) -> tuple[M, int] | None:
        """Return the next good frame and its size; None once the client has gone. Bad frames get errors."""
        while True:
            await anyio.lowlevel.checkpoint()  # many small frames may have come at once
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return None
            frame = message.get("text") or message.get("bytes") or b""
            most = self._limits.max_frame_bytes
            try:
                if len(frame) > most:
                    what = f"the frame has more than {most:,} bytes, which is the most"
                    raise RequestError(what, status=413, code="frame_too_long")
                client = self._socket.scope[CALLER].account
                return await parse_frame(frame, model, client, self._account), len(frame)
            except RequestError as error:
                await self.tell(error, self._id_of(frame))

    async def tell(self, error: Exception, id: str | None = None) -> None:
        """Send an `error` frame. The socket can be used as before, at a slower pace if its errors are many."""
        await self.send(self.error_frame(error, id))
        await anyio.sleep(self._account.pause_s(ERROR_S))

    def error_frame(self, error: Exception, id: str | None = None) -> dict[str, Any]:
        """Return an error as a frame."""
        failure = failure_of(error)
        told = failure.body()["error"]
        if headers := failure.headers():
            told["headers"] = headers
        of = {} if id is None else {self._id_field: id}
        return {"type": "error", "status": failure.status, "error": told, **of}

    async def send(self, values: dict[str, Any]) -> None:
        """Send `values` as one JSON frame. Cancel the block of `open` if the client has gone, or does not read."""
        async with self._sending:
            try:
                with anyio.fail_after(self._limits.send_timeout_s):
                    await self._socket.send_text(json_of(values))
            except WebSocketDisconnect:
                self._scope.cancel()
                await anyio.lowlevel.checkpoint()
            except TimeoutError:
                self.end(1013, "what was sent is not read")
                await anyio.lowlevel.checkpoint()

    async def _send_close(self, code: int, reason: str) -> None:
        with anyio.move_on_after(CLOSE_S), suppress(RuntimeError, WebSocketDisconnect):  # it has gone meanwhile
            await self._socket.close(code, reason)

    async def _accept(self) -> None:
        await self._socket.accept(SUBPROTOCOL if SUBPROTOCOL in self._socket.scope["subprotocols"] else None)

    def _id_of(self, frame: str | bytes) -> str | None:
        """Return the id of a bad frame, if it can be read."""
        if len(frame) > self._limits.max_frame_bytes:
            return None
        try:
            check_num_values(frame)
            values = from_json(frame)
        except (ValueError, RequestError):
            return None
        id = values.get(self._id_field) if isinstance(values, dict) else None
        return id if isinstance(id, str) and 0 < len(id) <= MAX_ID else None
