"""One WebSocket of `/v1/responses`: reads frames, gives each to its lane, and sends what lanes have to say."""

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from starlette.websockets import WebSocket, WebSocketDisconnect

from streamrag.serve.bodies import parsed
from streamrag.serve.failures import RequestError, failure_of
from streamrag.serve.interfaces.responses.lanes import CreateEvent, Lane
from streamrag.serve.interfaces.responses.states import StateStore
from streamrag.serve.interfaces.responses.writing import ServerEvent
from streamrag.serve.service import Caller, Service
from streamrag.serve.wire import json_of


class Connection:
    """Lives as long as the socket, and takes everything with it that its lanes hold."""

    def __init__(self, service: Service, states: StateStore, socket: WebSocket, caller: Caller) -> None:
        self.service = service
        self.states = states
        self.caller = caller
        self.num_waiting_bytes = 0
        """Of requests that lanes have not come to."""
        self._socket = socket
        self._sending = anyio.Lock()
        self._scope = anyio.CancelScope()
        self._lanes: dict[str | None, Lane] = {}

    async def run(self) -> None:
        """Until the client goes away, or reads so slowly that it might as well."""
        await self._socket.accept()
        try:
            async with anyio.create_task_group() as tasks:
                self._scope = tasks.cancel_scope
                await self._read(tasks)
                tasks.cancel_scope.cancel()
        finally:
            self.states.forget(self)

    async def _read(self, tasks: TaskGroup) -> None:
        while True:
            message = await self._socket.receive()
            if message["type"] == "websocket.disconnect":
                return
            frame = message.get("text") or message.get("bytes") or b""
            try:
                if len(frame) > self.service.limits.max_frame_bytes:
                    raise RequestError(
                        f"the frame has more than {self.service.limits.max_frame_bytes:,} bytes, which is the most",
                        status=413,
                        code="frame_too_long",
                    )
                request = parsed(frame, CreateEvent)
            except RequestError as error:
                await self.tell(error)
                continue
            try:
                self._lane(request.stream_id, tasks).take(request, len(frame))
            except RequestError as error:
                await self.tell(error, request.stream_id)

    def _lane(self, stream_id: str | None, tasks: TaskGroup) -> Lane:
        if stream_id in self._lanes:
            return self._lanes[stream_id]
        most = self.service.limits.max_queries_per_client
        if len(self._lanes) >= most:
            idle = [key for key, lane in self._lanes.items() if lane.is_idle]
            if not idle:
                raise RequestError(
                    f"{most} streams of this connection are busy, which is the most",
                    status=429,
                    code="too_many_streams",
                    param="stream_id",
                )
            self._lanes.pop(idle[0]).scope.cancel()
        lane = self._lanes[stream_id] = Lane(self)
        tasks.start_soon(lane.run)
        return lane

    async def tell(self, error: Exception, stream_id: str | None = None) -> None:
        """An `error` event; the connection can be used as before."""
        failure = failure_of(error)
        told = failure.body()["error"]
        if headers := failure.headers():
            told["headers"] = headers
        event: ServerEvent = {"type": "error", "status": failure.status, "error": told}
        await self.send(event if stream_id is None else {**event, "stream_id": stream_id})

    async def send(self, event: ServerEvent) -> None:
        """One frame; everything is cancelled if the client has gone, or does not read."""
        async with self._sending:
            try:
                with anyio.fail_after(self.service.limits.send_timeout_s):
                    await self._socket.send_text(json_of(event))
            except (TimeoutError, WebSocketDisconnect):
                self._scope.cancel()
                await anyio.lowlevel.checkpoint()
