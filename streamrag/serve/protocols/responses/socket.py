"""One WebSocket of `/v1/responses`: each request goes to the stream that its `stream_id` names."""

from anyio.abc import TaskGroup
from starlette.websockets import WebSocket

from streamrag.serve.connections.json_socket import Frames
from streamrag.serve.failures import RequestError
from streamrag.serve.open_queries import Caller
from streamrag.serve.protocols.responses.socket_stream import CreateEvent, SocketContext, SocketStream
from streamrag.serve.protocols.responses.states import StateStore
from streamrag.serve.service import Service


class ResponseSocket(Frames):
    """A WebSocket of the Responses API. Its streams, and the states that are not stored, end with it."""

    def __init__(self, service: Service, states: StateStore, socket: WebSocket, caller: Caller) -> None:
        super().__init__(socket, service, "stream_id")
        self._context = SocketContext(service, states, caller, self)
        self._streams: dict[str | None, SocketStream] = {}

    async def run(self) -> None:
        """Serve the socket until the client leaves or reads too slowly."""
        try:
            async with self.open() as tasks:
                while (frame := await self.next(CreateEvent)) is not None:
                    request, num_bytes = frame
                    try:
                        self._stream(request.stream_id, tasks).put(request, num_bytes)
                    except RequestError as error:
                        await self.tell(error, request.stream_id)
        finally:
            self._context.states.forget(self._context.caller.client, self)

    def _stream(self, stream_id: str | None, tasks: TaskGroup) -> SocketStream:
        if stream_id in self._streams:
            return self._streams[stream_id]
        most = self._context.service.limits.max_queries_per_client
        if len(self._streams) >= most:
            idle = [key for key, stream in self._streams.items() if stream.is_idle]
            if not idle:
                raise RequestError(
                    f"{most} streams of this connection are busy, which is the most",
                    status=429,
                    code="too_many_streams",
                    param="stream_id",
                )
            self._streams.pop(idle[0]).scope.cancel()
        stream = self._streams[stream_id] = SocketStream(self._context)
        tasks.start_soon(stream.run)
        return stream
