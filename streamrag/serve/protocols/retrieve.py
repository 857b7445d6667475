"""`POST /v1/retrieve`: the service's retrieval for one query as SSE, without an answer.

    retrieval_started, append | update | skipped | cut_short, ..., done

The last event is `done`, or `error`.
"""

import time
from contextlib import aclosing

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrag.core import Append, Chunk, CutShort, Skipped, Source, part_name
from streamrag.core.retrieval import Retrieval
from streamrag.errors import SourceError, StreamRagError
from streamrag.query.options import MAX_QUERY_CHARACTERS
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import StrictModel, encode_json, read_body
from streamrag.serve.connections.sse import Write, format_event
from streamrag.serve.failures import RequestError
from streamrag.serve.open_queries import OpenQuery
from streamrag.serve.protocols.event_encoder import encode_sse, respond_with_events
from streamrag.serve.service import Service
from streamrag.support.messages import short_repr
from streamrag.support.tasks import LET_GO_S
from streamrag.telemetry import ChunkArrived, DocumentSkipped, RetrievalCutShort, RetrievalStarted
from streamrag.trace.events import encode_event


class RetrieveRequest(StrictModel):
    """A query for the service's retrieval."""

    query: str = Field(max_length=MAX_QUERY_CHARACTERS, pattern=r"\S")
    deadline_s: float | None = Field(default=None, gt=0)


def routes(service: Service) -> list[Route]:
    """Return `POST /v1/retrieve`, which raises RequestError (404) if the service has no source."""

    async def retrieve(request: Request) -> Response:
        """Respond with the events of the service's retrieval, within the query's deadline."""
        body = await read_body(request, RetrieveRequest)
        if service.source is None:
            message = "this service has no source: send your own context to /v1/streams"
            raise RequestError(message, status=404, code="no_source")
        source, caller, max_s = service.source, request.scope[CALLER], service.limits.deadline_s
        deadline_s = max_s if body.deadline_s is None else min(body.deadline_s, max_s)

        async def produce(write: Write) -> None:
            async with service.open(
                caller, "retrieve", body.query, num_prompt_tokens=0, deadline_s=deadline_s
            ) as opened:
                await _write_retrieval(write, opened, source, body.query)

        return await respond_with_events(request, service, produce)

    return [Route("/v1/retrieve", retrieve, methods=["POST"])]


async def _write_retrieval(write: Write, opened: OpenQuery, source: Source, query: str) -> None:
    """Write the events of a retrieval, mark the query as answered, and write `done` with numbers of events and chunks.

    Reports each event too, but only chunks that were not in the context before. Raises SourceError if the source fails.
    """
    start_s = time.monotonic()
    started = RetrievalStarted(0.0, query)
    opened.note(started)
    await write(encode_sse(started))
    context: frozenset[Chunk] = frozenset()
    num_events = num_chunks = 0
    try:
        async with aclosing(Retrieval(source, query, let_go_s=LET_GO_S).events()) as events:
            async for event in events:
                num_events += 1
                at_s = time.monotonic() - start_s
                if isinstance(event, Skipped):
                    opened.note(DocumentSkipped(at_s, event.uri, event.reason))
                elif isinstance(event, CutShort):
                    opened.note(RetrievalCutShort(at_s, event.reason))
                else:
                    chunks = dict.fromkeys((event.chunk,) if isinstance(event, Append) else event.chunks)
                    new = [chunk for chunk in chunks if chunk not in context]
                    for chunk in new:
                        opened.note(ChunkArrived(at_s, chunk))
                    num_chunks += len(new)
                    context = context.union(new) if isinstance(event, Append) else frozenset(chunks)
                kind, fields = encode_event(event)
                await write(format_event(encode_json({"at_s": at_s, **fields}), event=kind))
    except StreamRagError:
        raise
    except Exception as error:  # a third-party source may raise anything
        raise SourceError(f"{part_name(source)} failed: {short_repr(error)}") from error
    opened.is_answered = True
    done = {"at_s": time.monotonic() - start_s, "num_events": num_events, "num_chunks": num_chunks}
    await write(format_event(encode_json(done), event="done"))
