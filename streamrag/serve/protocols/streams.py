"""`POST /v1/streams`: a client brings its own context, and sends it while it retrieves.

One request has the question and the context as lines of JSON (see `stream_body`), and is answered on the same
connection, from its first line on, by every event of the query as SSE. The model computes the context that has come
while more is on its way.
"""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrag.core import SourceEvent
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.sse import Write
from streamrag.serve.protocols.event_stream import respond_with_events, write_events
from streamrag.serve.protocols.stream_body import StreamBody
from streamrag.serve.service import Service
from streamrag.support.tasks import cancel_regardless


class PushedSource:
    """The retrieval of a client, which sends what it finds."""

    name = "pushed by a client"

    def __init__(self, body: StreamBody) -> None:
        self._body = body

    def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """Return the events of the client's lines."""
        return self._body.events()


def routes(service: Service) -> list[Route]:
    """Return the routes of this protocol."""

    async def streams(request: Request) -> Response:
        body = StreamBody(request.receive, service)
        caller = request.scope[CALLER]

        async def produce(write: Write) -> None:
            reader = asyncio.create_task(body.read(), name="streamrag reads a stream")
            try:
                first = await body.open_line()
                options, source = first.query_options(service), PushedSource(body)
                async with service.events(caller, "streams", first.query, source=source, **options) as events:
                    await write_events(write, events)
            finally:
                await cancel_regardless([reader])

        return await respond_with_events(request, service, produce, receive=body.wait_until_left)

    return [Route("/v1/streams", streams, methods=["POST"])]
