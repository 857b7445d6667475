"""`POST /v1/retrieve`: what the service's retrieval brings for one query, as SSE, and no answer.

    retrieval_started, append | update | skipped | cut_short, ..., done

The last event is `done`, or `error`.
"""

import time
from contextlib import aclosing
from dataclasses import asdict

from pydantic import Field
from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrag.asked import MAX_QUERY_CHARACTERS
from streamrag.core import Append, Chunk, CutShort, Skipped, SourceEvent, Update, part_name
from streamrag.errors import SourceError, StreamRagError
from streamrag.retrieving import Retrieval
from streamrag.serve.bodies import StrictModel, read_body
from streamrag.serve.failures import RequestError
from streamrag.serve.gate import CALLER
from streamrag.serve.interfaces.ask import Telling, told_failure
from streamrag.serve.service import OpenQuery, Service
from streamrag.serve.sse import Write, respond
from streamrag.serve.wire import json_of
from streamrag.support.messages import short
from streamrag.support.tasks import LET_GO_S
from streamrag.telemetry import ChunkArrived, DocumentSkipped, RetrievalCutShort, RetrievalStarted

NAMES: dict[type[SourceEvent], str] = {
    Append: "append",
    Update: "update",
    Skipped: "skipped",
    CutShort: "cut_short",
}


class RetrieveRequest(StrictModel):
    """What to retrieve."""

    query: str = Field(max_length=MAX_QUERY_CHARACTERS, pattern=r"\S")
    deadline_s: float | None = Field(default=None, gt=0)


def routes(service: Service) -> list[Route]:
    """The interface's routes."""

    async def retrieve(request: Request) -> Response:
        asked = await read_body(request, RetrieveRequest)
        if service.source is None:
            raise RequestError(
                "this service retrieves nothing itself: bring the context to /v1/streams", status=404, code="no_source"
            )
        source = service.source
        most_s = service.limits.deadline_s
        deadline_s = most_s if asked.deadline_s is None else min(asked.deadline_s, most_s)

        async def produce(write: Write) -> None:
            retrieval = Retrieval(source, asked.query, let_go_s=LET_GO_S)
            caller = request.scope[CALLER]
            async with service.open(
                caller, "retrieve", asked.query, num_prompt_tokens=0, deadline_s=deadline_s
            ) as opened:
                began_s = time.monotonic()
                started = RetrievalStarted(0.0, asked.query)
                opened.note(started)
                await write(Telling().next(started))
                held: frozenset[Chunk] = frozenset()
                num_events = num_chunks = 0
                try:
                    async with aclosing(retrieval.events()) as events:
                        async for event in events:
                            at_s = time.monotonic() - began_s
                            held, num_new = _note(opened, event, at_s, held)
                            num_events, num_chunks = num_events + 1, num_chunks + num_new
                            values = {"at_s": at_s, **asdict(event)}
                            await write(ServerSentEvent(json_of(values), event=NAMES[type(event)]))
                except StreamRagError:
                    raise
                except Exception as error:  # a source is anybody's code; whatever it raises is a failed retrieval
                    raise SourceError(f"{part_name(source)} failed: {short(error)}") from error
                opened.is_answered = True
                done = {"at_s": time.monotonic() - began_s, "num_events": num_events, "num_chunks": num_chunks}
                await write(ServerSentEvent(json_of(done), event="done"))

        return await respond(request, produce, failed=told_failure, send_timeout_s=service.limits.send_timeout_s)

    return [Route("/v1/retrieve", retrieve, methods=["POST"])]


def _note(opened: OpenQuery, event: SourceEvent, at_s: float, held: frozenset[Chunk]) -> tuple[frozenset[Chunk], int]:
    """Tell the observers; the chunks that the context holds now, and how many of them are new."""
    match event:
        case Skipped():
            opened.note(DocumentSkipped(at_s, event.uri, event.reason))
            return held, 0
        case CutShort():
            opened.note(RetrievalCutShort(at_s, event.reason))
            return held, 0
        case Append():
            chunks: tuple[Chunk, ...] = (event.chunk,)
            holds = held | {event.chunk}
        case Update():
            chunks = event.chunks
            holds = frozenset(chunks)
    new = [chunk for chunk in dict.fromkeys(chunks) if chunk not in held]
    for chunk in new:
        opened.note(ChunkArrived(at_s, chunk))
    return holds, len(new)
