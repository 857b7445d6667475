"""`POST /v1/streams`: a client brings its own context, and sends it while it comes about.

One request has the question and the context as JSON lines (see `lines`), and is answered on the same connection, from
its first line on, by every event of the query as SSE. The model computes what has come while more is on its way.
"""

import asyncio
from collections.abc import AsyncIterator

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrag.core import SourceEvent
from streamrag.serve.gate import CALLER
from streamrag.serve.interfaces.ask import Telling, told_failure
from streamrag.serve.interfaces.lines import Lines
from streamrag.serve.service import Service
from streamrag.serve.sse import Write, respond
from streamrag.support.tasks import cancel_regardless


class PushedSource:
    """The retrieval of a client, which sends what it finds."""

    name = "pushed by a client"

    def __init__(self, lines: Lines) -> None:
        self._lines = lines

    def stream(self, query: str) -> AsyncIterator[SourceEvent]:
        """What its lines say."""
        return self._lines.events()


def routes(service: Service) -> list[Route]:
    """The interface's routes."""

    async def streams(request: Request) -> Response:
        lines = Lines(request.receive, service)
        caller = request.scope[CALLER]

        async def produce(write: Write) -> None:
            reading = asyncio.create_task(lines.read(), name="streamrag reads a stream")
            try:
                opening = await lines.opening()
                options = opening.of_query(service)
                source = PushedSource(lines)
                async with service.events(caller, "streams", opening.query, source=source, **options) as events:
                    telling = Telling()
                    async for event in events:
                        await write(telling.next(event))
            finally:
                await cancel_regardless([reading])

        return await respond(
            request, produce, failed=told_failure, send_timeout_s=service.limits.send_timeout_s, receive=lines.gone
        )

    return [Route("/v1/streams", streams, methods=["POST"])]
