"""`POST /v1/ask`: one question, answered by every event of its query, in the service's own form, as SSE.

    retrieval_started, chunk_arrived, context_changed, ..., tokens_generated, ..., answered

The last event is `answered`, or `error`.
"""

from collections.abc import Sequence
from typing import cast

from pydantic import Field
from sse_starlette.event import ServerSentEvent
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from streamrag.asked import QueryOptions
from streamrag.core import Chunk
from streamrag.serve.connections.gate import CALLER
from streamrag.serve.connections.json_body import StrictModel, read_body
from streamrag.serve.connections.sse import Write, respond
from streamrag.serve.failures import Failure
from streamrag.serve.interfaces.chat import Message
from streamrag.serve.request_fields import SAMPLING, sampling, turn_of
from streamrag.serve.service import Service
from streamrag.serve.wire import json_of, name_of, values_of
from streamrag.telemetry import ContextChanged, Event

OF_QUERY = {"max_context_tokens", "deadline_s", "late_share", "overlap"}


class Options(StrictModel):
    """The options of a query, as far as a client may choose them."""

    system: str | None = None
    history: list[Message] = Field(default=[], max_length=1000)
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: list[str] | None = None
    max_context_tokens: int | None = None
    deadline_s: float | None = None
    late_share: float | None = None
    overlap: bool | None = None

    def of_query(self, service: Service) -> QueryOptions:
        """As a pipeline takes them.

        :raises RequestError, ConfigurationError: one of them cannot work.
        """
        params = sampling(service.params, **self.model_dump(include=SAMPLING))
        history = [turn_of(each.role, each.content, f"history.{i}") for i, each in enumerate(self.history)]
        given = self.model_dump(include=OF_QUERY, exclude_none=True)
        if self.system:
            given["system"] = service.system_text(self.system)
        return cast(QueryOptions, {"params": params, "history": history, **given})


class AskRequest(Options):
    """A question with its options."""

    question: str


def routes(service: Service) -> list[Route]:
    """The interface's routes."""

    async def ask(request: Request) -> Response:
        asked = await read_body(request, AskRequest)
        options = asked.of_query(service)

        async def produce(write: Write) -> None:
            async with service.events(request.scope[CALLER], "ask", asked.question, **options) as events:
                telling = Telling()
                async for event in events:
                    await write(telling.next(event))

        return await respond(request, produce, failed=told_failure, send_timeout_s=service.limits.send_timeout_s)

    return [Route("/v1/ask", ask, methods=["POST"])]


class Telling:
    """A query's events as SSE, each told of once and in order."""

    def __init__(self) -> None:
        self._context: tuple[Chunk, ...] = ()

    def next(self, event: Event) -> ServerSentEvent:
        """The one that comes next."""
        values = values_of(event, self._context)
        if isinstance(event, ContextChanged):
            self._context = event.chunks
        return ServerSentEvent(json_of(values), event=name_of(event))


def told_failure(failure: Failure) -> Sequence[ServerSentEvent]:
    """What a stream of events ends with when it fails."""
    return [ServerSentEvent(failure.json(), event="error")]
