"""One WebSocket of `/v1/responses`: reads frames, gives each to its lane, and sends what lanes have to say."""

from anyio.abc import TaskGroup
from starlette.websockets import WebSocket

from streamrag.serve.connections.json_socket import Frames
from streamrag.serve.failures import RequestError
from streamrag.serve.interfaces.responses.lanes import CreateEvent, Lane
from streamrag.serve.interfaces.responses.states import StateStore
from streamrag.serve.open_queries import Caller
from streamrag.serve.service import Service


class Connection(Frames):
    """Lives as long as the socket, and takes everything with it that its lanes hold."""

    def __init__(self, service: Service, states: StateStore, socket: WebSocket, caller: Caller) -> None:
        super().__init__(socket, service, "stream_id")
        self.service = service
        self.states = states
        self.caller = caller
        self.num_waiting_bytes = 0
        """Of requests that lanes have not come to."""
        self._lanes: dict[str | None, Lane] = {}

    async def run(self) -> None:
        """Until the client goes away, or reads so slowly that it might as well."""
        try:
            async with self.open() as tasks:
                while (frame := await self.next(CreateEvent)) is not None:
                    request, num_bytes = frame
                    try:
                        self._lane(request.stream_id, tasks).take(request, num_bytes)
                    except RequestError as error:
                        await self.tell(error, request.stream_id)
        finally:
            self.states.forget(self)

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
