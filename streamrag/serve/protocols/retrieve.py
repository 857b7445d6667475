"""`POST /v1/retrieve`: what the service's retrieval finds for one query, as SSE, and no answer.

    retrieval_started, append | update | skipped | cut_short, ..., done

The last event is `done`, or `error`.
"""

import time
from contextlib import aclosing

from pydantic import Field
from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrag.core import Append, Chunk, CutShort, Skipped, Source, SourceEvent, part_name
from streamrag.errors import SourceError, StreamRagError
from streamrag.query.options import MAX_QUERY_CHARACTERS
from streamrag.query.retrieval import Retrieval
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import StrictModel, read_body
from streamrag.serve.connections.sse import Write
from streamrag.serve.failures import RequestError
from streamrag.serve.open_queries import OpenQuery
from streamrag.serve.protocols.event_stream import encode, respond_with_events
from streamrag.serve.service import Service
from streamrag.serve.wire import json_of
from streamrag.support.messages import short
from streamrag.support.tasks import LET_GO_S
from streamrag.telemetry import ChunkArrived, DocumentSkipped, RetrievalCutShort, RetrievalStarted
from streamrag.trace.events import encode_event


class RetrieveRequest(StrictModel):
    """A query for the service's retrieval."""

    query: str = Field(max_length=MAX_QUERY_CHARACTERS, pattern=r"\S")
    deadline_s: float | None = Field(default=None, gt=0)


def routes(service: Service) -> list[Route]:
    """Return the routes of this protocol."""

    async def retrieve(request: Request) -> Response:
        body = await read_body(request, RetrieveRequest)
        if service.source is None:
            raise RequestError(
                "this service retrieves nothing itself: bring the context to /v1/streams", status=404, code="no_source"
            )
        source, caller = service.source, request.scope[CALLER]
        most_s = service.limits.deadline_s
        deadline_s = most_s if body.deadline_s is None else min(body.deadline_s, most_s)

        async def produce(write: Write) -> None:
            place = service.open(caller, "retrieve", body.query, num_prompt_tokens=0, deadline_s=deadline_s)
            async with place as opened:
                await _Retrieval(opened, source, body.query).write(write)

        return await respond_with_events(request, service, produce)

    return [Route("/v1/retrieve", retrieve, methods=["POST"])]


class _Retrieval:
    """A retrieval, written as SSE and told to the observers."""

    def __init__(self, opened: OpenQuery, source: Source, query: str) -> None:
        self._opened = opened
        self._source = source
        self._query = query
        self._began_s = time.monotonic()
        self._context: frozenset[Chunk] = frozenset()
        self._num_chunks = 0

    async def write(self, write: Write) -> None:
        """Write the events of the retrieval, from first to last.

        :raises SourceError: the source fails, with any exception.
        """
        started = RetrievalStarted(0.0, self._query)
        self._opened.note(started)
        await write(encode(started))
        num_events = 0
        try:
            async with aclosing(Retrieval(self._source, self._query, let_go_s=LET_GO_S).events()) as events:
                async for event in events:
                    num_events += 1
                    at_s = time.monotonic() - self._began_s
                    self._note(event, at_s)
                    kind, fields = encode_event(event)
                    await write(ServerSentEvent(json_of({"at_s": at_s, **fields}), event=kind))
        except StreamRagError:
            raise
        except Exception as error:  # a source is anybody's code; whatever it raises is a failed retrieval
            raise SourceError(f"{part_name(self._source)} failed: {short(error)}") from error
        self._opened.is_answered = True
        at_s = time.monotonic() - self._began_s
        done = {"at_s": at_s, "num_events": num_events, "num_chunks": self._num_chunks}
        await write(ServerSentEvent(json_of(done), event="done"))

    def _note(self, event: SourceEvent, at_s: float) -> None:
        """Tell the observers of an event, and of each chunk that is new in the context."""
        if isinstance(event, Skipped):
            self._opened.note(DocumentSkipped(at_s, event.uri, event.reason))
            return
        if isinstance(event, CutShort):
            self._opened.note(RetrievalCutShort(at_s, event.reason))
            return
        chunks = (event.chunk,) if isinstance(event, Append) else event.chunks
        for chunk in dict.fromkeys(chunks):
            if chunk not in self._context:
                self._num_chunks += 1
                self._opened.note(ChunkArrived(at_s, chunk))
        self._context = self._context.union(chunks) if isinstance(event, Append) else frozenset(chunks)
